"""Positions that are not rotary: which model types have them, and what their configs say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posenc._contract import checks
from posenc.configs.models import facts_of
from posenc.configs.nested import KIND_KEYS, mentions_rotation

# Models have a few hundred; slopes are made for each, so a larger number is not a count of heads.
_MOST_HEADS = 2**12
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
_LENGTHS = ("max_position_embeddings", "n_positions")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")


@dataclass(frozen=True, slots=True)
class Alibi:
    """ALiBi as ``model`` has it: the arguments of `alibi_model_slopes`."""

    model: str
    num_heads: int
    head_dim: int | None
    bias_max: float
    sources: Mapping[str, str] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Learned:
    """A table with a trained row for each position; the first position's row is ``offset``."""

    max_len: int
    embed_dim: int
    offset: int
    part: str | None
    sources: Mapping[str, str] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Sinusoidal:
    """All sines and then all cosines, as `timestep_embedding` makes them, from ``offset`` on."""

    max_len: int
    embed_dim: int
    offset: int
    downscale_freq_shift: int
    part: str | None
    sources: Mapping[str, str] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Buckets:
    """T5's bias: one number for each head and bucket of distances."""

    num_buckets: int
    max_distance: int
    num_heads: int
    sources: Mapping[str, str] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Other:
    """Something that posenc has no module for."""

    noun: str


Part = Alibi | Learned | Sinusoidal | Buckets | Other

_NONE_HERE = "Use the model's own code: posenc has no module for it."
# What each kind is called, and what to do about it.
NOUNS = {
    "alibi": ("ALiBi", "Use ALiBi.from_config."),
    "own_alibi": ("ALiBi", "Construct ALiBi(num_heads) directly."),
    "learned": (
        "a learned table of positions",
        "Use LearnedPosEmbedding(max_len, embed_dim); `posenc explain` prints the sizes.",
    ),
    "sinusoidal": (
        "sinusoidal positions",
        "Use functional.timestep_embedding; `posenc explain` prints the line.",
    ),
    "buckets": ("T5's relative bias, a number for each bucket of distances", _NONE_HERE),
    "relative": ("relative position embeddings", _NONE_HERE),
    "convolution": ("a convolution for positions", _NONE_HERE),
    "patches": ("a learned vector for each patch of an image", "Use LearnedPosEmbedding."),
    "none": ("no positional encoding", "Leave positions out."),
}


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The key of `NOUNS` for what a type has; None for one that rotates, or is said to."""
    if config.get("model_type") == "falcon" and config.get("alibi"):
        return "alibi"
    kind: str | None = facts_of(config.get("model_type")).get("positions")
    return kind if kind is None or not mentions_rotation(config) else None


def not_rotary(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The key, and its value, that says that positions are not rotary."""
    model_type = config.get("model_type")
    model = facts_of(model_type)
    if kind_of(config) is not None and model_type != "falcon":
        return "model_type", model_type
    said = {key: config[key] for key in KIND_KEYS if config.get(key)}
    if not said and not model.get("rotary_by_default", True):
        return KIND_KEYS[0], None
    if model.get("ignores_position_embedding_type"):
        said = {}
    for key, value in said.items():
        if "rope" not in str(value) and "rotary" not in str(value):
            return key, value
    for key, wanted in (("alibi", False), ("use_mem_rope", True)):
        if config.get(key) is not None and bool(config[key]) is not wanted:
            return key, config[key]
    return None


def describe(config: Mapping[str, Any], prefix: str) -> tuple[Part, ...]:
    """The positions of a type with a `kind_of`; encoder and decoder one by one if they differ."""
    kind = kind_of(config)
    if kind == "alibi":
        return (_alibi(config, prefix),)
    if kind == "buckets":
        count = _Counts(config, prefix)
        sizes = count("num_buckets", "relative_attention_num_buckets", default=32)
        far = count("max_distance", "relative_attention_max_distance", default=128)
        return (Buckets(sizes, far, count("num_heads", *_HEADS), count.sources),)
    if kind in ("learned", "sinusoidal"):
        parts = facts_of(config["model_type"]).get("max_len", {None: None})
        return tuple(_table(config, prefix, part, key) for part, key in parts.items())
    return (Other(NOUNS[kind or "none"][0]),)


def _table(config: Mapping[str, Any], prefix: str, part: str | None, key: str | None) -> Part:
    model, count = facts_of(config["model_type"]), _Counts(config, prefix)
    length = count("max_len", *((key,) if key else _LENGTHS))
    width = count("embed_dim", *((model["embed_dim"],) if "embed_dim" in model else _WIDTHS))
    first = model.get("offset", 0)
    if first == "pad_token_id":
        pad = config.get(first)
        if pad is not None:
            count.sources["offset"] = prefix + first
        first = 1 + checks.integer("from_config", first, 1 if pad is None else pad, least=0)
    elif first:
        # The rows before the first position are not counted by the key.
        length += first
    if model.get(part, model["positions"]) == "learned":
        return Learned(length, width, first, part, count.sources)
    return Sinusoidal(length, width, first, model["downscale_freq_shift"], part, count.sources)


def _alibi(config: Mapping[str, Any], prefix: str) -> Part:
    name, count = config["model_type"], _Counts(config, prefix)
    heads, bias_max, width = count("num_heads", *_HEADS, most=_MOST_HEADS), 8.0, None
    inner = config.get("attn_config")
    if name == "falcon":
        width = checks.integer("from_config", "head_dim", count("head_dim", "hidden_size") // heads)
        count.sources["head_dim"] += f" / {count.sources['num_heads']}"
    elif name == "mpt" and isinstance(inner, Mapping):
        if inner.get("alibi") is False:
            if inner.get("rope"):
                return Other("rotary embeddings of its own code (attn_config.rope)")
            length, dim = count("max_len", "max_seq_len"), count("embed_dim", *_WIDTHS)
            return Learned(length, dim, 0, None, count.sources)
        if inner.get("alibi_bias_max") is not None:
            count.sources["bias_max"] = f"{prefix}attn_config.alibi_bias_max"
            given = inner["alibi_bias_max"]
            bias_max = checks.positive_float("from_config", "alibi_bias_max", given)
    return Alibi(name, heads, width, bias_max, count.sources)


class _Counts:
    """Reads counts, and keeps the key that each came from."""

    def __init__(self, config: Mapping[str, Any], prefix: str) -> None:
        self._config, self._prefix = config, prefix
        self.sources: dict[str, str] = {}

    def __call__(
        self, name: str, *keys: str, default: int | None = None, most: int = checks.FARTHEST
    ) -> int:
        """The first of ``keys`` that is there, as the argument ``name``."""
        for key in keys:
            if self._config.get(key) is not None:
                self.sources[name] = self._prefix + key
                count = checks.integer("from_config", key, self._config[key])
                if count > most:
                    rule, way_out = f"{key} must be at most {most}", "Fix the config."
                    raise ValueError(checks.message("from_config", rule, count, way_out))
                return count
        if default is None:
            rule = f"{' or '.join(keys)} must be in the config"
            raise ValueError(checks.message("from_config", rule, None, f"Add {keys[0]}."))
        self.sources[name] = f"{self._prefix}model_type"
        return default
