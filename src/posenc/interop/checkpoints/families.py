"""Model families: what a config says about heads, and what a tensor's name says about its rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from posenc import configs
from posenc._contract import checks
from posenc.configs import facts_of, rotation, text_part
from posenc.interop.checkpoints import layouts
from posenc.interop.checkpoints.layouts import Heads, Layout

Config = Mapping[str, Any]

# Each of these was built from its config class and converted, and its logits stayed the same.
CONVERTED = configs.types_with("converted")
# Here the config decides, by its `rope_interleave`.
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
# What a projection may be made of. The first are divided into its rows, the second are not.
_BY_ROWS = re.compile(
    r"(base_layer\.)?(weight|bias|weight_scale|weight_scale_inv|weight_packed|SCB)"
    r"|lora_B(\.\w+)?(\.weight|\.bias)?|lora_magnitude_vector(\.\w+)*|ia3_l(\.\w+)?"
)
_BY_OTHERS = re.compile(
    r"lora_A(\.\w+)?(\.weight)?"
    r"|(base_layer\.)?(weight_shape|weight_g_idx|weight_format)|(input|activation|output|[qkv])_scale"
)
_WORDS = re.compile(r"(norms\.\d+\.)?(weight|bias)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d{1,9})\.")
# Where a checkpoint has several towers, the one that the text config describes.
_TEXT = re.compile(
    r"(^|\.)(language_model|text_model|mtp)\.|^(base_model\.model\.)?model\.layers\."
)


@dataclass(frozen=True)
class Model:
    """What is known about a checkpoint before its tensors are looked at.

    Args:
        heads: Heads of each layer, by its number.
        family: The ``model_type``, or None for a checkpoint described by arguments.
        layout: The layout that the family's own code reads, or None if unknown.
        fused: The kind of a fused projection.
        towers: There are other towers than the text's.
    """

    heads: Callable[[int], Heads]
    family: str | None = None
    layout: Layout | None = None
    fused: str | None = None
    towers: bool = False

    def kind(self, name: str) -> str | None:
        """What a tensor's rows are, or None for those that stay."""
        found = module_of(name)
        if found is None or (self.towers and not _TEXT.search(name)):
            return None
        word, _, part = found[1].partition(".")
        role = _ROLES[word]
        if role == "norm":
            return "norm" if _WORDS.fullmatch(part) else None
        if _BY_OTHERS.fullmatch(part):
            return None
        if not _BY_ROWS.fullmatch(part):
            rule = "a projection must be stored by rows, because rows are what moves"
            raise ValueError(checks.message("convert", rule, name, _DEQUANTISE))
        if role == "qkv" and self.fused is None:
            rule = "fused must be given, because the family is not known"
            way_out = 'Pass fused="qkv" (queries, keys, values) or "qkv_grouped" (head by head).'
            raise ValueError(checks.message("convert", rule, f"{self.family} with {name}", way_out))
        if role == "qkv":
            return self.fused
        return "q_gated" if role == "q" and "gated" in facts_of(self.family) else role

    def order(self, name: str, shape: Sequence[int], to: Layout) -> Tensor | None:
        """Where each row of a tensor comes from, or None for a tensor that stays."""
        kind = self.kind(name)
        size = math.prod(shape)
        # Without elements nothing moves, however many rows a shape claims.
        if kind is None or not size or (size == 1 and name.endswith(("_scale", "_scale_inv"))):
            return None
        heads = self.heads(layer_of(name))
        if kind == "norm":
            return layouts.order(layouts.norm_blocks(shape, heads), heads, to)
        rows = layouts.count(kind, heads)
        if shape and shape[0] == rows:
            return layouts.order(layouts.blocks(kind, heads), heads, to)
        rule = f"{name} must have {rows} rows by {heads}"
        way_out = "Check the config or the arguments."
        if not name.endswith((".weight", ".bias")) or (len(shape) == 2 and shape[1] == 1):
            way_out = _DEQUANTISE
        raise ValueError(checks.message("convert", rule, f"shape {tuple(shape)}", way_out))


_DEQUANTISE = "Where it is quantised in blocks, convert the original and quantise the result."


def layer_of(name: str) -> int:
    """The layer a tensor belongs to."""
    found = _LAYER.search(name)
    return int(found[1]) if found else 0


