"""Tables and figure of README.md, from the results beside it: `python benchmarks/summary.py`."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from rotation_cases import named
from rotation_plots import OURS, THEIRS, in_copies, ratios

from posenc.lab.panels import SERIES, figure

HERE = Path(__file__).parent
START, END = "<!-- measured -->\n", "<!-- end -->\n"
H200 = "NVIDIA H200"
MODES = {"forward": "forward", "train": "forward and backward"}
PEERS = ("transformers compiled", "Liger in place")
MARKS = {
    "posenc": {"marker": "o", "color": OURS},
    "posenc in place": {"marker": "o", "color": OURS, "mfc": "none"},
    "transformers eager": {"marker": "x", "color": THEIRS},
    "transformers compiled": {"marker": "+", "color": THEIRS},
    "Liger in place": {"marker": "d", "color": SERIES[1], "mfc": "none"},
}
# At most so many copies, or so much of the time of transformers eager.
BOUNDS = {
    "prefill, forward": 1.15,
    "prefill, in place": 0.75,
    "prefill, forward and backward": 1.3,
    "train, forward": 1.3,
    "train, forward and backward": 1.3,
    "decode, of transformers eager": 0.5,
    "tiny, of transformers eager": 0.5,
    "h200-long, forward": 1 / 0.93,
    "h200-wide, forward": 1 / 0.93,
    "h200-mid, forward": 1 / 0.9,
    "h200-train, forward and backward": 1.12,
    "h200-decode, forward": 1.15,
    "h200-qk-norm, forward": 1.15,
}
# Three runs whose files were not kept, both layouts of each.
EARLIER = {
    (H200, "h200-decode, forward", "offset"): (1.01, 1.00, 1.05, 1.05, 1.03, 1.12),
    (H200, "h200-decode, forward", "ids"): (1.09, 1.09, 1.15, 1.08, 1.07, 1.152),
}


def recorded(reports: Iterable[dict]) -> dict[tuple[str, str, str], list[float]]:
    """Every ratio by machine, row and column, both layouts together."""
    found = defaultdict(list)
    for report in reports:
        machine, threads = report["machine"], report["settings"]["threads"]
        for measurement in report["measurements"]:
            ratio, case = ratios(measurement), measurement["case"]["name"]
            row = f"{case}, {MODES[measurement['case']['mode']]}"
            place, column = machine["gpu"], measurement["positions"]
            if measurement["device"] == "cpu":
                place = machine["cpu"]
                column = f"{measurement['dtype']}, {threads} thread{'s' * (threads > 1)}"
            if (part := f"{case}, of transformers eager") in BOUNDS:
                found[place, part, column].append(ratio["posenc"] / ratio["transformers eager"])
                continue
            found[place, row, column].append(ratio["posenc"])
            if "posenc in place" in ratio:
                found[place, f"{case}, in place", column].append(ratio["posenc in place"])
            for peer in PEERS:
                if measurement["device"] == "cuda" and peer in ratio:
                    found[place, row, peer].append(ratio[peer])
    for key, earlier in EARLIER.items():
        found[key] += earlier
    return found


def table(machine: str, found: dict[tuple[str, str, str], list[float]]) -> list[str]:
    """One machine: least, median and most of each row, in bold where they are over its bound."""
    rows = dict.fromkeys(row for place, row, _ in found if place == machine)
    columns = sorted({column for place, _, column in found if place == machine} - {*PEERS})
    columns = [*reversed(columns), *PEERS] if machine == H200 else columns
    lines = [f"| {machine} | bound | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for row in rows:
        bound, cells = BOUNDS.get(row), []
        for column in columns:
            values = found.get((machine, row, column), [])
            limit = bound if bound and column not in PEERS else float("inf")
            three = (min(values), statistics.median(values), max(values)) if values else ()
            cells.append(" / ".join(f"**{x:.2f}**" if x > limit else f"{x:.2f}" for x in three))
        lines.append(f"| {row} | {f'{bound:.2f}' if bound else ''} | {' | '.join(cells)} |")
    return [*lines, ""]


def overview(reports: Iterable[dict]):
    """A figure of every workload as a line of dots; files of one machine share a panel."""
    panels = defaultdict(list)
    for report in reports:
        for measurement in report["measurements"]:
            on_gpu = measurement["device"] == "cuda"
            threads = "" if on_gpu else f" {report['settings']['threads']}t"
            place = report["machine"]["gpu" if on_gpu else "cpu"]
            panels[place].append((named(measurement) + threads, ratios(measurement)))
    heights = [len(lines) + 3 for lines in panels.values()]
    title = "Time as a multiple of a copy of the same bytes: 1 is the speed of memory"
    drawn = figure(10, 0.19 * sum(heights) + 0.8, title)
    axes = drawn.subplots(len(panels), 1, squeeze=False, height_ratios=heights, sharex=True).flat
    marks = {}
    for ax, (place, lines) in zip(axes, panels.items(), strict=True):
        in_copies(ax, place, [name for name, _ in lines])
        for y, (_, found) in enumerate(lines):
            for name, ratio in found.items():
                if name in MARKS:
                    (marks[name],) = ax.plot(ratio, y, ls="", ms=5, **MARKS[name])
    drawn.legend(marks.values(), marks.keys(), ncols=len(marks), loc="outside lower center")
    return drawn


if __name__ == "__main__":
    reports = [json.loads(path.read_text()) for path in sorted(HERE.glob("*.json"))]
    found = recorded(reports)
    machines = dict.fromkeys(place for place, _, _ in found)
    tables = [line for machine in machines for line in table(machine, found)]
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(START)
    after = rest.partition(END)[2]
    readme.write_text(before + START + "\n".join(tables) + END + after)
    overview(reports).savefig(HERE / "summary.png", dpi=90)
