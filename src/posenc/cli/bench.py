"""`posenc bench`: times of posenc and its peers, against a copy of the same bytes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from posenc.cli import INSTALL
from posenc.cli._root import Refused
from posenc.lab import bench as lab
from posenc.lab.bench import Measurement, Result, Tell
from posenc.lab.cases import CASES, choose

_COLUMNS = ("", "time", "quartiles", "× copy", "quartiles", "off by")
_ALL = "all of the device"
_SAID = {"missing": "left out"}
_UNITS = (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))
_HELP = """Time posenc and every installed peer, against a copy of the same bytes.

Each contestant is first compared with float64 and refused if it is wrong. Then all are timed in
interleaved rounds of one process. "× copy" is the time divided by that of copying q and k; in
training their gradients too, since they move as well.

Example: posenc bench decode tiny --dtype fp32 --layout half --rounds 5
"""


def bench(
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="CASE", help="See --list.", show_default=_ALL)
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "bf16",
    layout: Annotated[str, typer.Option(help="half, interleaved or both.")] = "both",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="forward or train.", show_default="the case's")
    ] = None,
    positions: Annotated[str, typer.Option(help="offset, or ids of shape (B, L).")] = "offset",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times each is timed.")] = lab.ROUNDS,
    peers: Annotated[bool, typer.Option(help="Whether anyone but posenc takes part.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every number here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the ratios here: .png, .svg, .pdf.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the cases and stop.")] = False,
) -> None:
    """Measure; the help text is set below, where its example can be tested."""
    if list_:
        for case in CASES.values():
            norm = ", QK-norm" if case.qk_norm else ""
            typer.echo(f"{case.name:13} {case.home:5} {case.mode:8} {case}{norm}")
        return
    _refuse_early(json_file, plot)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        far = [name for name in cases or () if name in CASES and CASES[name].home == "cuda"]
        if far and device == "cpu":
            raise Refused(f"{', '.join(far)} is for CUDA: --device cpu runs it here all the same.")
    try:
        works = choose(
            cases or (), dtype=dtype, layout=layout, device=device, positions=positions, mode=mode
        )
    except ValueError as wrong:
        raise Refused(str(wrong)) from None
    console = Console()
    measurements: list[Measurement] = []
    found: dict[str, Any] = {}
    with lab.threads(threads):
        used = torch.get_num_threads()
        for i, work in enumerate(works):
            with _progress(f"{work} ({i + 1} of {len(works)})") as tell:
                measurement = lab.measure(work, rounds=rounds, peers_too=peers, tell=tell)
            measurements.append(measurement)
            found = lab.report(measurements, threads=used, rounds=rounds)
            # Before it is shown, and after each: what was measured is not to be lost.
            if json_file is not None:
                json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            _show(measurement, console)
    if plot is not None:
        from posenc.lab.plots import timings

        timings(found).savefig(plot, dpi=150)


bench.__doc__ = _HELP


def _refuse_early(json_file: Path | None, plot: Path | None) -> None:
    """What would fail after minutes of measuring fails now."""
    for file in (json_file, plot):
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise Refused(f"{file} is not a file in a folder that exists.")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise Refused(f"--plot needs matplotlib: {INSTALL}")
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise Refused(f"--plot writes .png, .svg or .pdf, got {plot}.")


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Tell]:
    """A bar on stderr while somebody looks; nothing in a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda message, done: None
        return
    words = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    # No refreshing in the background: its thread would share the cores with what is timed.
    with Progress(*words, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda message, done: bar.update(
            task, description=f"{title}: {message}", completed=done, refresh=True
        )


def _show(measurement: Measurement, console: Console) -> None:
    work = measurement.work
    title = f"{work}: {work.case}, {_size(work.nbytes)}"
    rows = [_row(result) for result in measurement.results if result.status == "timed"]
    notes = [
        f"{result.contestant}: {_SAID.get(result.status, result.status)}, {result.reason}"
        for result in measurement.results
        if result.status != "timed"
    ]
    if console.is_terminal:
        table = Table(title=title, title_justify="left", title_style="bold")
        for i, column in enumerate(_COLUMNS):
            table.add_column(column, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row, style="bold" if row[0].startswith("posenc") else None)
        console.print(table)
        for note in notes:
            # Text, not markup: a reason may have brackets in it.
            console.print(Text(f"  {note}", style="dim"))
        return
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    print(title)
    for row in (_COLUMNS, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print(f"  {'  '.join(cells)}".rstrip())
    for note in notes:
        print(f"  {note}")
    print(flush=True)


def _row(result: Result) -> tuple[str, ...]:
    name = result.contestant + (" (graph)" if result.via == "graph" else "")
    assert result.low is not None
    assert result.median is not None
    assert result.high is not None
    unit, scale = next(u for u in _UNITS if result.median < 1000 * u[1] or u is _UNITS[-1])
    low, median, high = (_short(t / scale) for t in (result.low, result.median, result.high))
    return (
        name,
        f"{median} {unit}",
        f"{low} to {high}",
        f"{result.ratio:.2f}",
        f"{result.ratio_low:.2f} to {result.ratio_high:.2f}",
        "" if result.error_ulps is None else f"{_short(result.error_ulps)} ulp",
    )


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _size(count: int) -> str:
    power = min(len(str(count)) - 1, 9) // 3
    return f"{_short(count / 1000**power)} {('B', 'kB', 'MB', 'GB')[power]}"
