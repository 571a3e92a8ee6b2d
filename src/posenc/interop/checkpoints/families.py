"""Model families: the heads that a config describes, and the rows that a tensor's name implies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from posenc import configs
from posenc._contract import checks
from posenc.configs import model_defaults, rotation, text_part
from posenc.interop.checkpoints import layouts
from posenc.interop.checkpoints.layouts import Heads, Layout

Config = Mapping[str, Any]

# Tests build a model of each of these, convert it, and compare its logits.
CONVERTED = configs.types_with("converted")
# Families whose layout is set by the config's `rope_interleave`.
SWITCHED = CONVERTED & configs.types_with("rope_interleave")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_FUSED = ("qkv", "qkv_grouped", "qkv_codegen")

_ROLES = {
    **dict.fromkeys(("q_proj", "q_b_proj", "query", "wq"), "q"),
    **dict.fromkeys(("k_proj", "key", "wk"), "k"),
    **dict.fromkeys(("qkv_proj", "query_key_value", "Wqkv", "wqkv", "W_pack", "c_attn"), "qkv"),
    "kv_a_proj_with_mqa": "kv_a",
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm", "q_layer_norm"), "norm"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm", "k_layer_norm"), "norm"),
}
# Tensors of a projection that have a row for each output channel.
_ROW_PARTS = re.compile(
    r"(base_layer\.)?(weight|bias|weight_scale|weight_scale_inv|weight_packed|SCB)"
    r"|lora_B(\.\w+)?(\.weight|\.bias)?|lora_magnitude_vector(\.\w+)*|ia3_l(\.\w+)?"
)
# The other tensors of a projection, which stay as they are.
_OTHER_PARTS = re.compile(
    r"lora_A(\.\w+)?(\.weight)?"
    r"|(base_layer\.)?(weight_shape|weight_g_idx|weight_format)|(input|activation|output|[qkv])_scale"
)
_NORM_PARTS = re.compile(r"(norms\.\d+\.)?(weight|bias)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d{1,9})\.")
# Tensors of the text model, in a checkpoint that has other towers too.
_TEXT = re.compile(
    r"(^|\.)(language_model|text_model|mtp)\.|^(base_model\.model\.)?model\.layers\."
)


@dataclass(frozen=True)
class Model:
    """The heads, family and layouts of a checkpoint, from its config and the arguments."""

    heads: Callable[[int], Heads]  # the heads of a layer, by its index
    family: str | None = None  # the model_type
    layout: Layout | None = None  # that the family's own code reads; None if unknown
    fused: str | None = None  # the kind of a fused projection
    towers: bool = False  # whether there are towers other than the text model

    def kind(self, name: str) -> str | None:
        """The kind of a tensor's rows, as in `permute`, or None for a tensor that stays."""
        words = name.split(".")
        at = _role_index(words)
        if at is None or (self.towers and not _TEXT.search(name)):
            return None
        role, part = _ROLES[words[at]], ".".join(words[at + 1 :])
        if role == "norm":
            return "norm" if _NORM_PARTS.fullmatch(part) else None
        if _OTHER_PARTS.fullmatch(part):
            return None
        if not _ROW_PARTS.fullmatch(part):
            rule = "a projection must be stored by rows, because conversion moves rows"
            checks.fail("convert", rule, name, _DEQUANTISE)
        if role == "qkv" and self.fused is None:
            rule = "fused must be given, because the family is not known"
            hint = 'Pass fused="qkv" (queries, keys, values) or "qkv_grouped" (head by head).'
            checks.fail("convert", rule, f"{self.family} with {name}", hint)
        if role == "qkv":
            return self.fused
        return "q_gated" if role == "q" and "gated" in model_defaults(self.family) else role

    def order(self, name: str, shape: Sequence[int], to: Layout) -> Tensor | None:
        """Where each row of a tensor comes from, or None for a tensor that stays."""
        kind, size = self.kind(name), math.prod(shape)
        # A tensor without elements stays, however many rows its shape claims.
        if kind is None or not size or (size == 1 and name.endswith(("_scale", "_scale_inv"))):
            return None
        heads = self.heads(layer_of(name))
        rows = layouts.projection_rows(kind, heads, shape)
        if kind == "norm" or (shape and shape[0] == rows.total):
            return layouts.order(rows, heads, to)
        rule = f"{name} must have {rows.total} rows by {heads}"
        hint = "Check the config or the arguments."
        if not name.endswith((".weight", ".bias")) or (len(shape) == 2 and shape[1] == 1):
            hint = _DEQUANTISE
        checks.fail("convert", rule, f"shape {tuple(shape)}", hint)


