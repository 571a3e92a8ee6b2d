"""The positions that a Hugging Face config describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from posenc._contract import checks
from posenc.configs import diffusion, facts, others, reader, rotation
from posenc.configs.facts import Fact
from posenc.configs.others import Alibi, Buckets, check_rotary, kind_of
from posenc.configs.reader import Config, open_config
from posenc.configs.rules import scaling_rule
from posenc.numerics import scaling
from posenc.numerics.axes import Axes


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
    parts: tuple[Recipe | others.Part, ...]
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
    return _recipe(found, layer_type, base)


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
    return Recipe(
        head_dim,
        rotation.base(config, layer_type) if base is None else base,
        rotation.rotary_dim(config, head_dim),
        interleaved,
        interleaved_out,
        scaling_rule(config),
        rotation.axes(config),
        config.sources,
        layer_type,
    )


def read_positions(config: Any, *, layer_type: str | None = None) -> Positions:
    """The encodings that a config describes, rotary or not: of one layer type, or of all."""
    found = open_config(config)
    if diffusion.is_diffusers(found.top):
        return Positions((_of_diffusers(found, layer_type),))
    if kind_of(found.top) is not None:
        parts = others.describe(found)
        if layer_type is not None:
            named = {getattr(part, "part", None): part for part in parts}
            if layer_type not in named:
                rule = f"layer_type must be one of {sorted(map(str, named))}"
                raise found.error(rule, layer_type, "Leave layer_type out.")
            parts = (named[layer_type],)
        return Positions(parts, *facts.lengths_of_others(found, parts))
    check_rotary(found)
    names = reader.rotating_types(found) if layer_type is None else (layer_type,)
    rotary = tuple(_recipe(found, name) for name in names)
    rules = [each.scaling for each in rotary]
    lengths = facts.lengths(found, rules)
    scale = facts.softmax_scale(found, rules[0])
    return Positions(
        rotary,
        *lengths,
        facts.without_rope(found),
        scale,
        facts.layer_types(found),
        facts.window(found),
        facts.chunk(found),
        facts.dual_chunk(found),
        facts.query_scale(found),
        facts.position_ids(found),
    )


def read_layers(config: Any, *, base: float | None = None) -> list[Recipe | None]:
    """The rotation of each layer that a config describes; None for layers that do not rotate."""
    found = open_config(config)
    check_rotary(found)
    count = found.count("layers", *facts.LAYERS, most=reader.MOST_LAYERS)
    still, named = facts.without_rope(found), found.top.get("layer_types")
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


def read_alibi(config: Any) -> Alibi:
    """The ALiBi that a config describes."""
    found = open_config(config)
    kind, directly = kind_of(found.top), "Construct ALiBi(num_heads) directly."
    known = {"rope_theta", "rope_parameters"} & found.model.keys()
    if kind == "alibi":
        (part,) = others.describe(found)
        if isinstance(part, Alibi):
            return part
        noun, hint = "ALiBi switched off", directly
    elif kind is not None:
        noun, hint = others.NOUNS[kind]
    elif known or reader.mentions_rotation(found.top):
        noun, hint = "rotary embeddings", "Use RoPE.from_config."
    else:
        noun, hint = "no known ALiBi; bloom, mpt and falcon have one", directly
    name = checks.shortened(repr(found.top.get("model_type")))
    raise ValueError(f"from_config: model_type {name} has {noun}.\n  {hint}")


def read_buckets(config: Any) -> Buckets:
    """The buckets of T5's bias that a config describes."""
    found = open_config(config)
    kind = kind_of(found.top)
    part = others.describe(found)[0] if kind == "buckets" else None
    if isinstance(part, Buckets):
        return part
    name, noun = checks.shortened(repr(found.top.get("model_type"))), "other positions"
    if kind is not None:
        noun = others.NOUNS[kind][0]
    hint = "Construct T5Bias(num_heads, causal=False) directly if the model has T5's bias."
    raise ValueError(f"from_config: model_type {name} has {noun}.\n  {hint}")
