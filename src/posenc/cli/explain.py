"""`posenc explain`: the positions that a config describes, and the key of each value."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Annotated, Any

import typer

from posenc.cli import _print
from posenc.lab import explain as lab

_FACTS = {
    "trained_length": "trained length",
    "max_length": "maximal length",
    "without_rope": "layers without RoPE",
    "window": "sliding window",
    "chunk": "chunk",
    "softmax_scale": "softmax scale",
    "query_scale": "query scale",
    "position_ids": "position_ids",
}


def explain(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="A config.json, its folder, or a model's name on the hub."
        ),
    ],
    layer_type: Annotated[str | None, typer.Option(help="One of its layer types, not all.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Length of the sequence.")
    ] = None,
    as_python: Annotated[bool, typer.Option("--python", help="Print Python code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the positions that a model's config.json describes, and the key each part came from.

    Of a model on the hub, `org/name` or `org/name@revision`, only that file is downloaded.

    Example: posenc explain path/to/config.json --seq-len 32768
    """
    if as_python and as_json:
        raise ValueError("--python and --json exclude each other: the JSON contains the Python.")
    explained = lab.explain(config, layer_type=layer_type, seq_len=seq_len)
    if as_python:
        typer.echo(explained.python())
    elif as_json:
        typer.echo(json.dumps(explained.as_json(), indent=2))
    else:
        _show(explained)


def _show(explained: lab.Explanations) -> None:
    for part in explained.parts:
        # None stands for an argument that is left out.
        rows = [(name, *fact) for name, fact in part.arguments.items() if fact[0] is not None]
        rows += _numbers(part.numbers, part.numbers.get("longer", {}))
        rows.append(("build", part.build, ""))
        _table(part.kind if part.layer_type is None else f"{part.kind}, {part.layer_type}", rows)
    facts = {name: fact for name, fact in explained.facts.items() if fact is not None}
    # An image has no length.
    for name in ("trained_length", "max_length") if "position_ids" not in facts else ():
        facts.setdefault(name, ("not in the config", ""))
    if any(part.kind in lab.BIASES for part in explained.parts):
        facts["max_length"] = ("any: a bias has no last position", "")
    rows = [
        (words, _in_words(name, facts[name][0]), facts[name][1])
        for name, words in _FACTS.items()
        if name in facts
    ]
    rows += _layers(*facts.get("layer_types", ((), "")))
    _table("model", rows + [(key, words, key) for key, words in explained.others.items()])


def _numbers(numbers: dict[str, Any], longer: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """Rows of numbers, twice where those of longer sequences differ."""
    rows: list[tuple[str, Any, str]] = []
    for name in ("slopes", "wavelengths", "attention_factor"):
        differ = name in longer and longer[name] != numbers[name]
        if name in numbers and (differ or numbers[name] != 1.0):
            rows.append((name, numbers[name], "at the trained length" if differ else ""))
        if differ:
            rows.append((name, longer[name], f"at {longer['seq_len']} tokens"))
    return rows


def _layers(types: Sequence[str], source: str) -> list[tuple[str, Any, str]]:
    """A row for each type of layer, the most common last."""
    each: dict[str, list[int]] = {name: [] for name in sorted(set(types))}
    for i, name in enumerate(types):
        each[name].append(i)
    names = sorted(each, key=lambda name: len(each[name]))
    rows: list[tuple[str, Any, str]] = [(name, _indices(each[name]), source) for name in names]
    if rows:
        rest = "the other layers" if len(rows) > 1 else "all layers"
        rows[-1] = names[-1], rest, source
    return rows


def _indices(layers: Sequence[int]) -> str:
    """Which layers; those at equal steps are not all named."""
    words, steps = [str(layer) for layer in layers], {b - a for a, b in pairwise(layers)}
    if len(steps) == 1 and len(words) > 3:
        words[2:-1] = ["..."]
    return f"{', '.join(words)} ({len(layers)} layers)"


def _in_words(name: str, value: Any) -> Any:
    if name == "without_rope":
        return _indices(value)
    if name == "window":
        before, after = value
        where = "before it" if after == 0 else "on each side"
        return f"{1 + before + after} keys: a query's own, and {before} {where}"
    return f"{value} tokens: a query sees keys of its own" if name == "chunk" else value


def _table(title: str, rows: Sequence[tuple[str, Any, str]]) -> None:
    width = max(shutil.get_terminal_size((100, 24)).columns, 40)
    cells = [(name, _short(value, width // 2), source) for name, value, source in rows]
    heads = ("argument", "value", "from")
    _print.table(title, heads, cells, justify="left")


def _short(value: Any, room: int) -> str:
    """A value as text whose lists of numbers take at most about ``room`` characters each."""
    if isinstance(value, float):
        return f"{value:.6g}" if len(repr(value)) > 12 else repr(value)
    if is_dataclass(value):
        values = ((each.name, getattr(value, each.name)) for each in fields(value))
        words = [f"{name}={_short(one, room)}" for name, one in values if one is not None]
        return f"{type(value).__name__}({', '.join(words)})"
    if not isinstance(value, (list, tuple)):
        return str(value)
    words = [_short(each, room) for each in value]
    if sum(map(len, words)) + 2 * len(words) <= room:
        return f"({', '.join(words)})"
    return f"({', '.join(words[: room // 20])}, ..., {words[-1]}: {len(words)} in all)"
