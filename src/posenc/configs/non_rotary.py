"""Positions that are not rotary, as configs describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, ClassVar

from posenc._contract import checks
from posenc.configs.reader import KIND_KEYS, LAYOUT, Config, mentions_rotation, model_defaults

# More heads than any model has. Each gets a slope, so a file's number must be bounded.
_MOST_HEADS = 2**12
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
_LENGTHS = ("max_position_embeddings", "n_positions")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_ENCODER_HEADS = (
    "speech_encoder_attention_heads", "encoder_num_attention_heads", "encoder_attention_heads",
    *_HEADS,
)  # fmt: skip
# The positions that a value of position_embeddings_type names in models of speech.
_SPEECH = {"relative": "transformer_xl", "relative_key": "shaw", None: "none"}
# Keys outside the rope dict; a misspelling of one is refused.
_KEYS = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "rope_local_base_freq",
    "partial_rotary_factor", "rotary_dim", "rotary_pct", "rope_pct", "rotary_emb_base",
    "rotary_embedding_base", "original_max_position_embeddings", "max_position_embeddings", LAYOUT,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Alibi:
    """The arguments of `alibi_model_slopes`."""

    kind: ClassVar[str] = "alibi"
    model: str
    num_heads: int
    head_dim: int | None
    bias_max: float
    sources: Mapping[str, str] = field(compare=False)


@dataclass(frozen=True, slots=True)
class PositionTable:
    """A vector for each position; position 0 has row ``offset``.

    It is learned, or the `timestep_embedding` of the row if there is a ``downscale_freq_shift``.
    """

    max_len: int
    embed_dim: int
    offset: int
    downscale_freq_shift: int | None
    part: str | None
    sources: Mapping[str, str] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Buckets:
    """T5's bias: a number for each head and bucket of distances."""

    kind: ClassVar[str] = "buckets"
    num_buckets: int
    max_distance: int
    num_heads: int
    sources: Mapping[str, str] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Sinusoids:
    """The arguments of `TransformerXLBias`."""

    kind: ClassVar[str] = "transformer_xl"
    num_heads: int
    embed_dim: int
    causal: bool
    max_distance: int | None
    concatenated: bool
    sources: Mapping[str, str] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Keys:
    """The arguments of `RelativeKeys`."""

    kind: ClassVar[str] = "shaw"
    head_dim: int
    max_distance: int
    max_later: int
    causal: bool
    sources: Mapping[str, str] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Disentangled:
    """The arguments of `DeBERTaBias`."""

    kind: ClassVar[str] = "deberta"
    num_heads: int
    head_dim: int
    max_relative_positions: int
    position_buckets: int | None
    causal: bool
    sources: Mapping[str, str] = field(compare=False)


# A string is a key of `DESCRIPTIONS`: posenc has no module for it, or no key of a config its sizes.
Bias = Alibi | Buckets | Sinusoids | Keys | Disentangled
Part = Bias | PositionTable | str

_USE_MODEL = "Use the model's own code: posenc has no module for it."
_USE_T5 = "Use T5Bias.from_config."
_USE_LEARNED = "Use LearnedPosEmbedding(max_len, embed_dim); `posenc explain` prints the sizes."
_USE_TIMESTEP = "Use functional.timestep_embedding; `posenc explain` prints the call."
# The name of each kind in an error, and a hint.
DESCRIPTIONS = {
    "alibi": ("ALiBi", "Use ALiBi.from_config."),
    "own_alibi": ("ALiBi", "Construct ALiBi(num_heads) directly."),
    "learned": ("a learned table of positions", _USE_LEARNED),
    "sinusoidal": ("sinusoidal positions", _USE_TIMESTEP),
    "buckets": ("T5's relative bias, a number for each bucket of distances", _USE_T5),
    "deberta": ("DeBERTa's vectors for each distance", "Use DeBERTaBias.from_config."),
    "transformer_xl": ("Transformer-XL's terms", "Use TransformerXLBias.from_config."),
    "shaw": ("Shaw's vectors for each distance", "Use RelativeKeys.from_config."),
    # BERT's, which transformers 5 has no longer.
    "relative_key": (
        "Shaw's vectors for each distance, and no table",
        "Use RelativeKeys(head_dim, max_distance=max_position_embeddings - 1, causal=False) and "
        "load weight.flip(0); relative_key_query has the keys' products too: "
        "attention.relative_terms.",
    ),
    "relative": ("relative position embeddings", _USE_MODEL),
    "convolution": ("a convolution for positions", _USE_MODEL),
    "windows": (
        "a bias for each offset of two patches",
        "Use GridBias(size, num_heads=num_heads).",
    ),
    "patches": ("a learned vector for each patch of an image", "Use LearnedPosEmbedding."),
    "own_rotation": ("rotary embeddings of its own code", _USE_MODEL),
    "none": ("no positional encoding", "Leave positions out."),
}
# The terms of DeBERTa's scores, and the key of the farthest distance.
_TERMS = {"c2p", "p2c"}
_RELATIVE_LENGTH = "max_relative_positions"
# The hint for a value of KIND_KEYS that is not rotary.
_RELATIVE = {
    "relative": "Use TransformerXLBias(num_heads, embed_dim=embed_dim, causal=False, "
    "concatenated=False).",
    "relative_key": "Use RelativeKeys(head_dim, max_distance=max_distance).",
}


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The key of `DESCRIPTIONS` for the positions of a config; None if they may be rotary."""
    if config.get("model_type") == "falcon" and config.get("alibi"):
        return "alibi"
    model = model_defaults(config.get("model_type"))
    key = KIND_KEYS[1]
    if key in model:
        said = config.get(key, model[key])
        return _SPEECH.get(said) if isinstance(said, str) or said is None else None
    kind: str | None = model.get("positions")
    if kind == "learned" and str(config.get(KIND_KEYS[0])).startswith("relative_key"):
        return "relative_key"
    return kind if kind is None or not mentions_rotation(config) else None


def not_rotary(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The key, and its value, that rules out rotary positions."""
    model_type = config.get("model_type")
    model = model_defaults(model_type)
    if kind_of(config) is not None and model_type != "falcon":
        return "model_type", model_type
    said = {key: config[key] for key in KIND_KEYS if config.get(key)}
    if not said and not model.get("rotary_by_default", True):
        return KIND_KEYS[0], None
    for key, value in said.items():
        rotary = "rope" in str(value) or "rotary" in str(value)
        if not rotary and not model.get("ignores_position_embedding_type"):
            return key, value
    for key, wanted in (("alibi", False), ("use_mem_rope", True)):
        if config.get(key) is not None and bool(config[key]) is not wanted:
            return key, config[key]
    return None


