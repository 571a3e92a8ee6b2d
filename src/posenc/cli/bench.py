"""`posenc bench`: times of posenc and its peers, against a copy of the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from posenc.cli import _print
from posenc.lab import bench as lab
from posenc.lab import machine
from posenc.lab.cases import CASES, choose
from posenc.lab.pictures.style import save
from posenc.lab.plots import timings

_COLUMNS = ("", "time", "quartiles", "× copy", "quartiles", "off by")
_UNITS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))


def bench(
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="CASE", help="From --list; default: all.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "bf16",
    layout: Annotated[str, typer.Option(help="half, interleaved or both.")] = "both",
    device: Annotated[str | None, typer.Option(help="cpu, or cuda if there is one.")] = None,
    mode: Annotated[str | None, typer.Option(help="forward or train, for all cases.")] = None,
    positions: Annotated[str, typer.Option(help="offset, or ids of shape (B, L).")] = "offset",
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, help="CPU threads.")] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Timings of each.")] = lab.ROUNDS,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Time posenc alone.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every number here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the ratios here: .png, .svg, .pdf.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the cases and stop.")] = False,
) -> None:
    """Time posenc and every installed peer, against a copy of the same bytes.

    Each contestant is first compared with float64 and refused if it is wrong. Then all are timed
    in interleaved rounds of one process. "× copy" is the time divided by that of copying q and k,
    and in training of copying their gradients too.

    Example: posenc bench decode tiny --dtype fp32 --layout half --rounds 5
    """
    if list_:
        for case in CASES.values():
            typer.echo(f"{case.name:13} {case.home:5} {case.mode:8} {case.shape}")
        return
    _print.check_file(json_file)
    _print.check_picture(plot, "--plot")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    works = choose(
        cases or (), dtype=dtype, layout=layout, device=device, positions=positions, mode=mode
    )
    measurements, found = [], {}
    with machine.threads(threads):
        used = torch.get_num_threads()
        for i, work in enumerate(works):
            title = f"{work} ({i + 1} of {len(works)}): "
            # A thread that redraws the bar would take time from the cores that are measured.
            with _print.progress(title, background=False) as tell:
                measurements.append(
                    lab.measure(work, rounds=rounds, peers_too=not no_peers, tell=tell)
                )
            found = lab.report(measurements, threads=used, rounds=rounds)
            # Written after each workload, so that an interrupted run keeps its results.
            if json_file is not None:
                json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            _show(f"{work}: {work.shape}, {work.nbytes:,} bytes", measurements[-1])
    if plot is not None:
        save(timings(found), plot)


def _show(title: str, measurement: dict[str, Any]) -> None:
    timed = [each for each in measurement["results"] if each["status"] == "timed"]
    others = [each for each in measurement["results"] if each["status"] != "timed"]
    notes = [f"{each['contestant']}: {each['status']}, {each['reason']}" for each in others]
    _print.table(title, _COLUMNS, list(map(_row, timed)), notes)
    print(flush=True)


def _row(result: dict[str, Any]) -> list[tuple[str, str]]:
    name = result["contestant"] + (" (graph)" if result["via"] == "graph" else "")
    scale, unit = next(u for u in _UNITS if result["median"] < 1000 * u[0])
    low, median, high = (_short(result[each] / scale) for each in ("low", "median", "high"))
    error = result["error_ulps"]
    cells = (
        name,
        f"{median} {unit}",
        f"{low} to {high}",
        f"{result['ratio']:.2f}",
        f"{result['ratio_low']:.2f} to {result['ratio_high']:.2f}",
        "" if error is None else f"{_short(error)} ulp",
    )
    style = "bold" if name.startswith("posenc") else ""
    return [(cell, style) for cell in cells]


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
