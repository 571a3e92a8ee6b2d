"""The positions that a Hugging Face config describes: encodings, lengths, layers and scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from posenc._contract import checks
from posenc.configs import diffusion, non_rotary, reader, rotation
from posenc.configs.non_rotary import Alibi, Buckets, PositionTable, check_rotary, kind_of
from posenc.configs.reader import Config, open_config
from posenc.configs.rules import scaling_rule
from posenc.numerics import scaling
from posenc.numerics.axes import Axes

# A value, and the key that it was read from.
Fact = tuple[Any, str]
_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length",
    "n_ctx",
)  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# Of a RoPE, whatever the config says of them.
_ARGUMENTS = ("base", "rotary_dim", "interleaved", "interleaved_out", "scaling", "axes")
_DUAL_CHUNK = "dual_chunk_attention_config"
Bias = TypeVar("Bias", bound=non_rotary.Bias)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The arguments of a `RoPE`, the key of the config that each came from, and the layers."""

    head_dim: int
    base: float
    rotary_dim: int
    interleaved: bool
    interleaved_out: bool | None
    scaling: scaling.Rule | None
    axes: Axes | None
    sources: Mapping[str, str] = field(compare=False)
    # None for all layers.
    layer_type: str | None = field(default=None, compare=False)
    inv_freq: tuple[float, ...] | None = None
    # Python that constructs it, where RoPE.from_config does not.
    line: str | None = field(default=None, compare=False)

    def arguments(self) -> dict[str, Any]:
        """Keywords for `RoPE`."""
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.compare}
        if self.inv_freq is None:
            del given["inv_freq"]
        # None means the whole head, even if the user passes another head_dim.
        return {**given, "rotary_dim": None} if self.rotary_dim == self.head_dim else given


@dataclass(frozen=True, slots=True)
class Positions:
    """The encodings of a model, and its lengths, each with the key that it was read from."""

    # One for all layers, one for each layer type, or one for encoder and decoder each.
    parts: tuple[Recipe | non_rotary.Part, ...]
    trained_length: Fact | None = None
    max_length: Fact | None = None
    # Indices of the layers that do not rotate, where others do.
    without_rope: Fact | None = None
    # None for 1 / sqrt(head_dim).
    softmax_scale: Fact | None = None
    # The type of each layer; None if all have full attention.
    layer_types: Fact | None = None
    # Keys that a query sees before and after its own, in layers of sliding attention.
    window: Fact | None = None
    # Tokens of a chunk, in layers of chunked attention.
    chunk: Fact | None = None
    # ``chunk`` and ``window`` of `DualChunk`.
    dual_chunk: Fact | None = None
    # A factor of queries, as Python of their position or of the length.
    query_scale: Fact | None = None
    # Python of the coordinates of an image's tokens.
    position_ids: Fact | None = None


def read(config: Any, *, layer_type: str | None = None, base: float | None = None) -> Recipe:
    """The rotation that a config describes, with ``base`` instead of its own if that is given."""
    found = open_config(config)
    if diffusion.is_diffusers(found.top):
        return _of_diffusers(found, layer_type, base)
    check_rotary(found)
    _refuse_axial(found)
    return _recipe(found, layer_type, base)


def _refuse_axial(config: Config) -> None:
    """Refuse the rotation of an image, whose positions no caller of a text model has."""
    if "axial" in config.model:
        rule = f"model_type {config.kind!r} is not read as a RoPE: it rotates the patches of images"
        line = f"{_recipe(config, None).line} at {config.model['patches']}"
        raise ValueError(f"{config.who}: {rule}.\n  Use {line}.")


def _axial_line(config: Config, recipe: Recipe, base: float) -> str | None:
    """Python that constructs the rotation of an image."""
    form = config.model.get("axial")
    if form is None:
        return None
    count, rates = config.model["coordinates"], str(base)
    axes = f"Axial({count}, rates='shared')" if form == "shared" else f"Axial({count})"
    if form == "alternating":
        pairs = recipe.rotary_dim // 2 // count
        rates = (
            f"inv_freq=[{base} ** (-i / {pairs}) for i in range({pairs}) for _ in range({count})]"
        )
        axes = f"Sections({(pairs,) * count}, interleaved=True)"
    words = [str(recipe.head_dim), "None", rates, f"interleaved={recipe.interleaved}"]
    if recipe.rotary_dim != recipe.head_dim:
        words.append(f"rotary_dim={recipe.rotary_dim}")
    return f"posenc.RoPE({', '.join(words)}, axes=posenc.axes.{axes})"


