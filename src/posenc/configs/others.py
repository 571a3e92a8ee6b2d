"""Positions that are not rotary: which model types have them, and what their configs say.

Read off the models of transformers, whose tables and biases the tests compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posenc._contract import checks
from posenc.configs.defaults import KIND_KEYS, speaks

# Models have a few hundred; slopes are made for each, so a larger number is not a count of heads.
_MOST_HEADS = 2**12


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
# Rows of a table, and where the row of the first position is.
_PLAIN = frozenset(
    """
    albert bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small
    blip_text_model canine clip_text_model convbert distilbert electra ernie fnet gpt2 gpt_bigcode
    gpt_neo imagegpt layoutlm layoutlmv2 led megatron-bert mobilebert openai-gpt rembert roc_bert
    siglip_text_model splinter squeezebert vilt visual_bert xlm
    """.split()
)
# Positions count from pad_token_id + 1.
_PAST_PADDING = frozenset(
    """
    camembert data2vec-text ibert layoutlmv3 lilt longformer luke markuplm mpnet prophetnet roberta
    roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod
    """.split()
)
# Two rows more than positions, before the first one.
_TWO_MORE = frozenset("bart biogpt mbart mra nystromformer opt plbart trocr yoso".split())
# Rates b^(-2i/D), which is a shift of zero, or b^(-i/(D/2 - 1)), which is one of one.
_SHIFTS = {
    **dict.fromkeys(("ctrl", "marian", "pegasus"), 0),
    **dict.fromkeys(("m2m_100", "nllb-moe", "pegasus_x", "speech_to_text", "xglm"), 1),
}
# Fairseq's, whose positions count from pad_token_id + 1.
_SHIFTED_PAST_PADDING = frozenset(("m2m_100", "nllb-moe", "speech_to_text", "xglm"))
KINDS: dict[str, str] = {
    **dict.fromkeys(("bloom", "mpt", "gpt_refact"), "alibi"),
    **dict.fromkeys(_PLAIN | _PAST_PADDING | _TWO_MORE, "learned"),
    **dict.fromkeys((*_SHIFTS, "whisper"), "sinusoidal"),
    **dict.fromkeys("codet5 longt5 mt5 switch_transformers t5 umt5".split(), "buckets"),
    **dict.fromkeys("deberta deberta-v2 funnel speecht5 udop xlnet".split(), "relative"),
    **dict.fromkeys(
        "data2vec-audio hubert unispeech unispeech-sat wav2vec2 wavlm".split(), "convolution"
    ),
    **dict.fromkeys(
        """
        beit blip blip-2 blip_vision_model clip clip_vision_model data2vec-vision deit dinov2
        dinov2_with_registers siglip siglip_vision_model videomae vit vit_mae
        """.split(),
        "patches",
    ),
    **dict.fromkeys("blip_2_qformer jamba mamba mamba2 nemotron_h rwkv zamba".split(), "none"),
}
# Where a table is narrower than the model.
_NARROW = {
    **dict.fromkeys(("albert", "convbert", "electra", "squeezebert"), "embedding_size"),
    "rembert": "input_embedding_size",
}
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
_LENGTHS = ("max_position_embeddings", "n_positions")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The key of `NOUNS` for what a type has; None for one that rotates, or is said to."""
    name = config.get("model_type")
    if not isinstance(name, str):
        return None
    if name == "falcon" and config.get("alibi"):
        return "alibi"
    return KINDS.get(name) if not speaks(config) else None


