"""What a config says beside its rotation: lengths, kinds of layers, windows, and scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posenc._contract import checks
from posenc.configs.others import Table
from posenc.configs.reader import MOST_LAYERS, Config, said_or_default
from posenc.configs.rotation import layer_bases
from posenc.numerics import scaling

# A value, and the key that it was read from.
Fact = tuple[Any, str]
_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length",
    "n_ctx",
)  # fmt: skip
# Names of the number of layers.
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_DUAL_CHUNK = "dual_chunk_attention_config"


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
    named, dual = _longest(config), config.top.get(_DUAL_CHUNK)
    if isinstance(dual, Mapping):
        key = "original_max_position_embeddings"
        original = _count(config, dual, key)
        source = f"{config.prefix}{_DUAL_CHUNK}.{key}"
        return (None if original is None else (original, source)), named
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
    bases = layer_bases(config)[: count if type(count) is int else None]
    still = tuple(i for i, theta in enumerate(bases) if not theta)
    if still:
        return still, f"{config.prefix}layer_rope_theta"
    types = types if isinstance(types, (list, tuple)) else ()
    found = _layers(types, {name for name, rope in config.by_layer.items() if rope is None})
    if found:
        return found, f"{config.prefix}{config.where}.{types[found[0]]}"
    if config.kind.startswith("exaone") and top.get("sliding_window", 1) is None:
        return None
    if not model.get("full_attention_rotates", True) and types:
        return _layers(types, {"full_attention"}), config.prefix + config.types_key
    # Every n-th layer does not rotate.
    key = "no_rope_layer_interval"
    step = said_or_default(config, key)
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


def layer_types(config: Config) -> Fact | None:
    """The type of each layer, where they differ or do not have full attention."""
    types = config.top.get("layer_types")
    if not isinstance(types, (list, tuple)) or {"full_attention"}.issuperset(map(str, types)):
        return None
    return tuple(map(str, types)), config.prefix + config.types_key


def window(config: Config) -> Fact | None:
    """How many keys a query sees before and after its own, in layers that have a window."""
    types, model = config.top.get("layer_types"), config.model
    key = "local_attention" if "local_attention" in model else "sliding_window"
    size = said_or_default(config, key)
    slides = said_or_default(config, "use_sliding_window") is not False
    slides = slides and "layer_types" not in model
    if isinstance(types, (list, tuple)):
        slides = "sliding_attention" in types
    if model and key not in model:
        # The code of this type reads no such key.
        slides = False
    if not slides or type(size) is not int or not 0 < size <= checks.FARTHEST:
        return None
    source = config.prefix + (key if key in config.top else "model_type")
    if config.top.get("use_bidirectional_attention") in (True, "all"):
        return (size // 2, size // 2), source
    size = size // 2 if key == "local_attention" else size
    return ((size, size) if model.get("window") == "both sides" else (size - 1, 0)), source


def chunk(config: Config) -> Fact | None:
    """Tokens of a chunk, in layers whose queries see the keys of their own chunk alone."""
    key, types = "attention_chunk_size", config.top.get("layer_types")
    size = said_or_default(config, key)
    chunked = isinstance(types, (list, tuple)) and "chunked_attention" in types
    if not chunked or type(size) is not int or not 0 < size <= checks.FARTHEST:
        return None
    return size, config.prefix + (key if key in config.top else "model_type")


def dual_chunk(config: Config) -> Fact | None:
    """``chunk`` and ``window`` of `DualChunk`, from the sizes that Qwen2.5-1M publishes."""
    dual = config.top.get(_DUAL_CHUNK)
    if not isinstance(dual, Mapping):
        return None
    size, local = _count(config, dual, "chunk_size"), _count(config, dual, "local_size")
    if size is None or local is None or not 2 * local < size:
        rule = f"{_DUAL_CHUNK} must have a chunk_size, and a local_size below half of it"
        raise config.error(rule, checks.describe(dict(dual)), "Fix the config, or remove the key.")
    # The farthest distance is chunk_size there, and chunk + window - 1 here.
    return (size - local, local + 1), config.prefix + _DUAL_CHUNK


def query_scale(config: Config) -> Fact | None:
    """What queries are multiplied by, as Python of their position ``p`` or the length ``n``."""
    key, beta = "attn_temperature_tuning", config.rope.get("llama_4_scaling_beta")
    if beta is not None:
        beta = checks.positive_float(config.who, "llama_4_scaling_beta", beta)
        length = _count(config, config.rope, "original_max_position_embeddings")
        source = f"{config.prefix}{config.where}.llama_4_scaling_beta"
        text = f"1 + {beta} * log(1 + p // {length}) at position p"
        return None if length is None else (text, source)
    if key in config.model and said_or_default(config, key):
        values = [said_or_default(config, name) for name in ("attn_scale", "floor_scale")]
        scale = checks.positive_float(config.who, "attn_scale", values[0])
        step = checks.integer(config.who, "floor_scale", values[1])
        text = f"1 + {scale} * log(1 + (p + 1) // {step}) at position p, in layers without RoPE"
        return text, config.prefix + (key if key in config.top else "model_type")
    dual = config.top.get(_DUAL_CHUNK)
    if isinstance(dual, Mapping):
        length = _count(config, dual, "original_max_position_embeddings")
        if length is not None:
            text = f"max(1, 1 + 0.1 * log(n / {length})) for n tokens"
            return text, f"{config.prefix}{_DUAL_CHUNK}"
    return None


def position_ids(config: Config) -> Fact | None:
    """Where the tokens of an image are, in a model that counts no tokens."""
    if "coordinates" not in config.model:
        return None
    # A class token comes before the registers.
    registers = said_or_default(config, "num_register_tokens")
    before = 1 + checks.integer(config.who, "num_register_tokens", registers, least=0)
    text = f"math.tau * posenc.positions.normalized_grid(rows, columns, prefix={before})"
    return text, f"{config.prefix}model_type"


def _count(config: Config, held: Mapping[str, Any], key: str) -> int | None:
    value = held.get(key)
    return None if value is None else checks.integer(config.who, key, value)


def _layers(types: Sequence[Any], names: set[Any]) -> tuple[int, ...]:
    return tuple(i for i, each in enumerate(types) if isinstance(each, str) and each in names)
