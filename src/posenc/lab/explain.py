"""What a model's config comes down to, which of its keys said so, and the Python that builds it."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from posenc import ALiBi, RoPE, backends, configs, scaling

# A value, and the key it came from.
Fact = tuple[Any, str]
_T5 = "T5's relative bias"
BIASES = ("ALiBi", _T5)
_USUAL = {"base": 10_000.0, "interleaved_out": None, "rotary_dim": None}


@dataclass(frozen=True, slots=True)
class Explanation:
    """One encoding of a model.

    Attributes:
        kind: What it is, in words.
        layer_type: The layers that have it, or ``encoder`` or ``decoder``; None for all.
        arguments: What builds it: each argument, its value and its source.
        numbers: What follows from them: rates and gain of a rotation, slopes of ALiBi.
        python: The expression that builds it; None where posenc has no module for it.
        build: How to build it from the config, or the reason why posenc cannot.
    """

    kind: str
    layer_type: str | None
    arguments: dict[str, Fact]
    numbers: dict[str, Any]
    python: str | None
    build: str

    def wavelengths(self) -> tuple[float, float] | None:
        """Tokens in one turn of the fastest pair, and of the slowest that turns."""
        turning = [rate for rate in self.numbers.get("inv_freq", ()) if rate > 0]
        return (math.tau / max(turning), math.tau / min(turning)) if turning else None

    def as_json(self) -> dict[str, Any]:
        """For a program to read."""
        arguments = {name: _with_source(fact) for name, fact in self.arguments.items()}
        head = {"kind": self.kind, "layer_type": self.layer_type, "arguments": arguments}
        return {**head, **self.numbers, "python": self.python}


@dataclass(frozen=True, slots=True)
class Report:
    """All of a config: its encodings, and what holds for the whole model."""

    parts: list[Explanation]
    facts: dict[str, Fact | None] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For a program to read."""
        whole = {name: fact and _with_source(fact) for name, fact in self.facts.items()}
        return {"layers": [part.as_json() for part in self.parts], **whole, "kernels": kernels()}

    def python(self) -> str:
        """The lines that build it.

        Examples:
            >>> print(explain({"model_type": "bloom", "n_head": 16}).python())
            import posenc
            <BLANKLINE>
            positions = posenc.ALiBi(16)
        """
        for part in self.parts:
            if part.python is None:
                raise ValueError(f"explain: {part.build}.")
        first = self.parts[0]
        lines = ["import posenc", ""]
        if any("torch." in str(part.python) for part in self.parts):
            lines.insert(0, "import torch")
        if len(self.parts) == 1 and first.layer_type is None:
            lines.append(f"positions = {first.python}")
        else:
            # Names come from the file, so they are quoted, never made to be Python.
            each = [f"    {part.layer_type!r}: {part.python}," for part in self.parts]
            lines += ["positions = {", *each, "}"]
        if first.kind == "learned table" and "offset" in first.arguments:
            lines.append(f"# The first position has row {first.arguments['offset'][0]}:")
            lines.append(f"# positions(x, offset={first.arguments['offset'][0]})")
        return "\n".join(lines)


def explain(config: Any, *, layer_type: str | None = None, seq_len: int | None = None) -> Report:
    """Resolve a config: one explanation for each layer type, or for the one that is named.

    Args:
        config: As `RoPE.from_config` takes it.
        layer_type: The one to explain; all if None.
        seq_len: The length at which rules that depend on it are taken.

    Examples:
        >>> (found,) = explain({"head_dim": 64, "rotary_emb_base": 5e5}).parts
        >>> found.arguments["base"]
        (500000.0, 'rotary_emb_base')
    """
    found = configs.read_positions(config, layer_type=layer_type)
    names = ("trained_length", "max_length", "without_rope", "softmax_scale")
    parts = [_explained(part, seq_len) for part in found.parts]
    return Report(parts, {name: getattr(found, name) for name in names})