_DEQUANTISE = "If it is quantised in blocks, convert the original and quantise the result."


def layer_of(name: str) -> int:
    """The layer a tensor belongs to."""
    found = _LAYER.search(name)
    return int(found[1]) if found else 0


def module_of(name: str) -> str:
    """The attention module that a tensor of queries or keys is in."""
    words = name.split(".")
    return ".".join(words[: _role_index(words)])


def _role_index(words: Sequence[str]) -> int | None:
    """Where the name of a projection or norm is among the words of a tensor's name."""
    if "linear_attn" in words:
        return None
    return next((i for i in range(len(words) - 1, -1, -1) if words[i] in _ROLES), None)


class Overrides(NamedTuple):
    """Arguments that override the values of the config, unless they are None."""

    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rotary_dim: int | None = None
    fused: str | None = None


def from_config(config: Config, overrides: Overrides = Overrides()) -> Model:  # noqa: B008
    """The model that a config and the caller's arguments describe."""
    text, within = text_part(config)
    towers = bool(within) or "vision_config" in config or "audio_config" in config
    family = text.get("model_type")
    family = family if isinstance(family, str) else None
    _refuse(text)
    for name, value in overrides._asdict().items():
        if name != "fused":
            checks.optional(checks.integer, "convert", name, value)
    if overrides.fused is not None:
        checks.choice("convert", "fused", overrides.fused, _FUSED)

    found = configs.open_config(text, "convert")
    fused = overrides.fused or model_defaults(family).get("fused")
    layout: Layout | None = None
    if family in CONVERTED:
        layout = "interleaved" if rotation.family_layout(found)[0] else "half"
        fused = fused or "qkv"
    return Model(partial(_heads, found, overrides), family, layout, fused, towers)


def _heads(config: configs.reader.Config, overrides: Overrides, layer: int) -> Heads:
    top, model = config.top, config.model

    def first(*keys: str) -> Any:
        for key in keys:
            value = top.get(key)
            if isinstance(value, (list, tuple)):
                value = value[layer] if layer < len(value) else None
            if value is not None:
                return checks.integer("convert", key, value, least=0)
        return None

    num_heads = overrides.num_heads or first(*_HEADS) or model.get("num_attention_heads")
    if num_heads is None:
        rule, got = "the config must have num_attention_heads", f"keys {sorted(map(str, top))[:8]}"
        hint = "Pass config (--config), the model's config.json, or num_heads and head_dim."
        checks.fail("convert", rule, got, hint)
    kv_heads = first("num_key_value_heads", "num_kv_heads")
    if config.kind == "falcon" and not top.get("new_decoder_architecture"):
        kv_heads = 1 if top.get("multi_query", True) else None
    elif isinstance(top.get("attn_config"), Mapping):
        kv_heads = top["attn_config"].get("kv_n_heads")
    kv_heads = overrides.num_kv_heads or kv_heads or model.get("num_key_value_heads")
    rope, latent = first("qk_rope_head_dim"), first("kv_lora_rank")
    if latent is not None and rope is not None:
        width = (first("qk_nope_head_dim") or 0) + rope
        return Heads(num_heads, width, num_heads, rope, last=True, latent=latent)
    # Without latent attention, head_dim includes the channels of qk_rope_head_dim.
    known = {"qk_rope_head_dim": None, "head_dim": first("head_dim")}
    own = configs.reader.at_layer(config, layer, **dict.fromkeys(_HEADS, num_heads), **known)
    width = overrides.head_dim or rotation.head_dim(own, None)
    rotary = overrides.rotary_dim or rotation.rotary_dim(own, width)
    return Heads(num_heads, width, kv_heads, rotary)


def _refuse(config: Config) -> None:
    """Refuse models whose positions are not rotary, or whose values depend on the layout."""
    found, hint = configs.not_rotary(config), "Use the weights as they are."
    if found is not None:
        checks.fail("convert", "positions must be rotary", f"{found[0]}={found[1]!r}", hint)
    for key, rule in (
        ("attention_k_eq_v", "values must not be the keys, because keys depend on the layout"),
        ("rotary_value", "values must not be rotated, because only queries and keys are converted"),
    ):
        if config.get(key):
            checks.fail("convert", rule, f"{key}={config[key]}", hint)