def _of_diffusers(config: Config, layer_type: str | None, base: float | None = None) -> Recipe:
    if layer_type is not None:
        rule, hint = "layer_type must be None for a model of diffusers", "Leave it out."
        raise config.error(rule, layer_type, hint)
    given = diffusion.arguments(config)
    if base is not None:
        given["base"] = base
    return Recipe(interleaved_out=None, scaling=None, sources=config.sources, **given)


def _recipe(config: Config, layer_type: str | None, base: float | None = None) -> Recipe:
    config, layer_type = reader.choose_layer(replace(config, sources={}), layer_type)
    head_dim = rotation.head_dim(config, layer_type)
    interleaved, interleaved_out = rotation.layout(config)
    base = rotation.base(config, layer_type) if base is None else base
    width = rotation.rotary_dim(config, head_dim)
    rates = rotation.inv_freq(config, base, width)
    axes, rule = rotation.axes(config, width), scaling_rule(config)
    silent = "the model's code" if config.model else "assumed"
    recipe = Recipe(
        head_dim,
        base if rates is None else 10_000.0,
        width,
        interleaved,
        interleaved_out,
        rule,
        axes,
        {**dict.fromkeys(_ARGUMENTS, silent), **config.sources},
        layer_type,
        rates,
    )
    return replace(recipe, line=_axial_line(config, recipe, base))


def read_positions(config: Any, *, layer_type: str | None = None) -> Positions:
    """The encodings that a config describes, rotary or not: of one layer type, or of all."""
    found = open_config(config)
    if diffusion.is_diffusers(found.top):
        return Positions((_of_diffusers(found, layer_type),))
    if kind_of(found.top) is not None:
        parts = non_rotary.describe(found)
        if layer_type is not None:
            named = {getattr(part, "part", None): part for part in parts}
            if layer_type not in named:
                rule = f"layer_type must be one of {sorted(map(str, named))}"
                raise found.error(rule, layer_type, "Leave layer_type out.")
            parts = (named[layer_type],)
        return Positions(parts, *_lengths_without_rotation(found, parts))
    check_rotary(found)
    names = reader.rotating_types(found) if layer_type is None else (layer_type,)
    rotary = tuple(_recipe(found, name) for name in names)
    rules = [each.scaling for each in rotary]
    return Positions(
        rotary,
        *_lengths(found, rules),
        _without_rope(found),
        _softmax_scale(found, rules[0]),
        _layer_types(found),
        _window(found),
        _chunk(found),
        _dual_chunk(found),
        _query_scale(found),
        _position_ids(found),
    )


def read_layers(config: Any, *, base: float | None = None) -> list[Recipe | None]:
    """The rotation of each layer that a config describes; None for layers that do not rotate."""
    found = open_config(config)
    check_rotary(found)
    _refuse_axial(found)
    count = found.count("layers", *_LAYERS, most=reader.MOST_LAYERS)
    still, named = _without_rope(found), found.top.get("layer_types")
    own = rotation.layer_bases(found) if base is None else []
    if own:
        if len(own) < count:
            rule = f"layer_rope_theta must have a number for each of the {count} layers"
            raise found.error(rule, len(own), "Fix the config.")
        made = {theta: _recipe(found, None, theta) for theta in own[:count] if theta}
        return [made.get(theta) for theta in own[:count]]
    recipes = {name: _recipe(found, name, base) for name in reader.rotating_types(found)}
    types = [None] * count if None in recipes else named
    if not isinstance(types, (list, tuple)) or len(types) < count:
        rule = f"layer_types must name the {count} layers, because rotations differ by it"
        hint = "Add layer_types, a name for each layer."
        raise found.error(rule, checks.describe(named), hint)
    layers: list[Recipe | None] = [None] * count
    for i in set(range(count)) - set(() if still is None else still[0]):
        if types[i] not in list(recipes):
            raise found.error(f"layer_types must be among {list(recipes)}", types[i])
        layers[i] = recipes[types[i]]
    return layers


# Who has a bias of each kind, and how to construct it.
_BIASES: dict[type, tuple[str, str]] = {
    Alibi: ("ALiBi; bloom, mpt and falcon have one", "ALiBi(num_heads)"),
    Buckets: ("buckets; t5, mt5 and umt5 have them", "T5Bias(num_heads, causal=...)"),
    non_rotary.Sinusoids: (
        "terms of Transformer-XL; xlnet and wav2vec2-conformer have them",
        "TransformerXLBias(num_heads, embed_dim=...)",
    ),
    non_rotary.Keys: (
        "vectors of Shaw; speecht5 and wav2vec2-bert have them",
        "RelativeKeys(head_dim, max_distance=...)",
    ),
    non_rotary.Disentangled: (
        "vectors of DeBERTa; deberta and deberta-v2 have them",
        "DeBERTaBias(num_heads, head_dim=..., causal=...)",
    ),
}


