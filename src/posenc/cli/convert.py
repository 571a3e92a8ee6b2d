"""`posenc convert`: a checkpoint in the other pair layout."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from posenc._contract.checks import printable
from posenc.cli import _print
from posenc.interop import checkpoints
from posenc.interop.checkpoints import Tell

_config = functools.partial(typer.Option, show_default="the config's")
_family = functools.partial(typer.Option, show_default="the family's")
_beside = functools.partial(typer.Option, show_default="beside the weights")
_MARKED = (
    "  posenc finds the new layout in the files; the model's own code does not read it, and would"
    " rotate these weights in the wrong pairs"
)


def convert(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="IN", help="A file or a folder.")],
    target: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="What to write.")],
    to: Annotated[str, typer.Option(help="half or interleaved.")],
    config: Annotated[Path | None, _beside(metavar="FILE", help="config.json.")] = None,
    layout: Annotated[str | None, _family(help="half or interleaved: what IN has.")] = None,
    num_heads: Annotated[int | None, _config(min=1, help="Heads of queries.")] = None,
    num_kv_heads: Annotated[int | None, _config(min=1, help="Heads of keys.")] = None,
    head_dim: Annotated[int | None, _config(min=1, help="Channels of a head.")] = None,
    rotary_dim: Annotated[int | None, _config(min=2, help="Of them rotated.")] = None,
    fused: Annotated[str | None, _family(help="qkv or qkv_grouped.")] = None,
    check: Annotated[int, typer.Option(min=0, help="Attention modules to self-test.")] = 3,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT, all of it.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write a checkpoint again with its queries and keys in the other pair layout.

    IN is a .safetensors file or a folder of them, a model's or an adapter's. One tensor is in
    memory at a time, no bit of any row changes, and IN is never written to. The result is written
    in the folder OUT.posenc-convert and renamed to OUT after a self-test of the attention logits.

    Example: posenc convert model -o model-interleaved --to interleaved
    """
    given = {name: value for name, value in context.params.items() if name != "json_"}
    with _ended_by_signals(), _print.progress(piped=_line_for_each_tenth()) as tell:
        report = checkpoints.convert(**given, tell=lambda name, done: tell(_short(name), done))
    if json_:
        typer.echo(json.dumps(report.as_dict(), indent=1))
        return
    counts = f"{len(report.moved)} of {report.tensors} tensors moved"
    typer.echo(f"{printable(report.target)}: {report.layout}, {counts}")
    if report.checked:
        modules = f"logits of {len(report.checked)} attention modules"
        typer.echo(f"  {modules} differ by {report.difference:.1g} of the largest")
    if report.marked:
        typer.echo(_MARKED)
    for name in report.left_out:
        typer.echo(f"  left out: {printable(name)}, weights in the old layout")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command as Ctrl-C does, with its files removed."""

    def end(number: int, frame: object) -> None:
        for each in numbers:
            # A second signal would interrupt the removal.
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [signal.Signals[name] for name in names]
    # A signal that is ignored, under nohup for example, stays ignored.
    numbers = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    try:
        for number in numbers:
            signal.signal(number, end)
        yield
    except SystemExit:
        typer.echo("posenc: ended by a signal", err=True)
        raise
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _line_for_each_tenth() -> Tell:
    tenths = 0

    def tell(name: str, done: float) -> None:
        nonlocal tenths
        if int(done * 10) > tenths:
            tenths = int(done * 10)
            typer.echo(f"posenc: {tenths * 10} % written, at {name}", err=True)

    return tell


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= 60 else name[:57] + "..."
