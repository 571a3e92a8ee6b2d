"""What a config says in addition to its rotation: lengths, kinds of layers, windows, scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from posenc._contract import checks
from posenc.configs.others import Table
from posenc.configs.reader import Config
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
        if _is_size(config.top.get(key)):
            return config.top[key], config.prefix + key
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
    flags, types = config.top.get("no_rope_layers"), config.layer_types()
    count = config.layer_count()
    # Lists may be longer than the model.
    if isinstance(flags, (list, tuple)) and flags:
        # The list holds 1 for a layer that rotates.
        layers = tuple(i for i, rotates in enumerate(flags[:count]) if not rotates)
        return layers, f"{config.prefix}no_rope_layers"
    layers = tuple(i for i, theta in enumerate(layer_bases(config)[:count]) if not theta)
    if layers:
        return layers, f"{config.prefix}layer_rope_theta"
    unrotated = {name for name, rope in config.by_layer.items() if rope is None}
    layers = tuple(i for i, name in enumerate(types) if name in unrotated)
    if layers:
        return layers, f"{config.prefix}{config.where}.{types[layers[0]]}"
    if config.kind.startswith("exaone") and config.top.get("sliding_window", 1) is None:
        return None
    if not config.model.get("full_attention_rotates", True) and types:
        layers = tuple(i for i, name in enumerate(types) if name == "full_attention")
        return layers, config.prefix + config.types_key
    # Every n-th layer does not rotate.
    key = "no_rope_layer_interval"
    step = config.value(key)
    if type(step) is not int or step < 1 or count is None:
        return None
    return tuple(range(step - 1, count, step)), config.source(key)


def softmax_scale(config: Config, rule: scaling.Rule | None) -> Fact | None:
    """DeepSeek's ``m**2 / sqrt(nope + rope)``; YaRN has ``m = 0.1 mscale_all_dim ln(s) + 1``."""
    if "qk_rope_head_dim" not in config.model:
        return None
    sizes: list[Any] = [config.top.get(f"qk_{part}_head_dim") for part in ("nope", "rope")]
    if not all(map(_is_size, sizes)):
        return None
    scale, source = float(sum(sizes) ** -0.5), "qk_nope_head_dim + qk_rope_head_dim"
    if isinstance(rule, scaling.YaRN) and rule.mscale_all_dim:
        scale *= (0.1 * rule.mscale_all_dim * math.log(rule.factor) + 1) ** 2
        source += ", mscale_all_dim"
    return scale, config.prefix + source


def layer_types(config: Config) -> Fact | None:
    """The type of each layer, where they differ or do not have full attention."""
    types = config.layer_types()
    if {"full_attention"}.issuperset(types):
        return None
    return tuple(types), config.prefix + config.types_key


def window(config: Config) -> Fact | None:
    """How many keys a query sees before and after its own, in layers that have a window."""
    model = config.model
    key = "local_attention" if "local_attention" in model else "sliding_window"
    size, source = config.value(key), config.source(key)
    slides = config.value("use_sliding_window") is not False and "layer_types" not in model
    if config.top.get("layer_types") is not None:
        slides = "sliding_attention" in config.layer_types()
    if model and key not in model:
        # The code of this type reads no such key.
        slides = False
    if not slides or not _is_size(size):
        return None
    if config.top.get("use_bidirectional_attention") in (True, "all"):
        return (size // 2, size // 2), source
    size = size // 2 if key == "local_attention" else size
    return ((size, size) if model.get("window") == "both sides" else (size - 1, 0)), source


def chunk(config: Config) -> Fact | None:
    """Tokens of a chunk, in layers whose queries see only the keys of their chunk."""
    key = "attention_chunk_size"
    size = config.value(key)
    if "chunked_attention" not in config.layer_types() or not _is_size(size):
        return None
    return size, config.source(key)


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
    if key in config.model and config.value(key):
        scale = checks.positive_float(config.who, "attn_scale", config.value("attn_scale"))
        step = checks.integer(config.who, "floor_scale", config.value("floor_scale"))
        text = f"1 + {scale} * log(1 + (p + 1) // {step}) at position p, in layers without RoPE"
        return text, config.source(key)
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
    registers = config.value("num_register_tokens")
    before = 1 + checks.integer(config.who, "num_register_tokens", registers, least=0)
    text = f"math.tau * posenc.positions.normalized_grid(rows, columns, prefix={before})"
    return text, f"{config.prefix}model_type"


def _count(config: Config, keys: Mapping[str, Any], key: str) -> int | None:
    value = keys.get(key)
    return None if value is None else checks.integer(config.who, key, value)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= checks.FARTHEST