def check_rotary(config: Config) -> None:
    """Refuse other positions than RoPE's, misspelled keys, and missing rope_parameters."""
    top, prefix, kind = config.top, config.prefix, config.kind
    other, found = kind_of(top), not_rotary(top)
    if other is not None:
        noun, hint = DESCRIPTIONS[other]
        rule = f"model_type {kind!r} has no rotary embedding"
        raise ValueError(f"{config.who}: {rule}. It has {noun}.\n  {hint}")
    if not kind and isinstance(top.get("architecture"), str):
        rule = "the config is one of timm, which names an architecture and not its sizes"
        hint = (
            "Construct RoPE(head_dim, axes=...) directly; the manual has a page on timm's classes."
        )
        raise ValueError(f"{config.who}: {rule}, got {top['architecture']!r:.80}.\n  {hint}")
    if "refused" in config.model:
        rule = f"model_type {kind!r} is not read as a RoPE: {config.model['refused']}"
        hint = "Construct RoPE(...) directly, or use functional.rotate with the model's tables."
        raise ValueError(f"{config.who}: {rule}.\n  {hint}")
    if found is not None:
        hint = "Construct RoPE(...) directly if the model rotates."
        if found[0] == "alibi":
            hint = "Use ALiBi(num_heads)."
        hint = _RELATIVE.get(str(found[1]), hint)
        rule = f"{prefix}{found[0]} must say that positions are rotary"
        raise config.error(rule, found[1], hint)
    for key, value in top.items():
        for meant in _KEYS if isinstance(key, str) and value else ():
            if top.get(meant) is None and _is_typo(key, meant):
                rule = f"{prefix}{key} must be a known key"
                raise config.error(rule, key, f"Did you mean {meant}?")
    if "rope_parameters" in config.model and not config.where:
        rule = f"{prefix}rope_parameters must be given for model_type {kind!r}"
        hint = "Add them: the rotation of this type is scaled, or differs by layer."
        raise config.error(rule, None, hint)


def _is_typo(key: str, meant: str) -> bool:
    """Whether one letter within ``key`` is wrong, missing or too many, or two are swapped."""
    if meant in key or key in meant or abs(len(key) - len(meant)) > 2:
        return False
    # A wrong letter leaves two unmatched, one in each word.
    alike = SequenceMatcher(None, key, meant).ratio()
    return round((1 - alike) * (len(key) + len(meant))) <= 2


def describe(config: Config) -> tuple[Part, ...]:
    """The encoding of a config that has a `kind_of`, or those of its encoder and decoder."""
    kind = kind_of(config.top)
    if kind == "alibi":
        return (_alibi(config),)
    if kind == "buckets":
        buckets = config.count("num_buckets", "relative_attention_num_buckets", default=32)
        far = config.count("max_distance", "relative_attention_max_distance", default=128)
        return (Buckets(buckets, far, config.count("num_heads", *_HEADS), config.sources),)
    if kind == "transformer_xl":
        return (_sinusoids(config),)
    if kind == "shaw":
        return (_keys(config),)
    if kind == "deberta":
        return (_disentangled(config),)
    if kind in ("learned", "sinusoidal"):
        parts = config.model.get("max_len", {None: None})
        return tuple(_table(replace(config, sources={}), *each) for each in parts.items())
    return (kind or "none",)


