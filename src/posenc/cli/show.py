"""`posenc show`: pictures of one encoding, in a file or in the terminal."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.cli import _print
from posenc.cli._root import given_by_user
from posenc.lab.pictures import show as lab
from posenc.lab.pictures.style import save

_FLAGS = {name: inspect.signature(view).parameters for name, view in lab.ENCODINGS.items()}
_RULE = f"For RoPE: {', '.join(lab.RULES)}."


def show(
    context: typer.Context,
    encoding: Annotated[
        str | None,
        typer.Argument(metavar="ENCODING", help=f"{', '.join(_FLAGS)}.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Draw here: .png, .svg or .pdf."),
    ] = None,
    dim: Annotated[int, typer.Option(min=2, help="Channels, of a head for RoPE.")] = 128,
    length: Annotated[int, typer.Option(min=2, help="Positions of a heatmap.")] = 128,
    trained: Annotated[int, typer.Option(min=2, help="Context that is marked.")] = 4096,
    base: Annotated[float, typer.Option(help="Of the rates.")] = 10_000.0,
    heads: Annotated[int, typer.Option(min=1, help="Of ALiBi.")] = 8,
    scaling: Annotated[str | None, typer.Option(metavar="RULE", help=_RULE)] = None,
    factor: Annotated[float, typer.Option(help="How many times longer.")] = 8.0,
    against: Annotated[str | None, typer.Option(metavar="RULE", help="One beside it.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A model's config.json: its RoPE.")
    ] = None,
    layer_type: Annotated[str | None, typer.Option(help="Which layers of the config.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Draw an encoding: heatmaps, wavelengths, scores by distance, rule against rule, slopes.

    With `-o` a PNG, SVG or PDF of four panels; without it, coarse charts in the terminal.

    Example: posenc show rope --scaling yarn --factor 8 --against linear -o rope.png
    """
    _print.check_picture(output, "-o")
    names = set().union(*_FLAGS.values())
    given = {name: value for name, value in given_by_user(context).items() if name in names}
    if config is None:
        view = _of_flags(encoding, given)
    else:
        view = _of_config(config, layer_type, encoding, given)
    if output is not None:
        save(lab.figure(view), output)
    if as_json:
        typer.echo(json.dumps(view.numbers, indent=1))
    elif output is not None:
        typer.echo(f"picture: {output.absolute()}")
    else:
        columns = shutil.get_terminal_size((80, 24)).columns
        typer.echo(lab.terminal(view, min(columns - 2, 100)))


def _of_flags(encoding: str | None, given: dict[str, Any]) -> lab.View:
    if encoding not in _FLAGS:
        raise ValueError(f"ENCODING must be one of {', '.join(_FLAGS)}; got {encoding or 'none'}.")
    for name in given.keys() - _FLAGS[encoding].keys():
        raise ValueError(f"--{name} is not for {encoding}.")
    return lab.ENCODINGS[encoding](**given)


def _of_config(
    config: Path, layer_type: str | None, encoding: str | None, given: dict[str, Any]
) -> lab.View:
    if encoding not in (None, "rope"):
        raise ValueError(f"--config describes rope, not {encoding}.")
    for name in given.keys() - {"length", "trained", "against"}:
        raise ValueError(f"--{name} and --config exclude each other.")
    return lab.of_config(config, layer_type=layer_type, **given)
