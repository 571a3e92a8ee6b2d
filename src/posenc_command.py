"""The command `posenc`: help, version and errors; each sub-command is a file of `posenc.cli`.

It is no part of the package, because importing posenc imports torch, which takes seconds, and help
should be there at once.
"""

from __future__ import annotations

import io
import sys
from importlib import import_module
from typing import Annotated, Any

INSTALL = "pip install 'posenc[cli]', or '.[cli]' in a clone"

try:
    # The sub-commands print with it.
    import rich  # noqa: F401
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError as missing:
    print(f"posenc: the command line needs {missing.name}: {INSTALL}", file=sys.stderr)
    raise SystemExit(2) from None

# The first sentence of each one's help.
COMMANDS = {
    "compare": "Train the same small transformer with each encoding, and test it on longer "
    "sequences.",
    "show": "Draw an encoding: heatmaps, wavelengths, scores and biases by distance, rule against "
    "rule.",
    "convert": "Write a checkpoint again with its queries and keys in the other pair layout.",
    "explain": "Show the positions that a model's config.json describes, and the key each part "
    "came from.",
}
_LOOK: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": "markdown",
    "pretty_exceptions_enable": False,
}
# Newer versions of typer vendor click, older ones import it.
_BAD_USAGE: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
# Exceptions of the library for an invalid argument, config or file, or without a package.
_REFUSED = (ValueError, TypeError, OverflowError, OSError, ImportError)


def printable(text: str) -> str:
    """The text with control characters escaped, which a name in a file may hold."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class Commands(TyperGroup):
    """Sub-commands that are imported when they are called, and whose errors are one line."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The sub-command itself, in place of the one that stands in the list."""
        name, _, rest = super().resolve_command(ctx, args)
        app = typer.Typer(**_LOOK)
        app.command(name)(getattr(import_module(f"posenc.cli.{name}"), str(name)))
        return name, typer.main.get_command(app), rest

    def main(self, *args: Any, **keywords: Any) -> Any:
        """Run, and print a user error as one line: no usage, no box, no traceback."""
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
    """Look at positional encodings, compare them, and convert checkpoints."""
    if version:
        from posenc import __version__

        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def application() -> typer.Typer:
    """The typer app, with every sub-command in its list."""
    app = typer.Typer(name="posenc", cls=Commands, **_LOOK)
    app.callback(invoke_without_command=True)(root)
    for name, words in COMMANDS.items():
        app.command(name, help=words)(lambda: None)
    return app


def main() -> None:
    """Entry point of the script."""
    for stream in (sys.stdout, sys.stderr):
        # Print a question mark for a character that the terminal's encoding does not have.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    application()()