def _table(config: Config, part: str | None, key: str | None) -> Part:
    model = config.model
    length = config.count("max_len", *((key,) if key else _LENGTHS))
    width = config.count("embed_dim", *((model["embed_dim"],) if "embed_dim" in model else _WIDTHS))
    first = model.get("offset", 0)
    if first == "pad_token_id":
        pad = config.top.get(first)
        if pad is not None:
            config.sources["offset"] = config.prefix + first
        first = 1 + checks.integer(config.who, first, 1 if pad is None else pad, least=0)
    else:
        # The file's length does not count the rows before position 0.
        length += first
    learned = model.get(part or "", model["positions"]) == "learned"
    shift = None if learned else model.get("downscale_freq_shift")
    return PositionTable(length, width, first, shift, part, config.sources)


def _width(config: Config, heads: int) -> int:
    """Channels of a head."""
    width = config.count("head_dim", *_WIDTHS)
    if width % heads:
        rule = f"{config.sources['head_dim']} must be a multiple of the {heads} heads"
        raise config.error(rule, width, "Fix the config.")
    return width // heads


def _sinusoids(config: Config) -> Sinusoids:
    heads = config.count("num_heads", *_ENCODER_HEADS, most=_MOST_HEADS)
    width, distance, causal = config.count("embed_dim", *_WIDTHS), None, False
    for key in ("d_head", "head_dim"):
        if config.top.get(key) not in (None, width / heads):
            names = f"{config.sources['embed_dim']} / {config.sources['num_heads']}"
            raise config.error(f"{key} must be {names}, {width / heads:g}", config.top[key])
    if config.kind in ("transfo-xl", "xlnet"):
        if config.top.get("bi_data"):
            rule = "bi_data must be false, because half of a batch would have opposite distances"
            raise config.error(rule, config.top["bi_data"], "Fix the config.")
        if _is_positive(config.top.get("clamp_len")):
            distance = config.count("max_distance", "clamp_len")
        # Both have a value for attention that sees all keys, and other values of their own.
        causal = config.top.get("attn_type", "bi" if config.kind == "xlnet" else 0) != "bi"
        config.sources["causal"] = config.source("attn_type")
    concatenated = config.model.get("concatenated", KIND_KEYS[1] not in config.model)
    return Sinusoids(heads, width, causal, distance, concatenated, config.sources)


def _keys(config: Config) -> Keys:
    heads = config.count("num_heads", *_ENCODER_HEADS, most=_MOST_HEADS)
    head_dim = _width(config, heads)
    config.sources["head_dim"] += f" / {config.sources['num_heads']}"
    if config.kind == "speecht5":
        # Distances are from minus this, of a later key, to one less than this.
        span = config.count("max_later", "encoder_max_relative_position", default=160)
        config.sources["max_distance"] = config.sources["max_later"]
        return Keys(head_dim, span - 1, span, False, config.sources)
    before = config.count("max_distance", "left_max_position_embeddings", default=64)
    after = config.count("max_later", "right_max_position_embeddings", default=8)
    return Keys(head_dim, before, after, False, config.sources)


def _disentangled(config: Config) -> Part:
    top = config.top
    if top.get("relative_attention") is not True:
        if top.get("position_biased_input") is False:
            return "none"
        return _table(config, None, None)
    kinds = top.get("pos_att_type")
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    if not isinstance(kinds, (list, tuple)) or {str(each).strip() for each in kinds} != _TERMS:
        rule = f"pos_att_type must be {' and '.join(sorted(_TERMS))}"
        hint = "Use posenc.attention.relative_terms, which takes either of them."
        raise config.error(rule, top.get("pos_att_type"), hint)
    heads = config.count("num_heads", *_HEADS, most=_MOST_HEADS)
    head_dim = _width(config, heads)
    config.sources["head_dim"] += f" / {config.sources['num_heads']}"
    # A number below one is none.
    own = [key for key in (_RELATIVE_LENGTH,) if _is_positive(top.get(key))]
    most = config.count("max_relative_positions", *own, _LENGTHS[0], default=512)
    buckets = None
    if config.kind != "deberta" and _is_positive(top.get("position_buckets")):
        buckets = config.count("position_buckets", "position_buckets")
    return Disentangled(heads, head_dim, most, buckets, False, config.sources)


def _is_positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _alibi(config: Config) -> Part:
    heads, bias_max = config.count("num_heads", *_HEADS, most=_MOST_HEADS), 8.0
    width, inner = None, config.top.get("attn_config")
    if config.kind == "falcon":
        width = config.count("head_dim", "hidden_size") // heads
        checks.integer(config.who, "head_dim", width)
        config.sources["head_dim"] += f" / {config.sources['num_heads']}"
    elif config.kind == "mpt" and isinstance(inner, Mapping):
        if inner.get("alibi") is False:
            if inner.get("rope"):
                return "own_rotation"
            length = config.count("max_len", "max_seq_len")
            dim = config.count("embed_dim", *_WIDTHS)
            return PositionTable(length, dim, 0, None, None, config.sources)
        given = inner.get("alibi_bias_max")
        if given is not None:
            config.sources["bias_max"] = f"{config.prefix}attn_config.alibi_bias_max"
            bias_max = checks.positive_float(config.who, "alibi_bias_max", given)
    return Alibi(config.kind, heads, width, bias_max, config.sources)
