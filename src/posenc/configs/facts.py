"""Lengths, layers without rotation, and the softmax scale that a config describes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from posenc._contract import checks
from posenc.configs.others import Table
from posenc.configs.reader import Config
from posenc.numerics import scaling

# A value, and the key that it was read from.
Fact = tuple[Any, str]
_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length",
    "n_ctx",
)  # fmt: skip
# Names of the number of layers.
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# More layers than any model has. Each is listed, so a file's number must be bounded.
MOST_LAYERS = 2**12


def _longest(config: Config) -> Fact | None:
    """The maximal length that a config names."""
    for key in _LENGTHS:
        value = config.top.get(key)
        if type(value) is int and 0 < value <= checks.FARTHEST:
            return value, config.prefix + key
    return None


def lengths(
    config: Config, rules: Iterable[scaling.Rule | None]
) -> tuple[Fact | None, Fact | None]:
    """The trained and the maximal length, of a model whose layers have these scaling rules."""
    named = _longest(config)
    applied = [rule for rule in rules if rule is not None]
    rule: Any = next((each for each in applied if hasattr(each, "original_length")), None)
    if rule is None:
        # Without original_length, configs disagree on whether they name the length before scaling.
        return (None if applied else named), named
    original, key = rule.original_length, "original_max_position_embeddings"
    if named is not None and named[0] == original:
        key = named[1].removeprefix(config.prefix)
    scaled = math.floor(original * getattr(rule, "factor", 1.0))
    stretched = scaled, f"{config.prefix}factor * {key}"
    longest = max(named or stretched, stretched, key=lambda fact: fact[0])
    return (original, config.prefix + key), longest


def lengths_of_others(config: Config, parts: Iterable[object]) -> tuple[Fact | None, Fact | None]:
    """The trained and the maximal length of a model without rotation; a bias has no maximum."""
    for part in parts:
        if isinstance(part, Table):
            first = part.offset if part.downscale_freq_shift is None else 0
            found = part.max_len - first, part.sources["max_len"]
            return found, found
    return _longest(config), None


def without_rope(config: Config) -> Fact | None:
    """Indices of the layers that do not rotate, of a model that rotates in others."""
    top, model = config.top, config.model
    flags, types, count = (
        top.get(key) for key in ("no_rope_layers", "layer_types", "num_hidden_layers")
    )
    if isinstance(flags, (list, tuple)) and flags:
        # The list holds 1 for a layer that rotates, and may be longer than the model.
        used = flags[:count] if type(count) is int else flags
        found = tuple(i for i, rotates in enumerate(used) if not rotates)
        return found, f"{config.prefix}no_rope_layers"
    types = types if isinstance(types, (list, tuple)) else ()
    found = _layers(types, {name for name, rope in config.by_layer.items() if rope is None})
    if found:
        return found, f"{config.prefix}{config.where}.{types[found[0]]}"
    if config.kind.startswith("exaone") and top.get("sliding_window", 1) is None:
        return None
    if not model.get("full_attention_rotates", True) and types:
        return _layers(types, {"full_attention"}), f"{config.prefix}layer_types"
    # Every n-th layer does not rotate; n is 4 unless the config has another.
    key = model.get("no_rope_interval", "no_rope_layer_interval")
    step = top.get(key, 4 if "no_rope_interval" in model else None)
    if type(step) is not int or step < 1 or type(count) is not int:
        return None
    if count > MOST_LAYERS:
        rule = f"num_hidden_layers must be at most {MOST_LAYERS}"
        raise config.error(rule, count, "Fix the config.")
    source = key if key in top else "model_type"
    return tuple(range(step - 1, count, step)), config.prefix + source


def softmax_scale(config: Config, rule: scaling.Rule | None) -> Fact | None:
    """DeepSeek's ``m**2 / sqrt(nope + rope)``; YaRN has ``m = 0.1 mscale_all_dim ln(s) + 1``."""
    if "qk_rope_head_dim" not in config.model:
        return None
    sizes = [config.top.get(f"qk_{part}_head_dim") for part in ("nope", "rope")]
    known = [size for size in sizes if type(size) is int and 0 < size <= checks.FARTHEST]
    if len(known) < 2:
        return None
    scale, source = sum(known) ** -0.5, "qk_nope_head_dim + qk_rope_head_dim"
    if isinstance(rule, scaling.YaRN) and rule.mscale_all_dim:
        scale *= (0.1 * rule.mscale_all_dim * math.log(rule.factor) + 1) ** 2
        source += ", mscale_all_dim"
    return scale, config.prefix + source


def _layers(types: Sequence[Any], names: set[Any]) -> tuple[int, ...]:
    return tuple(i for i, each in enumerate(types) if isinstance(each, str) and each in names)
