"""`posenc explain`: what a config says about positions, and which key said it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posenc._contract.checks import printable
from posenc.cli._root import Refused
from posenc.lab import explain as lab

_HELP = """Show the positions that a model's config.json describes, and the key each part came from.

Example: posenc explain path/to/config.json --seq-len 32768
"""
_FACTS = {
    "trained_length": "trained length",
    "max_length": "maximal length",
    "without_rope": "layers without RoPE",
    "softmax_scale": "softmax scale",
}
# Columns for what another program reads, unless COLUMNS says otherwise.
_PIPED = 100


def explain(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A config.json, or its folder.")],
    layer_type: Annotated[
        str | None, typer.Option(help="One of its layer types.", show_default="all")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="For rules that depend on it.", show_default="short")
    ] = None,
    as_python: Annotated[
        bool, typer.Option("--python", help="Print the Python that builds it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a config says; the help text is set below, with its example."""
    if as_python and as_json:
        raise Refused("--python and --json exclude each other: the JSON has the Python, too.")
    try:
        found = lab.explain(config, layer_type=layer_type, seq_len=seq_len)
        python = found.python() if as_python else ""
    except (ValueError, TypeError) as error:
        raise Refused(str(error)) from error
    if as_python:
        typer.echo(python)
    elif as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        _show(found)


explain.__doc__ = _HELP


def _show(found: lab.Report) -> None:
    width = max(shutil.get_terminal_size((_PIPED, 24)).columns, 40)
    console = Console(width=width)
    for part in found.parts:
        title = part.kind if part.layer_type is None else f"{part.kind}, {part.layer_type}"
        rows = [(name, *fact) for name, fact in part.arguments.items()]
        if "attention_factor" in part.numbers:
            rows.append(("attention_factor", f"{part.numbers['attention_factor']:.6g}", ""))
        if part.wavelengths() is not None:
            fast, slow = part.wavelengths() or (0, 0)
            rows.append(("wavelengths", f"{fast:.4g} to {slow:.6g} tokens", ""))
        if "slopes" in part.numbers:
            slopes = tuple(float(f"{slope:.4g}") for slope in part.numbers["slopes"])
            rows.append(("slopes", slopes, ""))
        rows.append(("build", part.build, ""))
        console.print(_table(title, rows, width), highlight=False)
    console.print(_table("model", _facts(found), width), highlight=False)
    for name, state in lab.kernels().items():
        console.print(f"{name}: {state}", highlight=False, markup=False)


def _facts(found: lab.Report) -> list[tuple[str, Any, str]]:
    facts = {name: fact for name, fact in found.facts.items() if fact is not None}
    for name in ("trained_length", "max_length"):
        facts.setdefault(name, ("not in the config", ""))
    if any(part.kind in lab.BIASES for part in found.parts):
        facts["max_length"] = ("any: a bias has no last position", "")
    if "softmax_scale" in facts:
        value, source = facts["softmax_scale"]
        facts["softmax_scale"] = (f"{value:.6g}", source)
    return [(words, *facts[name]) for name, words in _FACTS.items() if name in facts]


def _table(title: str, rows: Sequence[tuple[str, Any, str]], width: int) -> Table:
    """Three columns of plain text: what a file says is neither a markup nor a control code."""
    table = Table(title=Text(printable(title)), title_justify="left", box=None, pad_edge=False)
    for column in ("argument", "value", "from"):
        table.add_column(column, overflow="fold")
    for name, value, source in rows:
        cells = (name, _short(value, width // 2), source)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _short(value: Any, room: int) -> str:
    """A value as text whose lists of numbers take at most about ``room`` characters each."""
    if isinstance(value, (list, tuple)):
        return _listed(value, room)
    if is_dataclass(value) and not isinstance(value, type):
        given = ((each.name, getattr(value, each.name)) for each in fields(value))
        words = (f"{name}={_short(held, room)}" for name, held in given)
        return f"{type(value).__name__}({', '.join(words)})"
    return str(value)


def _listed(values: Sequence[Any], room: int) -> str:
    words = [str(value) for value in values[: room // 2]]
    if len(words) == len(values) and sum(map(len, words)) + 2 * len(words) <= room:
        return f"({', '.join(words)})"
    end = f"..., {values[-1]}: {len(values)} in all"
    kept, left = [], room - len(end)
    for word in words:
        left -= len(word) + 2
        if left < 0:
            break
        kept.append(word)
    return f"({', '.join((*kept, end))})"
