"""Tables and figure of README.md, from the results beside it: `python benchmarks/summary.py`."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from posenc.lab.cases import named
from posenc.lab.pictures.style import SERIES, figure
from posenc.lab.plots import OURS, THEIRS, in_copies, ratios

HERE = Path(__file__).parent
START, END = "<!-- measured -->\n", "<!-- end -->\n"
H200, XEON = "NVIDIA H200", "Intel(R) Xeon(R) Processor"
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
# Runs whose files were not kept: three on the H200 and eleven on the Xeon, both layouts of each. Of
# the first seven on the Xeon, one of them in the files, only least, median and most are known.
FP32, BF16 = "fp32, 2 threads", "bf16, 2 threads"
EARLIER = {
    (H200, "h200-decode, forward", "offset"): (1.01, 1.00, 1.05, 1.05, 1.03, 1.12),
    (H200, "h200-decode, forward", "ids"): (1.09, 1.09, 1.15, 1.08, 1.07, 1.152),
    (XEON, "prefill, forward", BF16): (
        0.88, 1.31, 0.79, 0.96, 1.11, 1.05, 1.01, 0.87, 0.86, 0.99, 0.96, 1.02, 0.98, 0.99, 1.00,
    ),
    (XEON, "prefill, in place", BF16): (
        0.54, 0.65, 0.85, 0.52, 0.57, 0.81, 0.77, 0.62, 0.57, 0.60, 0.58, 0.56, 0.79, 0.67, 0.82,
        0.80,
    ),
    (XEON, "train, forward", BF16): (
        1.10, 1.45, 1.12, 1.20, 1.37, 1.29, 1.23, 1.23, 1.16, 1.12, 1.11, 1.22, 1.19, 1.35, 1.25,
    ),
    (XEON, "prefill, forward and backward", BF16): (
        0.96, 1.04, 1.25, 1.03, 1.12, 0.97, 0.91, 1.10, 1.07, 1.00, 0.97, 1.02, 0.94, 1.05, 1.04,
    ),
    (XEON, "train, forward and backward", BF16): (
        1.17, 1.58, 1.21, 1.34, 1.44, 1.40, 1.34, 1.29, 1.33, 1.12, 1.18, 1.27, 1.26, 1.47, 1.34,
    ),
    (XEON, "train, forward", FP32): (1.31,),
    (XEON, "tiny, of transformers eager", "fp32, 1 thread"): (0.45, 0.53, 0.45, 0.40),
}  # fmt: skip


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
