"""`posenc convert`: a checkpoint in the other pair layout."""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
from pathlib import Path
from typing import Annotated

import typer

from posenc.cli import _print
from posenc.interop import checkpoints

_config = functools.partial(typer.Option, show_default="the config's")
_family = functools.partial(typer.Option, show_default="the family's")
_beside = functools.partial(typer.Option, show_default="beside the weights")
_MARKED = (
    "  posenc reads the new layout from the files; the model's own code does not, and would rotate"
    " the wrong pairs"
)


def convert(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="IN", help="A file, a folder, or a model's name on the hub.")
    ],
    target: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="What to write.")],
    to: Annotated[str, typer.Option(help="New layout: half or interleaved.")],
    config: Annotated[
        str | None, _beside(metavar="CONFIG", help="config.json, or a model's name.")
    ] = None,
    layout: Annotated[str | None, _family(help="Layout of IN: half or interleaved.")] = None,
    num_heads: Annotated[int | None, _config(metavar="N", min=1, help="Heads of queries.")] = None,
    num_kv_heads: Annotated[int | None, _config(metavar="N", min=1, help="Heads of keys.")] = None,
    head_dim: Annotated[int | None, _config(metavar="N", min=1, help="Channels of a head.")] = None,
    rotary_dim: Annotated[
        int | None, _config(metavar="N", min=2, help="Rotated channels of a head.")
    ] = None,
    fused: Annotated[str | None, _family(help="Fused weights: qkv or qkv_grouped.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT, all of it.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write a checkpoint again with its queries and keys in the other pair layout.

    IN is a .safetensors file or a folder of them, a model's or an adapter's. One file is in memory
    at a time, no bit of any row changes, and IN is never written to. The result is written in a
    temporary folder beside OUT and renamed to OUT at the end. Of a model on the hub, `org/name` or
    `org/name@revision`, the config and the weights are downloaded into the hub's cache, and nothing
    else.

    Example: posenc convert model -o model-interleaved --to interleaved
    """
    arguments = {name: value for name, value in context.params.items() if name != "json_"}
    _interrupt_on_signals()
    with _print.progress() as progress:
        report = checkpoints.convert(**arguments, progress=progress)
    if json_:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=1))
        return
    counts = f"{len(report.moved)} of {report.tensors} tensors moved"
    _print.say(f"{report.target}: {report.layout}, {counts}")
    if report.marked:
        typer.echo(_MARKED)
    for name in report.left_out:
        _print.say(f"  left out: {name}, weights in the old layout")


def _interrupt_on_signals() -> None:
    """Make SIGTERM and SIGHUP act as Ctrl-C, which removes the partial output."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # A signal that is ignored, under nohup for example, stays ignored.
        if number and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