def instead(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The key, and its value, that says that positions are not rotary."""
    kind, key = config.get("model_type"), KIND_KEYS[0]
    if kind_of(config) is not None and kind != "falcon":
        return "model_type", kind
    found = [(each, config[each]) for each in KIND_KEYS if config.get(each)]
    if kind in ("esm", "granitemoehybrid") and not found:
        return key, None
    for each, said in found:
        # ModernBERT's files have kept the key of another model.
        if kind not in ("modernbert", "modernbert-decoder") and not any(
            name in str(said) for name in ("rope", "rotary")
        ):
            return each, said
    for each, wanted in (("alibi", False), ("use_mem_rope", True)):
        if config.get(each) is not None and bool(config[each]) is not wanted:
            return each, config[each]
    return None


def describe(config: Mapping[str, Any], prefix: str) -> tuple[Part, ...]:
    """What a type with a `kind_of` has; encoder and decoder one by one if they differ."""
    name, kind = config["model_type"], kind_of(config)
    if kind == "alibi" and name != "gpt_refact":
        return (_alibi(config, prefix),)
    if kind == "buckets":
        read = _Reader(config, prefix)
        sizes = read("num_buckets", "relative_attention_num_buckets", default=32)
        far = read("max_distance", "relative_attention_max_distance", default=128)
        return (Buckets(sizes, far, read("num_heads", *_HEADS), read.sources),)
    if name == "whisper":
        encoder, decoder = _Reader(config, prefix), _Reader(config, prefix)
        length = encoder("max_len", "max_source_positions")
        table = decoder("max_len", "max_target_positions")
        return (
            Sinusoidal(length, encoder("embed_dim", "d_model"), 0, 1, "encoder", encoder.sources),
            Learned(table, decoder("embed_dim", "d_model"), 0, "decoder", decoder.sources),
        )
    if name == "speech_to_text":
        keys = {"encoder": "max_source_positions", "decoder": "max_target_positions"}
    elif name == "led":
        keys = {part: f"max_{part}_position_embeddings" for part in ("encoder", "decoder")}
    else:
        keys = {"": ""}
    if kind in ("learned", "sinusoidal"):
        return tuple(_table(config, prefix, part or None, key) for part, key in keys.items())
    return (Other(NOUNS[kind or "none"][0]),)


def _table(config: Mapping[str, Any], prefix: str, part: str | None, key: str) -> Part:
    name, read = config["model_type"], _Reader(config, prefix)
    length = read("max_len", *((key,) if key else _LENGTHS))
    width = read("embed_dim", *((_NARROW[name],) if name in _NARROW else _WIDTHS))
    first = 0
    if name in _PAST_PADDING or name in _SHIFTED_PAST_PADDING:
        pad = config.get("pad_token_id")
        if pad is not None:
            read.sources["offset"] = f"{prefix}pad_token_id"
        first = 1 + checks.integer(
            "from_config", "pad_token_id", 1 if pad is None else pad, least=0
        )
    if name in _SHIFTS:
        return Sinusoidal(length, width, first, _SHIFTS[name], part, read.sources)
    if name in _TWO_MORE:
        length, first = length + 2, 2
    return Learned(length, width, first, part, read.sources)


def _alibi(config: Mapping[str, Any], prefix: str) -> Part:
    name, read = config["model_type"], _Reader(config, prefix)
    heads = read("num_heads", *_HEADS, most=_MOST_HEADS)
    if name == "falcon":
        width = checks.integer("from_config", "head_dim", read("head_dim", "hidden_size") // heads)
        read.sources["head_dim"] += f" / {read.sources['num_heads']}"
        return Alibi(name, heads, width, 8.0, read.sources)
    inner = config.get("attn_config")
    if name != "mpt" or not isinstance(inner, Mapping):
        return Alibi(name, heads, None, 8.0, read.sources)
    if inner.get("alibi") is False:
        if inner.get("rope"):
            return Other("rotary embeddings of its own code (attn_config.rope)")
        length, width = read("max_len", "max_seq_len"), read("embed_dim", *_WIDTHS)
        return Learned(length, width, 0, None, read.sources)
    peak = inner.get("alibi_bias_max")
    if peak is None:
        return Alibi(name, heads, None, 8.0, read.sources)
    read.sources["bias_max"] = f"{prefix}attn_config.alibi_bias_max"
    peak = checks.positive_float("from_config", "alibi_bias_max", peak)
    return Alibi(name, heads, None, peak, read.sources)


class _Reader:
    """Counts out of a config, and the keys they came from."""

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
