"""What a config says beside the encoding: lengths, layers without rotation, the softmax scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posenc._contract import checks
from posenc.configs.models import facts_of
from posenc.configs.others import Learned, Sinusoidal
from posenc.numerics import scaling

# A value, and the key it came from.
Fact = tuple[Any, str]

_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length",
    "n_ctx",
)  # fmt: skip
# Deeper than any model; layers are listed one by one, so a larger number is not a depth.
_MOST_LAYERS = 2**12


def longest(config: Mapping[str, Any]) -> Fact | None:
    """The longest sequence that a config names."""
    for key in _LENGTHS:
        value = config.get(key)
        if type(value) is int and 0 < value <= checks.FARTHEST:
            return value, key
    return None


def lengths(
    config: Mapping[str, Any], rules: Iterable[scaling.Rule | None]
) -> tuple[Fact | None, Fact | None]:
    """The trained and the maximal length, of a model whose layers have these scaling rules."""
    named = longest(config)
    applied = [rule for rule in rules if rule is not None]
    named_by = [rule for rule in applied if hasattr(rule, "original_length")]
    if not named_by:
        # Of rules that do not name it, some files give the length before, and some that after.
        return (None if applied else named), named
    original, factor = named_by[0].original_length, getattr(named_by[0], "factor", 1.0)
    key = "original_max_position_embeddings"
    if named is not None and named[0] == original:
        key = named[1]
    stretched = math.floor(original * factor), f"factor * {key}"
    return (original, key), max(named or stretched, stretched, key=lambda fact: fact[0])


def of_others(
    config: Mapping[str, Any], parts: Iterable[object], prefix: str
) -> tuple[Fact | None, Fact | None]:
    """The trained and the maximal length of a model without rotation; a bias has no maximum."""
    for part in parts:
        if isinstance(part, (Learned, Sinusoidal)):
            first = part.offset if isinstance(part, Learned) else 0
            found = part.max_len - first, part.sources["max_len"]
            return found, found
    named = longest(config)
    return (None if named is None else (named[0], prefix + named[1])), None


def without_rope(config: Mapping[str, Any]) -> Fact | None:
    """Indices of the layers that do not rotate, of a model that rotates in others."""
    kind, model = config.get("model_type"), facts_of(config.get("model_type"))
    flags, types = config.get("no_rope_layers"), config.get("layer_types")
    count = config.get("num_hidden_layers")
    if isinstance(flags, (list, tuple)) and flags:
        # One where a layer rotates; there may be more of them than layers.
        used = flags[:count] if type(count) is int else flags
        return tuple(i for i, rotates in enumerate(used) if not rotates), "no_rope_layers"
    types = types if isinstance(types, (list, tuple)) else ()
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if isinstance(rope, Mapping):
            found = _layers(types, [key for key, value in rope.items() if value is None])
            if found:
                return found, f"{name}.{types[found[0]]}"
    if str(kind).startswith("exaone") and config.get("sliding_window", 1) is None:
        return None
    if not model.get("full_attention_rotates", True) and types:
        return _layers(types, ["full_attention"]), "layer_types"
    # Each n-th layer does not rotate; n is 4 where the config of such a type does not say it.
    key = model.get("no_rope_interval", "no_rope_layer_interval")
    step = config.get(key, 4 if "no_rope_interval" in model else None)
    if type(step) is not int or step < 1 or type(count) is not int:
        return None
    if count > _MOST_LAYERS:
        rule, way_out = f"num_hidden_layers must be at most {_MOST_LAYERS}", "Fix the config."
        raise ValueError(checks.message("from_config", rule, count, way_out))
    return tuple(range(step - 1, count, step)), key if key in config else "model_type"


def softmax_scale(config: Mapping[str, Any], rule: scaling.Rule | None) -> Fact | None:
    r"""What DeepSeek's scores are multiplied with, :math:`m^2 / \sqrt{D}`.

    :math:`D` is the width of a head with both of its parts, and :math:`m` is YaRN's
    :math:`0.1\,a \ln s + 1` with ``mscale_all_dim`` for :math:`a`; one without it.
    """
    if "qk_rope_head_dim" not in facts_of(config.get("model_type")):
        return None
    sizes = [config.get(f"qk_{part}_head_dim") for part in ("nope", "rope")]
    known = [size for size in sizes if type(size) is int and 0 < size <= checks.FARTHEST]
    if len(known) < 2:
        return None
    scale, source = sum(known) ** -0.5, "qk_nope_head_dim + qk_rope_head_dim"
    if isinstance(rule, scaling.YaRN) and rule.mscale_all_dim:
        scale *= (0.1 * rule.mscale_all_dim * math.log(rule.factor) + 1) ** 2
        source += ", mscale_all_dim"
    return scale, source


def _layers(types: Sequence[Any], names: Sequence[Any]) -> tuple[int, ...]:
    wanted = frozenset(name for name in names if isinstance(name, str))
    return tuple(i for i, each in enumerate(types) if isinstance(each, str) and each in wanted)
