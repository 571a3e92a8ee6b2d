"""The encodings that a config describes, the key of each value, and the Python that builds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from posenc import ALiBi, RoPE, axes, configs, scaling
from posenc.configs import non_rotary

# A value, and the key it came from.
Fact = tuple[Any, str]
_T5 = "T5's relative bias"
# The module of each bias of vectors, and its first argument.
_VECTORS: dict[type, tuple[str, str]] = {
    configs.Sinusoids: ("TransformerXLBias", "num_heads"),
    configs.Keys: ("RelativeKeys", "head_dim"),
    configs.Disentangled: ("DeBERTaBias", "num_heads"),
}
BIASES = ("ALiBi", _T5, *(name for name, _ in _VECTORS.values()))
# Defaults of RoPE that are not None: arguments equal to them are left out.
_USUAL = {"base": 10_000.0}


@dataclass(frozen=True, slots=True)
class Explanation:
    """One encoding of a model."""

    kind: str
    layer_type: str | None
    # Its arguments, each with the key it came from.
    arguments: dict[str, Fact]
    # Numbers that follow from them: rates and gain of a rotation, slopes of ALiBi. Those of longer
    # sequences are in ``longer``, where a rule depends on the length.
    numbers: dict[str, Any]
    # The expression that builds it, None if posenc has no module for it.
    python: str | None
    # How to build it from the config, or why posenc cannot.
    build: str


@dataclass(frozen=True, slots=True)
class Explanations:
    """The encodings of a config, and facts about the whole model."""

    parts: list[Explanation]
    facts: dict[str, Fact | None]
    # How to build the positions of images and sounds, by the keys of their configs.
    others: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        layers = [
            {
                "kind": part.kind,
                "layer_type": part.layer_type,
                "arguments": {name: _with_source(fact) for name, fact in part.arguments.items()},
                **part.numbers,
                "python": part.python,
            }
            for part in self.parts
        ]
        facts = {name: fact and _with_source(fact) for name, fact in self.facts.items()}
        return {"layers": layers, **facts, "others": self.others}

    def python(self) -> str:
        """Python code that builds the encodings."""
        for part in self.parts:
            if part.python is None:
                raise ValueError(f"explain: there is no code for {part.kind}. {part.build}")
        first = self.parts[0]
        lines = ["import posenc", ""]
        if any("torch." in str(part.python) for part in self.parts):
            lines.insert(0, "import torch")
        if len(self.parts) == 1 and first.layer_type is None:
            lines.append(f"positions = {first.python}")
        else:
            # Layer types come from the file, so they are quoted and never become code.
            each = [f"    {part.layer_type!r}: {part.python}," for part in self.parts]
            lines += ["positions = {", *each, "}"]
        if first.kind == "learned table" and "offset" in first.arguments:
            lines.append(f"# Call it with offset={first.arguments['offset'][0]}: the first row.")
        if without := self.facts["without_rope"]:
            lines.append(f"# Not for the layers {without[0]}, which do not rotate.")
        return "\n".join(lines)


def explain(
    config: Any, *, layer_type: str | None = None, seq_len: int | None = None
) -> Explanations:
    """Resolve a config: one explanation for each layer type, or for the one that is named.

    Rules that depend on the length of a sequence are evaluated at ``seq_len``.
    """
    config = configs.as_dict("from_config", config)
    positions = configs.read_positions(config, layer_type=layer_type)
    longest = 0 if positions.max_length is None else positions.max_length[0]
    parts = [_explained(part, seq_len, longest) for part in positions.parts]
    if positions.dual_chunk is not None:
        parts = [_in_chunks(part, *positions.dual_chunk) for part in parts]
    if positions.without_rope is not None:
        how = "posenc.rope_layers(config), which has None for layers without RoPE"
        parts = [replace(part, build=how) for part in parts]
    names = (each.name for each in fields(positions) if each.name not in ("parts", "dual_chunk"))
    facts = {name: getattr(positions, name) for name in names}
    others = configs.other_parts(config) if layer_type is None else {}
    return Explanations(parts, facts, {key: _other(part) for key, part in others.items()})


def _other(config: Mapping[str, Any]) -> str:
    """How to build the positions of a part of a model, or why they are not shown."""
    kind = config.get("model_type")
    if not configs.model_defaults(kind) and not configs.mentions_rotation(config):
        return f"not shown: model_type {kind!r:.80} is not known"
    try:
        found = explain(config)
    except (TypeError, ValueError) as error:
        return f"not shown: {str(error).splitlines()[0].removeprefix('from_config: ')}"
    words = [f"{part.kind}: {part.build}" for part in found.parts]
    if at := found.facts["position_ids"]:
        words[-1] += f" at {at[0]}"
    return "; ".join(words)


def _in_chunks(part: Explanation, sizes: tuple[int, int], key: str) -> Explanation:
    """Dual Chunk Attention around a rotation."""
    arguments = {**part.arguments, "chunk": (sizes[0], key), "window": (sizes[1], key)}
    python, build = (
        f"posenc.DualChunk({inner}, chunk={sizes[0]}, window={sizes[1]})"
        for inner in (part.python, part.build)
    )
    kind = "RoPE with Dual Chunk Attention"
    return replace(part, kind=kind, arguments=arguments, python=python, build=build)


def _explained(part: Any, seq_len: int | None, longest: int) -> Explanation:
    if isinstance(part, configs.Recipe):
        return _rotary(part, seq_len, longest)
    if isinstance(part, str):
        name, hint = non_rotary.DESCRIPTIONS[part]
        return Explanation(name, None, {}, {}, None, hint)
    values = {each.name: getattr(part, each.name) for each in fields(part)}
    hidden = {"model", "part", "sources", *(() if values.get("offset") else ("offset",))}
    values = {name: x for name, x in values.items() if x is not None and name not in hidden}
    silent = "the model's code" if type(part) in _VECTORS else "model_type"
    arguments = {name: (x, part.sources.get(name, silent)) for name, x in values.items()}
    if isinstance(part, configs.Buckets):
        python = _call("T5Bias", **values, causal=False, scale=1.0) + "  # the encoder's"
        build = "posenc.T5Bias.from_config(config, causal=False)  # True in the decoder"
        return Explanation(_T5, None, arguments, {}, python, build)
    if type(part) in _VECTORS:
        name, first = _VECTORS[type(part)]
        python = _call(name, values.pop(first), **values)
        build = f"posenc.{name}.from_config(config)"
        return Explanation(name, None, arguments, {}, python, build)
    if isinstance(part, configs.Alibi):
        slopes = {"slopes": ALiBi.from_model(part.model, **values).slopes.tolist()}
        python = _call("ALiBi.from_model", part.model, **values)
        build = "posenc.ALiBi.from_config(config)"
        return Explanation("ALiBi", None, arguments, slopes, python, build)
    if part.downscale_freq_shift is None:
        python = build = _call("LearnedPosEmbedding", part.max_len, part.embed_dim)
        if part.offset:
            build += f", and call it with offset={part.offset}: the first position's row"
        return Explanation("learned table", part.part, arguments, {}, python, build)
    rows = f"torch.arange({part.offset}, {part.offset + part.max_len})"
    shift = f"downscale_freq_shift={part.downscale_freq_shift}"
    python = f"posenc.functional.timestep_embedding({rows}, {part.embed_dim}, {shift})"
    return Explanation("sinusoidal", part.part, arguments, {}, python, python)


def _rotary(part: configs.Recipe, seq_len: int | None, longest: int) -> Explanation:
    keywords, sources = part.arguments(), part.sources
    rope = RoPE(max_seq_len=None, **keywords)
    arguments = {
        name: (value, sources.get(name, "the model's code")) for name, value in keywords.items()
    }
    numbers = _numbers(rope, seq_len)
    rule: Any = rope.scaling
    trained = None if rule is None else rule.trained_length()
    if seq_len is None and trained is not None:
        # The numbers above are those of sequences up to the trained length.
        length = max(longest, trained + 1)
        numbers["longer"] = {"seq_len": length, **_numbers(rope, length)}
    layer = "" if part.layer_type is None else f", layer_type={part.layer_type!r}"
    build = part.line or f"posenc.RoPE.from_config(config{layer})"
    unusual = {name: value for name, value in keywords.items() if value != _USUAL.get(name)}
    python = _call("RoPE", unusual.pop("head_dim"), max_seq_len=None, **unusual)
    return Explanation("RoPE", part.layer_type, arguments, numbers, python, build)


def _numbers(rope: RoPE, seq_len: int | None) -> dict[str, Any]:
    rates = rope.scaled_inv_freq(seq_len).tolist()
    numbers = {"attention_factor": rope.attention_factor(seq_len), "inv_freq": rates}
    if waves := [math.tau / rate for rate in rates if rate > 0]:
        # An image's coordinates need not be tokens.
        image = isinstance(rope.axes, axes.Axial) or rope.inv_freq is not None
        unit = "" if image else " tokens"
        numbers["wavelengths"] = f"{_length(min(waves))} to {_length(max(waves))}{unit}"
    return numbers


def _length(wave: float) -> str:
    return f"{wave:.4g}" if wave < 1000 else f"{wave:,.0f}"


def _call(function: str, *positional: Any, **keywords: Any) -> str:
    """A call of a function of posenc, as Python."""
    words = [*map(_code, positional), *(f"{name}={_code(x)}" for name, x in keywords.items())]
    return f"posenc.{function}({', '.join(words)})"


def _code(value: Any) -> str:
    """A value as Python; rules and axes are written without arguments that have their default."""
    if not is_dataclass(value):
        return repr(value)
    values = ((each, getattr(value, each.name)) for each in fields(value))
    room = "scaling" if isinstance(value, scaling.Rule) else "axes"
    given = {each.name: x for each, x in values if x != each.default}
    return _call(f"{room}.{type(value).__name__}", **given)


def _with_source(fact: Fact) -> dict[str, Any]:
    value, source = fact
    return {"value": _code(value) if is_dataclass(value) else value, "from": source}
