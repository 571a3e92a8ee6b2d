"""`posenc bench`: times of posenc and its peers, against a copy of the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.text import Text

from posenc.cli import _print
from posenc.cli._root import Refused
from posenc.lab import bench as lab
from posenc.lab import machine
from posenc.lab.bench import Measurement, Result
from posenc.lab.cases import CASES, choose
from posenc.lab.pictures.style import save
from posenc.lab.plots import timings

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
    _print.check_file(json_file)
    _print.check_picture(plot, "--plot")
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
    measurements: list[Measurement] = []
    found: dict[str, Any] = {}
    with machine.threads(threads):
        used = torch.get_num_threads()
        for i, work in enumerate(works):
            title = f"{work} ({i + 1} of {len(works)}): "
            # A thread that redraws the bar would share the cores with what is timed.
            with _print.progress(title, background=False) as tell:
                measurement = lab.measure(work, rounds=rounds, peers_too=peers, tell=tell)
            measurements.append(measurement)
            found = lab.report(measurements, threads=used, rounds=rounds)
            # Before it is shown, and after each: what was measured is not to be lost.
            if json_file is not None:
                json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            _show(measurement)
    if plot is not None:
        save(timings(found), plot)


bench.__doc__ = _HELP


def _show(measurement: Measurement) -> None:
    work = measurement.work
    rows = [_row(result) for result in measurement.results if result.status == "timed"]
    notes = [
        f"{result.contestant}: {_SAID.get(result.status, result.status)}, {result.reason}"
        for result in measurement.results
        if result.status != "timed"
    ]
    _print.table(f"{work}: {work.case}, {_size(work.nbytes)}", _COLUMNS, rows, notes)
    print(flush=True)


def _row(result: Result) -> list[Text]:
    name = result.contestant + (" (graph)" if result.via == "graph" else "")
    assert result.low is not None
    assert result.median is not None
    assert result.high is not None
    unit, scale = next(u for u in _UNITS if result.median < 1000 * u[1] or u is _UNITS[-1])
    low, median, high = (_short(t / scale) for t in (result.low, result.median, result.high))
    cells = (
        name,
        f"{median} {unit}",
        f"{low} to {high}",
        f"{result.ratio:.2f}",
        f"{result.ratio_low:.2f} to {result.ratio_high:.2f}",
        "" if result.error_ulps is None else f"{_short(result.error_ulps)} ulp",
    )
    style = "bold" if name.startswith("posenc") else ""
    return [Text(cell, style=style) for cell in cells]


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _size(count: int) -> str:
    power = min(len(str(count)) - 1, 9) // 3
    return f"{_short(count / 1000**power)} {('B', 'kB', 'MB', 'GB')[power]}"
