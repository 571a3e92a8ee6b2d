"""`posenc show`: pictures of one encoding, in a file or in the terminal."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.cli import _print
from posenc.cli._root import Refused
from posenc.configs import as_dict, text_part
from posenc.lab.pictures import show as lab
from posenc.lab.pictures.style import save
from posenc.nn import RoPE

_HELP = """Draw an encoding: heatmaps, wavelengths, scores by distance, rule against rule, slopes.

With `-o` a PNG, SVG or PDF of four panels; without it, coarse charts in the terminal.

Example: posenc show rope --scaling yarn --factor 8 --against linear -o rope.png
"""
_ENCODINGS = ("sinusoidal", "learned", "rope", "alibi")
_FOR = {
    "sinusoidal": {"dim", "length", "trained", "base"},
    "learned": {"dim", "length"},
    "rope": {"dim", "length", "trained", "base", "scaling", "factor", "against"},
    "alibi": {"heads", "length", "trained"},
}


def show(
    context: typer.Context,
    encoding: Annotated[
        str | None,
        typer.Argument(metavar="ENCODING", help=f"{', '.join(_ENCODINGS)}.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Draw here: .png, .svg or .pdf."),
    ] = None,
    dim: Annotated[
        int | None, typer.Option(min=2, help="Channels, of a head for RoPE.", show_default="128")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Positions of a heatmap.", show_default="128")
    ] = None,
    trained: Annotated[
        int | None, typer.Option(min=2, help="Context that is marked.", show_default="4096")
    ] = None,
    base: Annotated[float | None, typer.Option(help="Of the rates.", show_default="10000")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Of ALiBi.", show_default="8")] = None,
    scaling: Annotated[
        str | None, typer.Option(metavar="RULE", help=f"For RoPE: {', '.join(lab.RULES)}.")
    ] = None,
    factor: Annotated[
        float | None, typer.Option(help="How many times longer.", show_default="8")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="RULE", help="Another rule to draw beside it.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A model's config.json: its RoPE.")
    ] = None,
    layer_type: Annotated[str | None, typer.Option(help="Which layers of the config.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Show; the help text is set below, with its example."""
    _print.check_picture(output, "-o")
    given = {name: context.params[name] for name in set().union(*_FOR.values())}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        if config is not None:
            view = _of_config(config, layer_type, encoding, given)
        else:
            view = _of_flags(encoding, given)
        _write(view, output, as_json)
    except (ValueError, TypeError, OverflowError, OSError) as wrong:
        raise Refused(str(wrong)) from None


show.__doc__ = _HELP


def _write(view: lab.View, output: Path | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(lab.numbers(view), indent=1))
    if output is not None:
        save(lab.figure(view), output)
        if not as_json:
            typer.echo(f"picture: {output.absolute()}")
    elif not as_json:
        typer.echo(lab.terminal(view, min(shutil.get_terminal_size((80, 24)).columns - 2, 100)))


def _of_flags(encoding: str | None, given: dict[str, Any]) -> lab.View:
    if encoding not in _ENCODINGS:
        got = "none" if encoding is None else encoding
        raise Refused(f"ENCODING must be one of {', '.join(_ENCODINGS)}; got {got}.")
    for name in given:
        if name not in _FOR[encoding]:
            raise Refused(f"--{name} is not for {encoding}.")
    if encoding != "rope":
        trained = given.get("trained", 4096)
        return lab.View(encoding, **{**given, "trained": trained, "farthest": 4 * trained})
    rules = tuple(given.pop(name) for name in ("scaling", "against") if name in given)
    for name in rules:
        _known_rule(name)
    if "factor" in given and not rules:
        raise Refused("--factor needs --scaling.")
    return lab.rope_view(given.pop("dim", 128), rules=rules, **given)


def _known_rule(name: str) -> None:
    if name not in lab.RULES:
        raise Refused(f"a rule must be one of {', '.join(lab.RULES)}; got {name}.")


def _of_config(
    path: Path, layer_type: str | None, encoding: str | None, given: dict[str, Any]
) -> lab.View:
    if encoding not in (None, "rope"):
        raise Refused(f"--config describes rope, not {encoding}.")
    for name in given.keys() - {"length", "trained", "against"}:
        raise Refused(f"--{name} and --config exclude each other.")
    rope = RoPE.from_config(path, layer_type=layer_type)
    longest = _longest(path)
    trained = given.get("trained") or getattr(rope.scaling, "original_length", None)
    factor = getattr(rope.scaling, "factor", None) or 1.0
    if trained is None:
        trained = max(2, math.ceil(longest / factor)) if longest else 4096
    longest = max(longest or 0, math.ceil(trained * factor))
    against = given.get("against")
    if against is not None:
        _known_rule(against)
    return lab.config_view(rope, trained, longest, given.get("length", 128), against)


def _longest(path: Path) -> int | None:
    """The longest sequence that a config names, if it does."""
    found = as_dict("show", path)
    for part in (text_part(found)[0], found):
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length"):
            if isinstance(part.get(key), int):
                return int(part[key])
    return None
