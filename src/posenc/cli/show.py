"""`posenc show`: a picture of one encoding, in a file."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.cli import _print
from posenc.lab import show as lab
from posenc.lab.panels import View, save

_OPTIONS = "dim length trained base heads scaling factor against layer_type".split()
_PICTURE = Path("posenc-show.png")
_RULE = f"For RoPE: {', '.join(lab.RULES)}."


def _number(help_: str, usual: float | str, least: int | None = None) -> Any:
    return typer.Option(metavar="N", help=help_, show_default=f"{usual}", min=least)


def show(
    context: typer.Context,
    encoding: Annotated[
        str | None,
        typer.Argument(metavar="ENCODING", help=f"{', '.join(lab.ENCODINGS)}.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Draw here: .png, .svg or .pdf.",
            show_default=str(_PICTURE),
        ),
    ] = None,
    dim: Annotated[int | None, _number("Channels, of a head for RoPE.", 128, 2)] = None,
    length: Annotated[
        int | None, _number("Positions of a heatmap.", "128, of a bias 256", 2)
    ] = None,
    trained: Annotated[int | None, _number("Trained context.", "4096, of a bias 128", 2)] = None,
    base: Annotated[float | None, _number("Base of the rates.", 10_000.0)] = None,
    heads: Annotated[int | None, _number("Heads of a bias.", 8, 1)] = None,
    scaling: Annotated[str | None, typer.Option(metavar="RULE", help=_RULE)] = None,
    factor: Annotated[float | None, _number("How many times longer.", 8.0)] = None,
    against: Annotated[str | None, typer.Option(metavar="RULE", help="A second rule.")] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="A model's config.json, or its name: its RoPE."),
    ] = None,
    layer_type: Annotated[str | None, typer.Option(help="Layers of --config.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Draw an encoding: heatmaps, wavelengths, scores and biases by distance, rule against rule.

    With `--json` and without `-o` no picture is drawn.

    Example: posenc show rope --scaling yarn --factor 8 --against linear -o rope.png
    """
    if output is None and not as_json:
        output = _PICTURE
    if output is not None:
        if output.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"-o writes .png, .svg or .pdf, got {output}.")
        if output.is_dir() or not output.absolute().parent.is_dir():
            raise ValueError(f"-o must be a file in a folder that exists, got {output}.")
        _print.check_installed("-o", "matplotlib")
    view = _view(encoding, config, context.params)
    if output is not None:
        save(lab.figure(view), output)
    if as_json:
        typer.echo(json.dumps(view.numbers, indent=1))
    elif output is not None:
        _print.say(f"picture: {output.absolute()}")


def _view(encoding: str | None, config: str | None, options: dict[str, Any]) -> View:
    draw = lab.ENCODINGS.get(encoding or "")
    if config is not None:
        if encoding not in (None, "rope"):
            raise ValueError(f"--config describes rope, not {encoding}.")
        encoding, draw = "--config", functools.partial(lab.of_config, config)
    if draw is None:
        known = ", ".join(lab.ENCODINGS)
        raise ValueError(f"ENCODING must be one of {known}; got {encoding or 'none'}.")
    passed = {name: options[name] for name in _OPTIONS if options[name] is not None}
    for name in passed.keys() - inspect.signature(draw).parameters.keys():
        raise ValueError(f"--{name.replace('_', '-')} is not for {encoding}: leave it out.")
    return draw(**passed)