def read_bias(config: Any, wanted: type[Bias]) -> Bias:
    """The bias of the kind ``wanted`` that a config describes."""
    found = open_config(config)
    kind, rotates = kind_of(found.top), {"rope_theta", "rope_parameters"} & found.model.keys()
    noun, hint = _BIASES[wanted]
    noun, hint = f"no known {noun}", f"Construct {hint} directly."
    if kind == wanted.kind:
        (part,) = non_rotary.describe(found)
        if isinstance(part, wanted):
            return part
        key = {"alibi": "ALiBi", "deberta": "relative attention"}.get(wanted.kind, "positions")
        noun = f"{key} switched off"
    elif kind is not None:
        noun, hint = non_rotary.DESCRIPTIONS[kind]
    elif rotates or reader.mentions_rotation(found.top):
        noun, hint = "rotary embeddings", "Use RoPE.from_config."
    name = checks.shortened(repr(found.top.get("model_type")))
    raise ValueError(f"from_config: model_type {name} has {noun}.\n  {hint}")


def _longest(config: Config) -> Fact | None:
    """The maximal length that a config names."""
    for key in _LENGTHS:
        if _is_size(config.top.get(key)):
            return config.top[key], config.prefix + key
    return None


def _lengths(
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
    if isinstance(rule, scaling.Llama3) and named is not None and named[0] > original:
        # Its factor is that of slow rates only: Llama 3.2 has 32, for 16 times the length.
        longest = named
    return (original, config.prefix + key), longest


def _lengths_without_rotation(
    config: Config, parts: Iterable[object]
) -> tuple[Fact | None, Fact | None]:
    """The trained and the maximal length of a model without rotation; a bias has no maximum."""
    for part in parts:
        if isinstance(part, PositionTable):
            first = part.offset if part.downscale_freq_shift is None else 0
            found = part.max_len - first, part.sources["max_len"]
            return found, found
    return _longest(config), None


def _without_rope(config: Config) -> Fact | None:
    """Indices of the layers that do not rotate, of a model that rotates in others."""
    found, types = _unrotated(config), config.layer_types()
    other = tuple(i for i, name in enumerate(types) if name in reader.ATTENTIONLESS)
    if not other:
        return found
    source = config.prefix + config.types_key
    if found is None:
        return other, source
    return tuple(sorted({*found[0], *other})), ", ".join(dict.fromkeys((found[1], source)))


def _unrotated(config: Config) -> Fact | None:
    """Indices of the layers whose attention does not rotate."""
    flags, types = config.top.get("no_rope_layers"), config.layer_types()
    count = config.layer_count()
    # Lists may be longer than the model.
    if isinstance(flags, (list, tuple)) and flags:
        # The list holds 1 for a layer that rotates.
        layers = tuple(i for i, rotates in enumerate(flags[:count]) if not rotates)
        return layers, f"{config.prefix}no_rope_layers"
    layers = tuple(i for i, theta in enumerate(rotation.layer_bases(config)[:count]) if not theta)
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


def _softmax_scale(config: Config, rule: scaling.Rule | None) -> Fact | None:
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


def _layer_types(config: Config) -> Fact | None:
    """The type of each layer, where they differ or do not have full attention."""
    types = config.layer_types()
    if {"full_attention"}.issuperset(types):
        return None
    return tuple(types), config.prefix + config.types_key


def _window(config: Config) -> Fact | None:
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


def _chunk(config: Config) -> Fact | None:
    """Tokens of a chunk, in layers whose queries see only the keys of their chunk."""
    key = "attention_chunk_size"
    size = config.value(key)
    if "chunked_attention" not in config.layer_types() or not _is_size(size):
        return None
    return size, config.source(key)


def _dual_chunk(config: Config) -> Fact | None:
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


def _query_scale(config: Config) -> Fact | None:
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


def _position_ids(config: Config) -> Fact | None:
    """Where the tokens of an image are, in a model that counts no tokens."""
    if "coordinates" not in config.model:
        return None
    if "patches" in config.model:
        return config.model["patches"], f"{config.prefix}model_type"
    # A class token comes before the registers.
    registers = config.value("num_register_tokens")
    before = 1 + checks.integer(config.who, "num_register_tokens", registers, least=0)
    text = f"math.tau * posenc.positions.normalized_grid(rows, columns, prefix={before})"
    return text, f"{config.prefix}model_type"


def _count(config: Config, keys: Mapping[str, Any], key: str) -> int | None:
    value = keys.get(key)
    return None if value is None else checks.integer(config.who, key, value)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= checks.MAX_POSITION
