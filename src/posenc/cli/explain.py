"""`posenc explain`: what a config says about rotation, and which key said it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from posenc.cli._root import Refused
from posenc.lab import explain as lab

_HELP = """Show the rotation that a model's config.json describes, and the key each part came from.

Example: posenc explain path/to/config.json --seq-len 32768
"""


def explain(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A config.json, or its folder.")],
    layer_type: Annotated[
        str | None, typer.Option(help="One of its layer types.", show_default="all")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="For rules that depend on it.", show_default="short")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a config says; the help text is set below, with its example."""
    try:
        found = lab.explain(config, layer_type=layer_type, seq_len=seq_len)
    except (ValueError, TypeError) as error:
        raise Refused(str(error)) from error
    if as_json:
        whole = {"layers": [each.as_json() for each in found], "kernels": lab.kernels()}
        typer.echo(json.dumps(whole, indent=2))
        return
    console = Console()
    if not console.is_terminal:
        # What another program reads is not folded.
        console.width = 400
    for each in found:
        title = None if each.layer_type is None else each.layer_type
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for column in ("argument", "value", "from"):
            table.add_column(column, overflow="fold")
        for name, (value, source) in each.arguments.items():
            table.add_row(name, str(value), source)
        fast, slow = each.wavelengths()
        table.add_row("attention_factor", f"{each.attention_factor:.6g}", "")
        table.add_row("wavelengths", f"{fast:.4g} to {slow:.6g} tokens", "")
        console.print(table, highlight=False)
    for name, state in lab.kernels().items():
        console.print(f"{name}: {state}", highlight=False, markup=False)


explain.__doc__ = _HELP
