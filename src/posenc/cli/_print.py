"""What several sub-commands print."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from posenc_command import INSTALL, printable


def check_installed(who: str, *packages: str) -> None:
    """Refuse to go on without one of these packages of the ``cli`` extra."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{who} needs {package}: {INSTALL}")


def say(words: str, *, err: bool = False) -> None:
    """Print a line that may hold words of a file, whose control characters are escaped."""
    typer.echo(printable(words), err=err)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Yield a function of a message and the part done: a bar, or in a log a line for each tenth.

    The bar begins with the first message: a download before it has a bar of its own.
    """
    console = Console(stderr=True)
    # Messages hold names from files, whose brackets are not markup.
    message = TextColumn("{task.percentage:>3.0f}% {task.description}", markup=False)
    columns = BarColumn(20), TimeElapsedColumn(), TimeRemainingColumn(), message
    piped = not console.is_terminal
    bar = Progress(*columns, console=console, transient=True, disable=piped)
    task, tenths = bar.add_task("", total=1.0), 0

    def advance(message: str, done: float) -> None:
        nonlocal tenths
        message = printable(message)
        bar.update(task, description=message, completed=done)
        bar.start()
        if piped and int(done * 10) > tenths:
            tenths = int(done * 10)
            print(f"{tenths * 10} % {message}", file=sys.stderr)

    try:
        yield advance
    finally:
        bar.stop()


def table(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    *,
    justify: Literal["left", "right"] = "right",
) -> None:
    """Print a table on stdout: with borders on a terminal, as padded columns in a pipe.

    Strings may come from a file, so markup and control characters in them are printed as text.
    """
    console, drawn = Console(), Table()
    if not console.is_terminal:
        # Another program reads it: no cell is folded.
        console, drawn = Console(width=10_000), Table(box=None, padding=(0, 0, 0, 2))
    for i, head in enumerate(heads):
        drawn.add_column(Text(printable(head)), justify=justify if i else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    console.print(Text(printable(title), style="bold"), drawn, sep="\n")
    for note in notes:
        console.print(Text(f"  {printable(note)}", style="dim"))
