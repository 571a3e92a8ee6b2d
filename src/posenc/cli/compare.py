"""`posenc compare`: the same small transformer with each encoding, on longer and longer text."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.cli import _print
from posenc.lab import machine
from posenc.lab.comparison import own, report
from posenc.lab.comparison.encodings import ENCODINGS, find
from posenc.lab.comparison.plan import COMPARED, QUICK, Plan
from posenc.lab.comparison.run import RESULTS, Run, units_of
from posenc.lab.comparison.tasks import TASKS
from posenc.lab.panels import save

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Plan)}
_BASE = "Base of RoPE and the sinusoid; 0: the training length."
_KNOWN = (
    f"Comma-separated, of: {', '.join(ENCODINGS)}; all; and classes of your own as {own.FORM}: "
    "the file is executed."
)
# What is said of one seed, and of several.
_OF_SEEDS = (
    "One seed says nothing of the spread, so nothing is ranked: --seeds 3 shows it.",
    "Means of the seeds, ± half their range; #: the rank of the mean.",
)
_TASKS = f"Comma-separated, of: {', '.join(TASKS)}; or all."
_JOBS = typer.Option(
    metavar="N",
    help="Trainings at a time.",
    show_default="cores / threads; on a GPU at most 8",
    min=1,
)


def _number(name: str, help_: str, least: int | None = 1) -> Any:
    quick = f", quick {QUICK[name]}" if name in QUICK else ""
    default = f"{_DEFAULTS[name]}{quick}"
    return typer.Option(metavar="N", help=help_, show_default=default, min=least)


def _parsed(parse: Callable[[str], object], metavar: str, help_: str, default: str) -> Any:
    return typer.Option(parser=parse, metavar=metavar, help=help_, show_default=default)


def _among(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads names with commas between them; all stands for those that are known."""

    def names(text: str) -> tuple[str, ...]:
        found = [name.strip() for name in text.split(",") if name.strip()]
        each = [tuple(known) if name == "all" else (name,) for name in found]
        return tuple(dict.fromkeys(name for names in each for name in names))

    return names


def _encodings(text: str) -> tuple[str, ...]:
    names = _among(ENCODINGS)(text)
    return tuple(own.absolute(name) if own.is_own(name) else name for name in names)


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
    quick: Annotated[bool, typer.Option("--quick", help="A minute on one core, not five.")] = False,
    encodings: Annotated[Any, _parsed(_encodings, "NAMES", _KNOWN, ", ".join(COMPARED))] = None,
    tasks: Annotated[Any, _parsed(_among(TASKS), "NAMES", _TASKS, "text")] = None,
    seeds: Annotated[int | None, _number("seeds", "Trainings of each encoding.")] = None,
    text: Annotated[
        Any, _parsed(os.path.abspath, "FILE", "Text to train on.", "built-in tales")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the folder.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in the folder.")
    ] = False,
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
    threads: Annotated[int | None, _number("threads", "CPU threads of a training.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu or cuda.", show_default="cpu")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="fp32 or bf16.", show_default="fp32")
    ] = None,
    jobs: Annotated[int | None, _JOBS] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Train the same small transformer with each encoding, and test it on longer sequences.

    All start from the same weights and see the same data in the same order. Encodings that are
    applied to a trained model are tested with RoPE's. Written to a folder: `report.html`, one page
    that opens offline; `figure.png` and `figure.svg`; `results.json`, every number. The folder must
    be new or empty, or have an earlier run; other files are never touched. Numbers are saved after
    each training: Ctrl-C keeps them, and `--resume` does the missing trainings, to the same numbers
    as a run that was never stopped.

    Example: posenc compare --quick -o compared
    """
    _print.check_installed("compare", "matplotlib", "jinja2")
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other: pass one of them.")
    options = {k: v for k, v in context.params.items() if k in _DEFAULTS and v is not None}
    if quick:
        options = QUICK | options
    stopped = False
    if resume:
        run = Run.resume(output)
        if run.own and "encodings" not in options:
            files = ", ".join(dict.fromkeys(name.rpartition(":")[0] for name in run.own))
            rule = f"the run in {output} executes {files}"
            raise ValueError(f"{rule}: to resume, repeat its --encodings, {_names(run.plan)}.")
        wanted = dataclasses.replace(run.plan, **options)
        for name in options:
            if getattr(wanted, name) != getattr(run.plan, name):
                other = f"another --{name.replace('_', '-')}"
                raise ValueError(f"{output} was begun with {other}: leave it out to resume.")
    else:
        run = Run(output, Plan(**options), shlex.join(["posenc", *sys.argv[1:]]))
        run.begin(overwrite=overwrite)
    try:
        with _print.progress() as progress:
            most = int(machine.describe()["cores"] or 1) // run.plan.threads or 1
            most = most if run.plan.device == "cpu" else min(most, 8)
            run.go(progress, jobs=jobs or most)
    except KeyboardInterrupt:
        stopped = True
    written = _draw(run)
    if as_json:
        typer.echo(json.dumps(run.results, indent=1))
    else:
        _show(run)
        for name, path in written.items():
            _print.say(f"{name}: {path}")
    if stopped:
        done = f"{len(run.results['units'])} of {len(units_of(run.plan))} trainings"
        words = ["posenc", "compare", "--resume", "-o", str(output)]
        again = shlex.join(words + ["--encodings", _names(run.plan)] * bool(run.own))
        _print.say(f"posenc: stopped after {done}; continue with {again}", err=True)
        raise typer.Exit(130)


def _names(plan: Plan) -> str:
    return ",".join(plan.encodings)


def _draw(run: Run) -> dict[str, Path]:
    """Write the page and the figures of the trainings that are finished."""
    folder = run.folder.absolute()
    written = {"numbers": folder / RESULTS}
    if any(run.results["summary"].values()):
        written = {"report": folder / "report.html", **written, "figure": folder / "figure.png"}
        written["report"].write_text(report.page(run.plan, run.results), "utf-8")
        sheet = report.overview(run.plan, run.results)
        for suffix in (".svg", ".png"):
            save(sheet, written["figure"].with_suffix(suffix))
    return written


def _show(run: Run) -> None:
    """Print the scores of each task, the best of the longest first, and then the costs."""
    plan, results = run.plan, run.results
    heads = [f"{t} × ({n})" for t, n in zip(plan.times, plan.lengths, strict=True)]
    for task, summary in results["summary"].items():
        rows = [
            [row["label"], *report.scores(row), row["how"]]
            for row in sorted(summary, key=lambda row: row["rank"][-1])
        ]
        titles = {"text": f"loss of the last {plan.train_length} symbols, nats"}
        title = titles.get(task, f"accuracy in {TASKS[task].label}")
        notes = report.guess(plan, results, task), _OF_SEEDS[plan.seeds > 1]
        _print.table(f"{title}, by length of the sequence", ["", *heads, "how"], rows, notes)
    if results["costs"]:
        columns, found = report.cost_table(results["costs"])
        costs = [[find(name).label, *cells] for name, cells in found.items()]
        note = "×: of the time without an encoding; reading: one sequence of the longest length"
        _print.table("what each costs", ["", *columns], costs, [note])
