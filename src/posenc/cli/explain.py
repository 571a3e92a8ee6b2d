"""`posenc explain`: the positions that a config describes, and the key of each value."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.cli import _print
from posenc.lab import explain as lab

_FACTS = {
    "trained_length": "trained length",
    "max_length": "maximal length",
    "without_rope": "layers without RoPE",
    "softmax_scale": "softmax scale",
}


def explain(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A config.json, or its folder.")],
    layer_type: Annotated[str | None, typer.Option(help="One of its layer types, not all.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Length of the sequence.")] = None,
    as_python: Annotated[bool, typer.Option("--python", help="Print Python code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the positions that a model's config.json describes, and the key each part came from.

    Example: posenc explain path/to/config.json --seq-len 32768
    """
    if as_python and as_json:
        raise ValueError("--python and --json exclude each other: the JSON contains the Python.")
    found = lab.explain(config, layer_type=layer_type, seq_len=seq_len)
    if as_python:
        typer.echo(found.python())
    elif as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        _show(found)


def _show(found: lab.Report) -> None:
    for part in found.parts:
        rows = [(name, *fact) for name, fact in part.arguments.items()]
        rows += [(name, value, "") for name, value in part.numbers.items() if name != "inv_freq"]
        rows.append(("build", part.build, ""))
        _table(part.kind if part.layer_type is None else f"{part.kind}, {part.layer_type}", rows)
    facts = {name: fact for name, fact in found.facts.items() if fact is not None}
    for name in ("trained_length", "max_length"):
        facts.setdefault(name, ("not in the config", ""))
    if any(part.kind in lab.BIASES for part in found.parts):
        facts["max_length"] = ("any: a bias has no last position", "")
    _table("model", [(words, *facts[name]) for name, words in _FACTS.items() if name in facts])
    for name, state in lab.kernels().items():
        typer.echo(f"{name}: {state}")


def _table(title: str, rows: Sequence[tuple[str, Any, str]]) -> None:
    width = max(shutil.get_terminal_size((100, 24)).columns, 40)
    cells = [(name, _short(value, width // 2), source) for name, value, source in rows]
    heads = ("argument", "value", "from")
    _print.table(title, heads, cells, justify="left", piped_width=width)


def _short(value: Any, room: int) -> str:
    """A value as text whose lists of numbers take at most about ``room`` characters each."""
    if isinstance(value, float):
        return f"{value:.6g}" if len(repr(value)) > 12 else repr(value)
    if is_dataclass(value):
        held = {each.name: _short(getattr(value, each.name), room) for each in fields(value)}
        words = [f"{name}={text}" for name, text in held.items()]
        return f"{type(value).__name__}({', '.join(words)})"
    if not isinstance(value, (list, tuple)):
        return str(value)
    words = [_short(each, room) for each in value]
    if sum(map(len, words)) + 2 * len(words) <= room:
        return f"({', '.join(words)})"
    return f"({', '.join(words[: room // 20])}, ..., {words[-1]}: {len(words)} in all)"
