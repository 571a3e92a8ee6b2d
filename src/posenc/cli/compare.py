"""`posenc compare`: the same small transformer with each encoding, on longer and longer text."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from posenc.cli import INSTALL
from posenc.cli._root import Refused
from posenc.lab import store
from posenc.lab.comparison.encodings import COMPARED, ENCODINGS
from posenc.lab.comparison.folder import RESULTS
from posenc.lab.comparison.plan import LEAST, QUICK, Plan
from posenc.lab.comparison.run import Event, Run

_HELP = """Train the same small transformer with each encoding, and test it on longer sequences.

All start from the same weights and see the same text in the same order. Written to a folder:
`report.html`, one page that opens offline; `figure.png` and `figure.svg`; `results.json`, every
number. The folder must be new or empty, or have an earlier run; other files are never touched.
After each training the numbers are safe: Ctrl-C keeps them, and `--resume` trains what is missing,
to the same numbers as a run that was never stopped.

Example: posenc compare --quick -o compared
"""
_DEFAULT = Plan()


def _flag(help_: str, name: str) -> Any:
    default = getattr(_DEFAULT, name)
    quick = f", quick {QUICK[name]}" if name in QUICK else ""
    return typer.Option(help=help_, show_default=f"{default}{quick}", min=LEAST.get(name))


def compare(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder.")] = (
        Path("posenc-compare")
    ),
    quick: Annotated[
        bool, typer.Option(help="About a minute on one core, instead of fifteen.")
    ] = False,
    encodings: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Comma-separated, of: {', '.join(ENCODINGS)}.",
            show_default=",".join(COMPARED),
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Trainings of each.", show_default="1")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What to learn.", show_default="the built-in tales"),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run that the folder has.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Begin anew where the folder has a run.")] = False,
    train_length: Annotated[
        int | None, _flag("Symbols of a training sequence.", "train_length")
    ] = None,
    times: Annotated[
        str | None,
        typer.Option(help="Tested lengths, in training lengths.", show_default="1,2,4,8"),
    ] = None,
    steps: Annotated[int | None, _flag("Of the optimizer.", "steps")] = None,
    batch: Annotated[int | None, _flag("Sequences of a step.", "batch")] = None,
    width: Annotated[int | None, _flag("Channels.", "width")] = None,
    layers: Annotated[int | None, _flag("Blocks.", "layers")] = None,
    heads: Annotated[int | None, _flag("Attention heads.", "heads")] = None,
    learning_rate: Annotated[float | None, _flag("The largest.", "learning_rate")] = None,
    base: Annotated[
        float | None,
        typer.Option(help="Of RoPE and sinusoid.", show_default="the train length"),
    ] = None,
    windows: Annotated[int | None, _flag("Sequences tested.", "windows")] = None,
    threads: Annotated[int | None, _flag("Of the CPU.", "threads")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Compare; the help text is set below, with its example."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Refused(f"compare needs matplotlib: {INSTALL}")
    if output.exists() and not output.is_dir():
        raise Refused(f"{output} is not a folder.")
    if resume and overwrite:
        raise Refused("--resume and --overwrite exclude each other.")
    asked = {name: context.params[name] for name in QUICK.keys() | _NUMBERS}
    asked = {name: value for name, value in asked.items() if value is not None}
    if quick:
        asked = {**QUICK, **asked}
    if encodings is not None:
        asked["encodings"] = tuple(name.strip() for name in encodings.split(",") if name.strip())
    if seeds is not None:
        asked["seeds"] = tuple(range(seeds))
    if text is not None:
        asked["text"] = str(text.absolute())
    if times is not None:
        asked["times"] = _whole_numbers(times)
    try:
        run = _continue(output, asked) if resume else Run(output, Plan(**asked), _command(context))
        if not resume:
            run.begin(overwrite=overwrite)
    except ValueError as wrong:
        raise Refused(str(wrong)) from None
    except OSError as wrong:
        raise Refused(f"{output} cannot be written: {wrong.strerror}.") from None
    stopped = False
    try:
        with _progress(run) as tell:
            run.go(tell)
    except KeyboardInterrupt:
        stopped = True
    except ValueError as wrong:
        raise Refused(str(wrong)) from None
    written = _draw(run)
    if as_json:
        typer.echo(json.dumps(run.results, indent=1))
    else:
        _show(run.results)
        for name, path in written.items():
            typer.echo(f"{name}: {path}")
    if stopped:
        done, all_ = len(run.results["units"]), len(run.plan.units())
        again = shlex.join(["posenc", "compare", "--resume", "-o", str(output)])
        typer.echo(f"posenc: stopped after {done} of {all_} trainings; {again} goes on", err=True)
        raise typer.Exit(130)


compare.__doc__ = _HELP
_NUMBERS = {"batch", "heads", "base", "windows", "threads"}


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise Refused(f"--times must be whole numbers such as 1,2,4,8; got {text}.") from None


def _continue(output: Path, asked: dict[str, Any]) -> Run:
    """The run of the folder; what is asked for beside that must be what it was begun with."""
    run = Run.resume(output)
    for name, value in asked.items():
        begun = getattr(run.plan, name)
        if begun != value:
            flag = f"--{name.replace('_', '-')}"
            raise Refused(f"{output} was begun with another {flag}: leave it out to resume.")
    return run


def _command(context: typer.Context) -> str:
    """The command line, from what was given on it."""
    words = ["posenc", "compare"]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        flag = next((o for o in parameter.opts if o.startswith("--")), parameter.opts[0])
        words += [flag] if isinstance(value, bool) else [flag, str(value)]
    return shlex.join(words)


def _draw(run: Run) -> dict[str, Path]:
    """Write page and figures; what is not finished is left out of them."""
    from posenc.lab.comparison import figures, report
    from posenc.lab.pictures.style import image

    folder = run.folder.absolute()
    written = {"report": folder / "report.html"}
    store.write(written["report"], report.page(run.results).encode())
    if run.results["summary"]:
        sheet = figures.overview(run.results)
        for suffix in (".svg", ".png"):
            written["figure"] = folder / f"figure{suffix}"
            store.write(written["figure"], image(sheet, suffix))
    written["numbers"] = folder / RESULTS
    return written


@contextlib.contextmanager
def _progress(run: Run) -> Iterator[Callable[[Event], None]]:
    """A bar on stderr while somebody looks, nothing in a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda event: None
        return
    words = TextColumn("{task.description:24}"), BarColumn(), TimeElapsedColumn()
    with Progress(*words, TimeRemainingColumn(), console=console, transient=True) as bars:
        bar = bars.add_task("", total=len(run.plan.units()))

        def tell(event: Event) -> None:
            loss = "" if event.loss is None else f", loss {event.loss:.2f}"
            seed = f" {event.unit.seed}" if len(run.plan.seeds) > 1 else ""
            label = f"{ENCODINGS[event.unit.trains].label}{seed}{loss}"
            completed = len(run.results["units"]) + event.done
            bars.update(bar, description=label, completed=completed)

        yield tell


def _show(results: dict[str, Any]) -> None:
    plan, rows = results["plan"], results["summary"]
    heads = [f"{times} × ({times * plan['train_length']})" for times in plan["times"]]
    cells = [[row["label"], *(f"{loss:.3f}" for loss in row["tail"])] for row in rows]
    title = f"loss of the last {plan['train_length']} symbols, nats, by length of the sequence"
    console = Console()
    if not console.is_terminal:
        typer.echo(title)
        widths = [max(map(len, column)) for column in zip(["", *heads], *cells, strict=True)]
        for line in (["", *heads], *cells):
            padded = [line[0].ljust(widths[0])]
            padded += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
            typer.echo(f"  {'  '.join(padded)}".rstrip())
        return
    console.print(title, style="bold", highlight=False)
    table = Table()
    for i, name in enumerate(["", *heads]):
        table.add_column(name, justify="right" if i else "left")
    for row, line in zip(rows, cells, strict=True):
        styled = [line[0], line[1]]
        for text, rise in zip(line[2:], row["rise"][1:], strict=True):
            colour = "green" if rise < 0.1 else "yellow" if rise < 0.5 else "red"
            styled.append(f"[{colour}]{text}[/]")
        table.add_row(*styled)
    console.print(table)
