"""`posenc compare`: the same small transformer with each encoding, on longer and longer text."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from posenc.cli import _print
from posenc.cli._root import Refused
from posenc.lab import store
from posenc.lab.comparison import figures, report
from posenc.lab.comparison.encodings import COMPARED, ENCODINGS
from posenc.lab.comparison.folder import RESULTS
from posenc.lab.comparison.plan import LEAST, QUICK, Plan
from posenc.lab.comparison.run import Event, Run
from posenc.lab.comparison.summary import sentence
from posenc.lab.pictures.style import save

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
    _print.check_matplotlib("compare")
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
        with _print.progress() as tell:
            run.go(lambda event: tell(*_where(run, event)))
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
        if seen := sentence(run.results):
            typer.echo(seen)
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
    folder = run.folder.absolute()
    written = {"report": folder / "report.html", "numbers": folder / RESULTS}
    store.write(written["report"], report.page(run.results).encode())
    if run.results["summary"]:
        sheet = figures.overview(run.results)
        for suffix in (".svg", ".png"):
            written["figure"] = folder / f"figure{suffix}"
            save(sheet, written["figure"])
    return written


def _where(run: Run, event: Event) -> tuple[str, float]:
    """What a run trains now, and the part of all its trainings that is done."""
    loss = "" if event.loss is None else f", loss {event.loss:.2f}"
    seed = f" {event.unit.seed}" if len(run.plan.seeds) > 1 else ""
    done = len(run.results["units"]) + event.done
    label = f"{ENCODINGS[event.unit.trains].label}{seed}{loss}"
    return label, done / len(run.plan.units())


def _show(results: dict[str, Any]) -> None:
    plan = results["plan"]
    heads = ["", *(f"{times} × ({times * plan['train_length']})" for times in plan["times"])]
    rows = []
    for row in results["summary"]:
        cells = [Text(row["label"])]
        for i, (loss, rise) in enumerate(zip(row["tail"], row["rise"], strict=True)):
            colour = "green" if rise < 0.1 else "yellow" if rise < 0.5 else "red"
            cells.append(Text(f"{loss:.3f}", style=colour if i else ""))
        rows.append(cells)
    title = f"loss of the last {plan['train_length']} symbols, nats, by length of the sequence"
    _print.table(title, heads, rows)
