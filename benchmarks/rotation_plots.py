"""Charts of benchmark results: time as a multiple of a copy of q and k, on a log scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rotation_cases import named

from posenc.lab.panels import GREY, INK, SERIES, figure, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, THEIRS = SERIES[0], GREY


def timings(report: dict[str, Any]) -> Figure:
    """Bars of a benchmark, or of a results file: one panel for each workload."""
    shown, machine = report["measurements"], report["machine"]
    where = f"{machine['cpu']}, {report['settings'].get('threads')} threads"
    if shown[0]["device"] == "cuda":
        where = machine["gpu"]
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    bars = max(sum(r["status"] != "missing" for r in m["results"]) for m in shown)
    title = f"How many copies a rotation costs: 1 is the speed of memory\n{where}"
    drawn = figure(6.5 * columns, rows * (0.28 * bars + 1.1) + 0.5, title)
    axes = drawn.subplots(rows, columns, squeeze=False).flat
    for ax in axes[len(shown) :]:
        ax.set_axis_off()
    for ax, measurement in zip(axes, shown, strict=False):
        _bars(ax, measurement)
    return drawn


def ratios(measurement: dict[str, Any]) -> dict[str, float]:
    """Time of each contestant in copies: from the CUDA graph if there is one."""
    timed = [result for result in measurement["results"] if result["status"] == "timed"]
    via = "graph" if any(result["via"] == "graph" for result in timed) else "loop"
    return {r["contestant"]: r["ratio"] for r in timed if r["via"] == via}


def in_copies(ax: Axes, title: str, names: Sequence[str]) -> None:
    """Prepare axes: a line for each name, and a log scale across with the copy marked."""
    from matplotlib.ticker import NullLocator

    plain(ax, title, "", "")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xscale("log")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter("{x:g}")
    ax.axvline(1, color=INK, lw=0.8)


def _bars(ax: Axes, measurement: dict[str, Any]) -> None:
    from matplotlib.ticker import LogLocator

    shown = [result for result in measurement["results"] if result["status"] != "missing"]
    names = [r["contestant"] + " (graph)" * (r["via"] == "graph") for r in shown]
    in_copies(ax, named(measurement), names)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    copied = "q and k" if measurement["copies"] == 1 else "q, k and their gradients"
    ax.set_xlabel(f"time / time of a copy of {copied}")
    ax.margins(x=0.15)
    for y, result in enumerate(shown):
        if result["status"] != "timed":
            ax.text(1, y, f" {result['status']}", va="center", fontsize=8, color=SERIES[1])
            continue
        ratio, low, high = result["ratio"], result["ratio_low"], result["ratio_high"]
        ours = result["contestant"].startswith("posenc")
        ax.barh(y, ratio, color=OURS if ours else THEIRS, height=0.7)
        ax.plot((low, high), (y, y), color=INK, lw=1)
        ax.text(max(ratio, high), y, f" {ratio:.3g}", va="center", fontsize=8, color=INK)
