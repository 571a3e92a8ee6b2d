"""What every sub-command shares: errors as one line on stderr, with exit code 2."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from posenc import __version__
from posenc._contract.checks import printable

# Newer versions of typer vendor click, older ones import it.
_BAD_USAGE: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
# Exceptions of the library for an invalid argument, config or file.
_REFUSED = (ValueError, TypeError, OverflowError, OSError)


class OneLineErrors(TyperGroup):
    """A group that says what is wrong in one line: no usage, no box, no traceback."""

    def main(self, *args: Any, **keywords: Any) -> Any:
        """Run, and print a user error as one line."""
        keywords["standalone_mode"] = False
        try:
            code = super().main(*args, **keywords)
        except (_BAD_USAGE, *_REFUSED) as wrong:
            message = wrong.format_message() if isinstance(wrong, _BAD_USAGE) else str(wrong)
            typer.echo(f"posenc: {printable(' '.join(message.split()))}", err=True)
            code = 2
        except typer.Abort:
            typer.echo("posenc: interrupted", err=True)
            code = 130
        sys.exit(code if isinstance(code, int) else 0)


def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Look at positional encodings, measure them, and convert checkpoints."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
