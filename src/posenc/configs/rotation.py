"""A function for each argument of RoPE: it reads the config's keys or the type's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc._contract import checks
from posenc.configs.reader import LAYOUT, Config, local_key, mentions_rotation
from posenc.numerics.axes import Axes, Axial, Sections

_HEAD_DIMS = ("qk_rope_head_dim", "head_dim", "attention_head_dim", "kv_channels")
# SAM 2's attention to the frames before.
_MEMORY = "memory_attention_"
# The width of a model, and its number of heads.
_SIZES = (
    ("hidden_size", "num_attention_heads"), ("hidden_size", "n_head"), ("n_embd", "n_head"),
    ("d_model", "n_heads"), ("dim", "n_heads"), ("embed_dim", "num_heads"),
    ("hidden_size", "num_heads"), (f"{_MEMORY}hidden_size", f"{_MEMORY}num_attention_heads"),
)  # fmt: skip
_BASES = (
    "rope_theta", "rotary_emb_base", "rope_base", "rotary_embedding_base", "rope_embedding_base",
)  # fmt: skip
_SHARE = "partial_rotary_factor"
_SHARES = (_SHARE, "rotary_pct", "rope_pct", "rotary_emb_fraction")
# Wider than a head of any model.
_WIDEST_HEAD = 2**13


def head_dim(config: Config, layer_type: str | None) -> int:
    """Channels of a head; in latent attention, of its rotary part."""
    top = config.top
    own = _own_head_dim(config, layer_type)
    if own is not None:
        return _width(config, "head_dim", own, "per_layer_config")
    wide = ("global_head_dim",) if layer_type == "full_attention" else ()
    for name in (*wide, *_HEAD_DIMS):
        if top.get(name) not in (None, 0):
            return _width(config, name, top[name], name)
    for name in (*wide, *_HEAD_DIMS):
        if name in config.model:
            return _width(config, "head_dim", config.model[name], "model_type")
    for size, heads in _SIZES:
        if top.get(size) is not None and top.get(heads) is not None:
            width = checks.integer(config.who, size, top[size])
            count = checks.integer(config.who, heads, top[heads])
            if size.startswith(_MEMORY):
                # Projections are narrower by this factor.
                rate = top.get(f"{_MEMORY}downsample_rate") or 1
                count *= checks.integer(config.who, f"{_MEMORY}downsample_rate", rate)
            if width % count and config.who == "convert":
                # transformers rounds down, but every row of a weight must belong to a head.
                rule = f"{size} must be a multiple of the {count} heads"
                raise config.error(rule, width, "Pass head_dim (--head-dim).")
            return _width(config, "head_dim", width // count, f"{size} / {heads}")
    if "default_head_dim" in config.model and "hidden_size" not in top:
        return _width(config, "head_dim", config.model["default_head_dim"], "model_type")
    rule = "head_dim must be in the config, or hidden_size and num_attention_heads"
    keys = ", ".join(sorted(str(key) for key in top if top[key] is not None))
    got = f"keys {keys if len(keys) <= 200 else keys[:197] + '...'}" if keys else "no keys"
    raise config.error(rule, got, "Add head_dim.")


def _width(config: Config, name: str, value: Any, source: str) -> int:
    width = checks.even(config.who, name, value)
    if width > _WIDEST_HEAD:
        raise config.error(f"{name} must be at most {_WIDEST_HEAD}", width)
    config.sources["head_dim"] = config.prefix + source
    return width


def _own_head_dim(config: Config, layer_type: str | None) -> Any:
    """The head_dim that ``per_layer_config`` gives to all layers of one type."""
    types, layers = config.layer_types(), config.top.get("per_layer_config")
    if not isinstance(layers, Mapping):
        return None
    # JSON makes strings of the indices.
    own = [layers.get(i, layers.get(str(i))) for i, kind in enumerate(types) if kind == layer_type]
    found = [each.get("head_dim") for each in own if isinstance(each, Mapping)]
    if any(value != found[0] for value in found):
        rule = f"per_layer_config must give all {layer_type} layers one head_dim"
        raise config.error(rule, checks.describe(found), "Fix the config.")
    return found[0] if found else None


def base(config: Config, layer_type: str | None) -> float:
    """The base of the rates."""
    keys: tuple[str, ...] = _BASES
    usual, local = "rope_theta", local_key(config)
    if layer_type == "sliding_attention" and local:
        if local != "model_type":
            keys, usual = (local,), "rope_local_base_freq"
        elif config.model["rope_local_base_freq"] is not None:
            keys, usual = (), "rope_local_base_freq"
    elif config.top.get("global_rope_theta") is not None:
        keys = ("global_rope_theta",)
    value = config.agreed("base", "rope_theta", keys)
    own = layer_bases(config)
    if own:
        if len(set(filter(None, own))) != 1:
            rule = "layer_rope_theta must have one base for one RoPE"
            hint = "Call posenc.rope_layers for that of each layer, or pass base."
            raise config.error(rule, checks.describe(own), hint)
        value, config.sources["base"] = max(own), f"{config.prefix}layer_rope_theta"
    inner = config.top.get("attn_config")
    if value is None and isinstance(inner, Mapping) and inner.get("rope_theta") is not None:
        value = inner["rope_theta"]
        config.sources["base"] = f"{config.prefix}attn_config.rope_theta"
    if value is None:
        value = config.default("base", usual)
    if value is None and config.kind and not mentions_rotation(config.top):
        rule = f"rope_theta must be given, because {config.kind} is not known to rotate"
        raise config.error(rule, None, "If it does, add rope_theta: 10000 is the usual one.")
    name = config.sources.get("base", "base")
    return 10_000.0 if value is None else checks.base(config.who, value, name)


def layer_bases(config: Config) -> list[float]:
    """The base of each layer, zero for layers that do not rotate; empty if layers share one."""
    found, name = config.top.get("layer_rope_theta"), f"{config.prefix}layer_rope_theta"
    if not isinstance(found, (list, tuple)):
        return []
    return [checks.base(config.who, x, name) if x else 0.0 for x in found]


def rotary_dim(config: Config, head_dim: int) -> int:
    """Channels of a head that rotate."""
    if config.model.get("coordinates", 0) > 2:
        # What the coordinates cannot share does not rotate.
        each: int = 2 * config.model["coordinates"]
        config.sources["rotary_dim"] = f"{config.prefix}model_type"
        return head_dim // each * each
    if config.top.get("qk_rope_head_dim"):
        # head_dim is already that of the rotary part.
        return head_dim
    if "proportional" in (config.rope.get("rope_type"), config.rope.get("type")):
        # This rule gives some pairs a rate of zero instead.
        return head_dim
    share, count = config.agreed("rotary_dim", _SHARE, _SHARES), config.top.get("rotary_dim")
    if count is not None:
        config.sources.setdefault("rotary_dim", f"{config.prefix}rotary_dim")
    if share is None and "rotary_dim" not in config.top:
        # An explicit null means the whole head.
        count = config.default("rotary_dim", "rotary_dim")
    if share is None and count is None:
        share = config.default("rotary_dim", _SHARE)
    if share is None:
        return head_dim if count is None else checks.even(config.who, "rotary_dim", count)
    share = checks.positive_float(config.who, _SHARE, share)
    width = int(head_dim * share) if share <= 1 else 0
    if width < 2 or width % 2:
        rule = f"{_SHARE} must be at most 1, and rotate an even number of {head_dim} channels"
        raise config.error(rule, f"{share:g}")
    if count is not None and count != width:
        raise config.contradiction("rotary_dim", _SHARE, f"{count} and {width} channels")
    return width


def layout(config: Config) -> tuple[bool, bool | None]:
    """``interleaved`` and ``interleaved_out``."""
    converted = config.top.get(LAYOUT)
    if converted is None:
        return family_layout(config)
    if converted not in ("half", "interleaved"):
        raise config.error(f"{LAYOUT} must be 'half' or 'interleaved'", converted)
    config.sources["interleaved"] = config.prefix + LAYOUT
    return converted == "interleaved", None


def family_layout(config: Config) -> tuple[bool, bool | None]:
    """As `layout`, without regard to a conversion."""
    key = "rope_interleave"
    if config.top.get("use_mla") is False:
        # Without latent attention, DeepSeek has Llama's layout.
        return False, None
    flag = config.top.get(key)
    if flag is not None:
        config.sources["interleaved"] = config.prefix + key
    else:
        flag = config.default("interleaved", key)
    if flag is not None:
        adjacent = checks.boolean(config.who, key, flag)
        return adjacent, False if adjacent else None
    return config.default("interleaved", "layout") == "interleaved", None


def axes(config: Config, width: int) -> Axes | None:
    """The sections of M-RoPE, or the rows and columns of an image, in ``width`` channels."""
    sizes, count = config.rope.get("mrope_section"), config.model.get("coordinates")
    if sizes is None and count is not None:
        config.sources["axes"] = f"{config.prefix}model_type"
        form = config.model.get("axial")
        if form == "alternating":
            return Sections((width // 2 // count,) * count, interleaved=True)
        return Axial(count, rates="shared" if form == "shared" else "per_axis")
    if sizes is None:
        return None
    config.sources["axes"] = f"{config.prefix}{config.where}.mrope_section"
    flag = config.rope.get("mrope_interleaved") or config.rope.get("interleaved") or False
    # Some model types interleave whatever the config says.
    flag = config.model.get("mrope_interleaved") or flag
    return Sections(sizes, checks.boolean(config.who, "mrope_interleaved", flag))


def inv_freq(config: Config, base: float, width: int) -> tuple[float, ...] | None:
    """The rates of all pairs, if those of the coordinates take turns."""
    if config.model.get("axial") != "alternating":
        return None
    count = config.model["coordinates"]
    config.sources["inv_freq"] = config.sources.get("base", f"{config.prefix}model_type")
    pairs = width // 2 // count
    return tuple(base ** (-i / pairs) for i in range(pairs) for _ in range(count))
