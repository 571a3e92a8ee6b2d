"""Table and figure of README.md, from the results beside it: `python benchmarks/summary.py`."""

import json
from pathlib import Path

from posenc.lab.plots import overview, ratios

HERE = Path(__file__).parent
START, END = "<!-- measured -->\n", "<!-- end -->\n"
SHOWN = (
    "posenc", "posenc in place", "transformers eager", "transformers compiled", "Liger in place",
)  # fmt: skip


def rows(name: str, report: dict) -> list[str]:
    """One line of the table for each measurement of a file."""
    lines = []
    for measurement in report["measurements"]:
        ratio, case = ratios(measurement), measurement["case"]
        what = f"{measurement['dtype']} {measurement['layout']} {case['mode']}"
        cells = [f"{ratio[who]:.2f}" if who in ratio else "" for who in SHOWN]
        what += f" {measurement['positions']}"
        lines.append(f"| {name} | {case['name']} | {what} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    reports = {path.stem: json.loads(path.read_text()) for path in sorted(HERE.glob("*.json"))}
    head = ["| file | case | what | " + " | ".join(SHOWN) + " |", "|---" * (3 + len(SHOWN)) + "|"]
    table = head + [line for name, report in reports.items() for line in rows(name, report)]
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(START)
    after = rest.partition(END)[2]
    readme.write_text(before + START + "\n".join(table) + "\n" + END + after)
    overview(reports.values()).savefig(HERE / "summary.png", dpi=90)
