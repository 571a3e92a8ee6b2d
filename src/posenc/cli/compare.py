"""`posenc compare`: the same small transformer with each encoding, on longer and longer text."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from posenc.cli import _print
from posenc.lab.comparison import report
from posenc.lab.comparison.plan import COMPARED, ENCODINGS, QUICK, Plan
from posenc.lab.comparison.run import RESULTS, Run
from posenc.lab.pictures.style import save

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Plan)}
_BASE = "Base of RoPE and the sinusoid; 0: the training length."
_KNOWN = f"Comma-separated, of: {', '.join(ENCODINGS)}; or all."


def _number(name: str, help_: str, least: int | None = 1) -> Any:
    quick = f", quick {QUICK[name]}" if name in QUICK else ""
    return typer.Option(help=help_, show_default=f"{_DEFAULTS[name]}{quick}", min=least)


def _parsed(parse: Callable[[str], object], metavar: str, help_: str, default: str) -> Any:
    return typer.Option(parser=parse, metavar=metavar, help=help_, show_default=default)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    return tuple(ENCODINGS) if names == ("all",) else names


def _times(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise typer.BadParameter(f"must be whole numbers such as 1,2,4,8; got {text}.") from None


def compare(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Write here.")] = (
        Path("posenc-compare")
    ),
    quick: Annotated[bool, typer.Option(help="About a minute on one core, not fifteen.")] = False,
    encodings: Annotated[Any, _parsed(_names, "NAMES", _KNOWN, ",".join(COMPARED))] = None,
    seeds: Annotated[int | None, _number("seeds", "Trainings of each encoding.")] = None,
    text: Annotated[
        Any, _parsed(os.path.abspath, "FILE", "Text to train on.", "built-in tales")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Continue the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace the run in the folder.")] = False,
    train_length: Annotated[int | None, _number("train_length", "Symbols to train on.", 4)] = None,
    times: Annotated[Any, _parsed(_times, "LIST", "Test / train length.", "1,2,4,8")] = None,
    steps: Annotated[int | None, _number("steps", "Optimizer steps.")] = None,
    batch: Annotated[int | None, _number("batch", "Sequences per step.")] = None,
    width: Annotated[int | None, _number("width", "Channels.")] = None,
    layers: Annotated[int | None, _number("layers", "Blocks.")] = None,
    heads: Annotated[int | None, _number("heads", "Attention heads.")] = None,
    learning_rate: Annotated[float | None, _number("learning_rate", "The peak.", None)] = None,
    base: Annotated[float | None, _number("base", _BASE, None)] = None,
    windows: Annotated[int | None, _number("windows", "Sequences per test.")] = None,
    threads: Annotated[int | None, _number("threads", "CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Train the same small transformer with each encoding, and test it on longer sequences.

    All start from the same weights and see the same text in the same order. Written to a folder:
    `report.html`, one page that opens offline; `figure.png` and `figure.svg`; `results.json`, every
    number. The folder must be new or empty, or have an earlier run; other files are never touched.
    Numbers are saved after each training: Ctrl-C keeps them, and `--resume` does the missing
    trainings, to the same numbers as a run that was never stopped.

    Example: posenc compare --quick -o compared
    """
    _print.check_matplotlib("compare")
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other: pass one of them.")
    given = {k: v for k, v in context.params.items() if k in _DEFAULTS and v is not None}
    if quick:
        given = QUICK | given
    stopped = False
    if resume:
        run = Run.resume(output)
        _check_same(run, given)
    else:
        run = Run(output, Plan(**given), shlex.join(["posenc", *sys.argv[1:]]))
        run.begin(overwrite=overwrite)
    try:
        with _print.progress() as tell:
            run.go(tell)
    except KeyboardInterrupt:
        stopped = True
    written = _draw(run)
    if as_json:
        typer.echo(json.dumps(run.results, indent=1))
    else:
        _show(run)
        for name, path in written.items():
            typer.echo(f"{name}: {path}")
        if seen := report.sentence(run.plan, run.results["summary"]):
            typer.echo(seen)
    if stopped:
        done = f"{len(run.results['units'])} of {len(run.plan.units())} trainings"
        again = shlex.join(["posenc", "compare", "--resume", "-o", str(output)])
        typer.echo(f"posenc: stopped after {done}; continue with {again}", err=True)
        raise typer.Exit(130)


def _check_same(run: Run, given: dict[str, Any]) -> None:
    """Refuse options that differ from those of the run."""
    for name, value in given.items():
        if dataclasses.replace(run.plan, **{name: value}) != run.plan:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{run.folder} was begun with another {flag}: leave it out to resume.")


def _draw(run: Run) -> dict[str, Path]:
    """Write the page and the figures of the trainings that are finished."""
    folder = run.folder.absolute()
    written = {"numbers": folder / RESULTS}
    if run.results["summary"]:
        written = {"report": folder / "report.html", **written, "figure": folder / "figure.png"}
        written["report"].write_text(report.page(run.plan, run.results), "utf-8")
        sheet = report.overview(run.plan, run.results)
        for suffix in (".svg", ".png"):
            save(sheet, written["figure"].with_suffix(suffix))
    return written


def _show(run: Run) -> None:
    plan = run.plan
    heads = [f"{t} × ({n})" for t, n in zip(plan.times, plan.lengths, strict=True)]
    rows = []
    for row in run.results["summary"]:
        cells = [Text(row["label"])]
        for i, (loss, rise) in enumerate(zip(row["tail"], row["rise"], strict=True)):
            colour = "green" if rise < 0.1 else "yellow" if rise < 0.5 else "red"
            cells.append(Text(f"{loss:.3f}", style=colour if i else ""))
        rows.append(cells)
    title = f"loss of the last {plan.train_length} symbols, nats, by length of the sequence"
    _print.table(title, ["", *heads], rows)