def module_of(name: str) -> tuple[str, str] | None:
    """The attention module a tensor of queries or keys is in, and the name in it."""
    words = name.split(".")
    if "linear_attn" in words:
        return None
    at = next((i for i in range(len(words) - 1, -1, -1) if words[i] in _ROLES), None)
    return None if at is None else (".".join(words[:at]), ".".join(words[at:]))


def is_released(name: str) -> bool:
    """Whether a tensor is named as in the releases that transformers' files are made from."""
    return bool({"wq", "wk"} & set(name.split(".")))


def from_config(config: Config, **given: Any) -> Model:
    """The model that a config describes; what is ``given`` and not None wins over it."""
    text, within = text_part(config)
    towers = bool(within) or "vision_config" in config or "audio_config" in config
    family = text.get("model_type")
    family = family if isinstance(family, str) else None
    _refuse(text)
    for name in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"):
        if given.get(name) is not None:
            checks.integer("convert", name, given[name])
    if given.get("fused") not in (None, *_FUSED):
        rule, got = f"fused must be one of {', '.join(_FUSED)}", checks.describe(given["fused"])
        raise ValueError(
            checks.message("convert", rule, got, "See posenc.interop.checkpoints.permute.")
        )

    found = configs.open_config(text, "convert")
    fused = facts_of(family).get("fused")
    layout: Layout | None = None
    if family in CONVERTED:
        layout = "interleaved" if rotation.family_layout(found)[0] else "half"
        fused = fused or "qkv"

    def heads(layer: int) -> Heads:
        return _heads(found, layer, given)

    return Model(heads, family, layout, given.get("fused") or fused, towers)


def _heads(config: configs.Config, layer: int, given: Mapping[str, Any]) -> Heads:
    top, model = config.top, config.model

    def first(*keys: str) -> Any:
        for key in keys:
            value = top.get(key)
            if isinstance(value, (list, tuple)):
                value = value[layer] if layer < len(value) else None
            if value is not None:
                return checks.integer("convert", key, value, least=0)
        return None

    num_heads = given.get("num_heads") or first(*_HEADS) or model.get("num_attention_heads")
    if num_heads is None:
        rule, got = "the config must say num_attention_heads", f"only {sorted(map(str, top))[:8]}"
        way_out = (
            "Pass the model's config.json (config=, --config), or num_heads and head_dim"
            " (--num-heads, --head-dim)."
        )
        raise ValueError(checks.message("convert", rule, got, way_out))
    kv_heads = first("num_key_value_heads", "num_kv_heads")
    if config.kind == "falcon" and not top.get("new_decoder_architecture"):
        kv_heads = 1 if top.get("multi_query", True) else None
    elif isinstance(top.get("attn_config"), Mapping):
        kv_heads = top["attn_config"].get("kv_n_heads")
    kv_heads = given.get("num_kv_heads") or kv_heads or model.get("num_key_value_heads")
    rope, latent = first("qk_rope_head_dim"), first("kv_lora_rank")
    if latent is not None and rope is not None:
        width = (first("qk_nope_head_dim") or 0) + rope
        return Heads(num_heads, width, num_heads, rope, last=True, latent=latent)
    # Without latent attention, the part that rotates belongs to the head.
    known = {"qk_rope_head_dim": None, "head_dim": first("head_dim")}
    own = configs.at_layer(config, layer, **dict.fromkeys(_HEADS, num_heads), **known)
    width = given.get("head_dim") or rotation.head_dim(own, None)
    rotary = given.get("rotary_dim") or rotation.rotary_dim(own, width)
    return Heads(num_heads, width, kv_heads, rotary)


def _refuse(config: Config) -> None:
    """What ties values to the order of the keys' channels cannot be permuted row by row."""
    found = configs.not_rotary(config)
    if found is not None:
        rule, got = "positions must be rotary", f"{found[0]}={found[1]!r}"
        raise ValueError(checks.message("convert", rule, got, "Use the weights as they are."))
    for key, why in (
        ("attention_k_eq_v", "values are the keys"),
        ("rotary_value", "values are rotated too"),
    ):
        if config.get(key):
            rule = f"queries and keys alone must depend on the layout ({key}: {why})"
            got, way_out = f"{key}={config[key]}", "Use the weights as they are."
            raise ValueError(checks.message("convert", rule, got, way_out))
