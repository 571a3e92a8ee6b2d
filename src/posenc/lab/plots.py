"""Charts of what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS: dict[str, dict[str, str]] = {
    "posenc": {"marker": "o", "color": "C0"},
    "posenc in place": {"marker": "o", "color": "C0", "mfc": "none"},
    "transformers eager": {"marker": "x", "color": "0.4"},
    "transformers compiled": {"marker": "+", "color": "0.4"},
    "Liger in place": {"marker": "d", "color": "C1", "mfc": "none"},
}


def timings(report: dict[str, Any]) -> Figure:
    """Bars of a benchmark, one panel for each workload: how many copies of q and k a call takes.

    Args:
        report: What :func:`posenc.lab.bench.report` gives, or a results file that holds it.
    """
    from matplotlib.figure import Figure

    shown = report["measurements"]
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    lines = max(sum(r["status"] != "missing" for r in m["results"]) for m in shown)
    size = (6.5 * columns, rows * (0.28 * lines + 1.1) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    machine = report["machine"]
    where = f"{machine['cpu']}, {report['settings'].get('threads')} threads"
    if shown[0]["device"] == "cuda":
        where = machine["gpu"]
    figure.suptitle(f"How many copies a rotation costs, 1 is the memory's own speed\n{where}")
    for ax in figure.subplots(rows, columns, squeeze=False).flat[len(shown) :]:
        ax.set_axis_off()
    for ax, measurement in zip(figure.axes, shown, strict=False):
        _bars(ax, measurement)
    return figure


def overview(reports: Iterable[dict[str, Any]]) -> Figure:
    """Every workload of several benchmarks as dots on one line: how many copies a call takes.

    Args:
        reports: What :func:`posenc.lab.bench.report` gives; those of one machine share a panel.
    """
    from matplotlib.figure import Figure

    panels: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for report in reports:
        machine = report["machine"]
        for measurement in report["measurements"]:
            place = machine["gpu"] if measurement["device"] == "cuda" else machine["cpu"]
            case, threads = measurement["case"], report["settings"].get("threads")
            words = [case["name"], measurement["dtype"], measurement["layout"], case["mode"]]
            words.append(measurement["positions"] if place == machine["gpu"] else f"{threads}t")
            panels.setdefault(place, []).append((" ".join(words), measurement))
    heights = [len(lines) + 3 for lines in panels.values()]
    figure = Figure(figsize=(10, 0.19 * sum(heights) + 0.8), layout="constrained")
    figure.suptitle("Time as a multiple of a copy of the same bytes: 1 is the speed of memory")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights, sharex=True)
    for ax, (place, lines) in zip(axes.flat, panels.items(), strict=True):
        for y, (_, measurement) in enumerate(lines):
            for name, ratio in ratios(measurement).items():
                if name in _MARKS:
                    ax.plot(ratio, y, label=name, ls="", ms=5, **_MARKS[name])
        ax.set_title(place, fontsize=10)
        ax.set_yticks(range(len(lines)), [words for words, _ in lines], fontsize=7)
        ax.set_ylim(len(lines) - 0.4, -0.6)
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.axvline(1, color="black", lw=0.8)
        ax.grid(axis="both", lw=0.3)
    found = [zip(*reversed(ax.get_legend_handles_labels()), strict=True) for ax in axes.flat]
    once = {name: mark for panel in found for name, mark in panel}
    figure.legend(once.values(), once.keys(), ncols=len(once), loc="outside lower center")
    return figure


def ratios(measurement: dict[str, Any]) -> dict[str, float]:
    """Copies that each contestant took: from the CUDA graph where there is one."""
    timed = [result for result in measurement["results"] if result["status"] == "timed"]
    via = "graph" if any(result["via"] == "graph" for result in timed) else "loop"
    return {r["contestant"]: r["ratio"] for r in timed if r["via"] == via and r["ratio"]}


def _bars(ax: Axes, measurement: dict[str, Any]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    case = measurement["case"]
    names: list[str] = []
    for result in measurement["results"]:
        if result["status"] == "missing":
            continue
        y = len(names)
        names.append(result["contestant"] + (" (graph)" if result["via"] == "graph" else ""))
        if result["status"] != "timed":
            ax.text(1, y, f" {result['status']}", va="center", fontsize=8, color="C3")
            continue
        ratio, low, high = result["ratio"], result["ratio_low"], result["ratio_high"]
        ours = result["contestant"].startswith("posenc")
        ax.barh(y, ratio, color="C0" if ours else "0.7", height=0.7)
        ax.plot((low, high), (y, y), color="black", lw=1)
        ax.text(max(ratio, high), y, f" {ratio:.3g}", va="center", fontsize=8)
    words = (case["name"], measurement["dtype"], measurement["layout"], case["mode"])
    ax.set_title(" ".join(words), fontsize=10)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter("{x:g}")
    copied = "q and k" if measurement["copies"] == 1 else "q, k and their gradients"
    ax.set_xlabel(f"time / time of a copy of {copied}", fontsize=8)
    ax.margins(x=0.15)
    ax.axvline(1, color="black", lw=0.8, ls=":")