def kernels() -> dict[str, str]:
    """Which kernels there are, and why not the others."""
    return {
        each.name: f"{'serves' if each.available else 'not for'} {each.serves}: {each.why}"
        for each in backends()
    }


def _explained(part: Any, seq_len: int | None) -> Explanation:
    if isinstance(part, configs.Rotary):
        return _rotary(part, seq_len)
    if isinstance(part, configs.Other):
        return Explanation(part.noun, None, {}, {}, None, f"posenc has no module for {part.noun}")
    left_out = ("model", "part", "sources")
    given = {each.name: getattr(part, each.name) for each in fields(part)}
    arguments = {
        name: (value, part.sources.get(name, "model_type"))
        for name, value in given.items()
        if name not in left_out and value is not None and (name, value) != ("offset", 0)
    }
    if isinstance(part, configs.Alibi):
        alibi, python = ALiBi(part.num_heads, bias_max=part.bias_max), f"({part.num_heads})"
        if part.bias_max != 8:
            python = f"({part.num_heads}, bias_max={part.bias_max})"
        if part.model == "falcon":
            alibi = ALiBi.like("falcon", part.num_heads, head_dim=part.head_dim)
            python = f".like('falcon', {part.num_heads}, head_dim={part.head_dim})"
        slopes = {"slopes": alibi.slopes.tolist()}
        build = "posenc.ALiBi.from_config(config)"
        return Explanation("ALiBi", None, arguments, slopes, f"posenc.ALiBi{python}", build)
    if isinstance(part, configs.Learned):
        python = f"posenc.LearnedPosEmbedding({part.max_len}, {part.embed_dim})"
        build = python
        if part.offset:
            build += f", and call it with offset={part.offset}: the first position's row"
        return Explanation("learned table", part.part, arguments, {}, python, build)
    if isinstance(part, configs.Sinusoidal):
        rows = f"torch.arange({part.offset}, {part.offset + part.max_len})"
        shift = f"downscale_freq_shift={part.downscale_freq_shift}"
        python = f"posenc.functional.timestep_embedding({rows}, {part.embed_dim}, {shift})"
        return Explanation("sinusoidal", part.part, arguments, {}, python, python)
    return Explanation(_T5, None, arguments, {}, None, f"posenc has no module for {_T5}")


def _rotary(part: configs.Rotary, seq_len: int | None) -> Explanation:
    recipe, given = part.recipe, part.recipe.arguments()
    rope = RoPE(max_seq_len=None, **given)
    arguments = {
        name: (value, recipe.sources.get(name, "default")) for name, value in given.items()
    }
    numbers = {
        "attention_factor": rope.attention_factor(seq_len),
        "inv_freq": rope.inv_freq(seq_len).tolist(),
    }
    words = [str(recipe.head_dim), "max_seq_len=None"]
    for name, value in given.items():
        if name in ("scaling", "axes"):
            words += [f"{name}={_code(value)}"] if value is not None else []
        elif name != "head_dim" and (name not in _USUAL or value != _USUAL[name]):
            words.append(f"{name}={value!r}")
    build = "posenc.RoPE.from_config(config)"
    if part.layer_type is not None:
        build = f"posenc.RoPE.from_config(config, layer_type={part.layer_type!r})"
    python = f"posenc.RoPE({', '.join(words)})"
    return Explanation("RoPE", part.layer_type, arguments, numbers, python, build)


def _code(value: Any) -> str:
    """A rule or an arrangement of axes as Python, without what is the default anyway."""
    room = "scaling" if isinstance(value, scaling.Rule) else "axes"
    given = [(each, getattr(value, each.name)) for each in fields(value)]
    words = [
        f"{each.name}={held!r}"
        for each, held in given
        if each.default is MISSING or held != each.default
    ]
    return f"posenc.{room}.{type(value).__name__}({', '.join(words)})"


def _with_source(fact: Fact) -> dict[str, Any]:
    value, source = fact
    plain = value is None or isinstance(value, (bool, int, float, str, tuple))
    return {"value": value if plain else repr(value), "from": source}
