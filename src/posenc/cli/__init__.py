"""The command `posenc`: a file for each sub-command, a thin layer over `lab` or `interop`."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer

_EXTRA = ("typer", "rich")
INSTALL = "pip install 'posenc[cli]', or '.[cli]' in a clone"


def application() -> Typer:
    """The typer app, with every sub-command."""
    import typer

    from posenc.cli import _root, bench, compare, convert, explain, show

    app = typer.Typer(
        name="posenc",
        cls=_root.OneLineErrors,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_root.root)
    for command in (compare.compare, show.show, bench.bench, convert.convert, explain.explain):
        app.command()(command)
    return app


def main() -> None:
    """Entry point of the script; without the ``cli`` extra it prints how to install it."""
    try:
        app = application()
    except ModuleNotFoundError as missing:
        package = (missing.name or "").split(".")[0]
        if package not in _EXTRA:
            raise
        print(f"posenc: the command line needs {package}: {INSTALL}", file=sys.stderr)
        raise SystemExit(2) from None
    for stream in (sys.stdout, sys.stderr):
        # Print a question mark for a character that the terminal's encoding does not have.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()
