"""Rotations of the transformers of diffusers, whose configs name a class, not a model type.

The table below is by hand, from the code of diffusers 0.42; a test compares each row with the
tables that the class itself computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posenc._contract import checks
from posenc.configs.reader import Config
from posenc.numerics.axes import Axes, Axial, Sections

CLASS = "_class_name"
_ROTARY = re.compile(r"rope|rotary|^theta|axes_dim")
_MOST_COORDINATES = 16


def _thirds(width: int) -> tuple[int, int, int]:
    side = width // 6 * 2
    return width - 2 * side, side, side


def _quarter_first(width: int) -> tuple[int, int, int]:
    return width // 4, width // 8 * 3, width // 8 * 3


def _halves(width: int) -> tuple[int, int]:
    return width // 2, width // 2


@dataclass(frozen=True, slots=True)
class _Model:
    """How a class rotates."""

    # The key with the channels of each coordinate, or how a head is divided among them.
    axes: str | Callable[[int], Sequence[int]]
    # A key, or the number in the code.
    base: str | float = 10_000.0
    # The key, or those of the width of the model and of its heads; None for the sum of the axes.
    head_dim: str | tuple[str, str] | None = "attention_head_dim"
    interleaved: bool = True
    # Further keys that name a rotation, and do not bear on it.
    others: tuple[str, ...] = ()
    # A key with a factor for each coordinate: it scales the base as NTK does, or divides positions.
    ntk: str | None = None
    slower: str | None = None
    # Pairs of one range of rates, dealt out in turn; the key has how many each coordinate gets.
    sections: bool = False


_FLUX, _HEADS = "axes_dims_rope", ("hidden_size", "num_attention_heads")
_WAN = _Model(_thirds, others=("rope_max_seq_len", "rope_temporal_skip_len"))
_HUNYUAN = _Model("rope_axes_dim", "rope_theta")
_QWEN = _Model(_FLUX, others=("use_layer3d_rope",))
_Z = _Model("axes_dims", "rope_theta", ("dim", "n_heads"), others=("axes_lens",))
_JOY = _Model("rope_dim_list", "theta", _HEADS, others=("rope_type",))
_COG = "use_rotary_positional_embeddings"
_MODELS: dict[str, _Model] = {
    "AnyFlowTransformer3DModel": _WAN,
    "BriaFibo2Transformer2DModel": _Z,
    "BriaFiboTransformer2DModel": _Model(_FLUX, "rope_theta"),
    "BriaTransformer2DModel": _Model(_FLUX, "rope_theta"),
    "ChromaTransformer2DModel": _Model(_FLUX),
    "ChronoEditTransformer3DModel": _WAN,
    "CogVideoXTransformer3DModel": _Model(_quarter_first, others=(_COG,)),
    "CogView4Transformer2DModel": _Model(_halves, interleaved=False, others=("rope_axes_dim",)),
    "ConsisIDTransformer3DModel": _Model(_quarter_first, others=(_COG,)),
    "Cosmos3OmniTransformer": _Model(
        "rope_axes_dim", "rope_theta", "head_dim", interleaved=False, sections=True
    ),
    "CosmosTransformer3DModel": _Model(_thirds, interleaved=False, ntk="rope_scale"),
    "EasyAnimateTransformer3DModel": _Model(_quarter_first),
    "Flux2Transformer2DModel": _Model(_FLUX, "rope_theta"),
    "Flux3Transformer2DModel": _Model(_FLUX, "rope_theta"),
    "FluxTransformer2DModel": _Model(_FLUX),
    "GlmImageTransformer2DModel": _Model(_halves, interleaved=False),
    "HeliosTransformer3DModel": _Model("rope_dim", "rope_theta"),
    "HiDreamImageTransformer2DModel": _Model(_FLUX),
    "HunyuanDiT2DModel": _Model(_halves),
    "HunyuanImageTransformer2DModel": _HUNYUAN,
    "HunyuanVideo15Transformer3DModel": _HUNYUAN,
    "HunyuanVideoFramepackTransformer3DModel": _HUNYUAN,
    "HunyuanVideoTransformer3DModel": _HUNYUAN,
    "Ideogram4Transformer2DModel": _Model(
        "mrope_section", "rope_theta", interleaved=False, sections=True
    ),
    "JoyImageEditPlusTransformer3DModel": _JOY,
    "JoyImageEditTransformer3DModel": _JOY,
    "Kandinsky5Transformer3DModel": _Model("axes_dims", head_dim=None),
    "Kandinsky6Transformer3DModel": _Model(
        "axes_dims", head_dim=None, slower="scale_factor", others=("axes_dims_a", "ca_rope")
    ),
    "Krea2Transformer2DModel": _Model(_FLUX, "rope_theta"),
    "LongCatImageTransformer2DModel": _Model(_FLUX),
    "Lumina2Transformer2DModel": _Model("axes_dim_rope", head_dim=_HEADS, others=("axes_lens",)),
    "MotifVideoTransformer3DModel": _HUNYUAN,
    "NucleusMoEImageTransformer2DModel": _QWEN,
    "OvisImageTransformer2DModel": _Model(_FLUX),
    "PRXTransformer2DModel": _Model("axes_dim", "theta", ("hidden_size", "num_heads")),
    "QwenImage21Transformer2DModel": _Model(_FLUX),
    "QwenImageTransformer2DModel": _QWEN,
    "SanaVideoTransformer3DModel": _WAN,
    "SkyReelsV2Transformer3DModel": _WAN,
    "WanAnimateTransformer3DModel": _WAN,
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": _WAN,
    "ZImageTransformer2DModel": _Z,
}
# Classes that rotate in a way that RoPE does not have.
_REFUSED = {
    "AllegroTransformer3DModel": "each coordinate has halves of its own",
    "ErnieImageTransformer2DModel": "the channels of a pair have different angles",
    "LTX2VideoTransformer3DModel": "each head has rates of its own",
    "LTXVideoTransformer3DModel": "each head has rates of its own",
    "MochiTransformer3DModel": "its rates are learned, and each head has its own",
}


def is_diffusers(config: Mapping[str, Any]) -> bool:
    """Whether a config is one of diffusers, which a model that was not loaded gives no class."""
    marks = {CLASS, "_diffusers_version", "_use_default_values"}
    return not marks.isdisjoint(config) and "model_type" not in config


def arguments(config: Config) -> dict[str, Any]:
    """The arguments of `RoPE` for a config of diffusers; ``config.sources`` gets their keys."""
    name = str(config.top.get(CLASS))
    if name in _REFUSED:
        rule = f"{CLASS} {name} rotates unlike RoPE: {_REFUSED[name]}"
        hint = "Use functional.rotate with its tables; interop.huggingface.patch may take it."
        raise ValueError(f"{config.who}: {rule}.\n  {hint}")
    if name not in _MODELS:
        rule = f"{CLASS} must be a transformer of diffusers whose rotation posenc knows"
        hint = "Construct RoPE(head_dim, axes=axes.Axial(...)) directly."
        if CLASS not in config.top:
            hint = "Pass the model: a config has no class before the model is saved."
        raise config.error(rule, name, hint)
    model = _MODELS[name]
    _refuse_unknown(config, model)
    widths = _widths(config, model)
    head_dim = _head_dim(config, model, widths)
    if widths is None:
        assert callable(model.axes)
        widths = [width for width in model.axes(head_dim) if width]
        config.sources["axes"] = config.sources["head_dim"]
    base = model.base
    config.sources["base"] = base if isinstance(base, str) else CLASS
    if isinstance(base, str):
        base = checks.base(config.who, _need(config, base), base)
    axes: Axes = Axial(tuple(widths))
    if model.sections:
        axes = Sections(tuple(widths), interleaved=True)
    config.sources["interleaved"] = CLASS
    inv_freq = _inv_freq(config, model, widths, base)
    return {
        "head_dim": head_dim,
        "base": base if inv_freq is None else 10_000.0,
        "rotary_dim": head_dim,
        "interleaved": model.interleaved,
        "axes": axes,
        "inv_freq": inv_freq,
    }


def _refuse_unknown(config: Config, model: _Model) -> None:
    """Refuse keys that name a rotation and that this class does not have."""
    known = {model.axes, model.base, model.ntk, model.slower, *model.others}
    for key, value in config.top.items():
        if value is not None and key not in known and _ROTARY.search(str(key)):
            rule = f"{key} must be a key of {config.top[CLASS]}"
            raise config.error(rule, key, "Remove it, or construct RoPE(...) directly.")
    if config.top.get(_COG) is False:
        raise config.error(f"{_COG} must be true", False, "Without it the model has sinusoids.")


def _need(config: Config, key: str) -> Any:
    if config.top.get(key) is None:
        rule = f"{key} must be in the config of {config.top[CLASS]}"
        raise config.error(rule, None, f"Add {key}.")
    return config.top[key]


def _numbers(config: Config, key: str) -> list[Any]:
    value = _need(config, key)
    if not isinstance(value, (list, tuple)) or not 0 < len(value) <= _MOST_COORDINATES:
        raise config.error(f"{key} must be a list, of a number for each coordinate", value)
    return list(value)


def _widths(config: Config, model: _Model) -> list[int] | None:
    """Channels of each coordinate, if a key has them; those without channels are left out."""
    if not isinstance(model.axes, str):
        return None
    config.sources["axes"] = model.axes
    given = _numbers(config, model.axes)
    counts = [checks.integer(config.who, model.axes, width, least=0) for width in given]
    return [width for width in counts if width]


def _head_dim(config: Config, model: _Model, widths: list[int] | None) -> int:
    if model.head_dim is None:
        assert widths is not None
        config.sources["head_dim"] = config.sources["axes"]
        return sum(widths)
    if isinstance(model.head_dim, str):
        return checks.even(config.who, model.head_dim, config.count("head_dim", model.head_dim))
    width, heads = (config.count("head_dim", key) for key in model.head_dim)
    config.sources["head_dim"] = " / ".join(model.head_dim)
    return checks.even(config.who, config.sources["head_dim"], width // heads)


def _inv_freq(
    config: Config, model: _Model, widths: list[int], base: float
) -> tuple[float, ...] | None:
    """The rates of all pairs, if the coordinates differ in more than their widths."""
    key = model.ntk or model.slower
    if key is None:
        return None
    factors = [checks.positive_float(config.who, key, each) for each in _numbers(config, key)]
    if len(factors) != len(widths):
        raise config.error(f"{key} must have a number for each of {len(widths)} axes", factors)
    config.sources["inv_freq"] = key
    rates: list[float] = []
    for width, factor in zip(widths, factors, strict=True):
        own = base * factor ** (width / (width - 2)) if model.ntk and width > 2 else base
        slower = factor if model.slower else 1.0
        rates += [own ** (-2 * i / width) / slower for i in range(width // 2)]
    return tuple(rates)
