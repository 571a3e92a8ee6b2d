"""Write the table of README.md from the results beside it: `python benchmarks/summary.py`."""

import json
from pathlib import Path

HERE = Path(__file__).parent
START, END = "<!-- measured -->\n", "<!-- end -->\n"
SHOWN = ("posenc", "posenc in place", "transformers eager", "transformers compiled")


def rows(path: Path) -> list[str]:
    """One line of the table for each measurement of a file."""
    found = json.loads(path.read_text())
    lines = []
    for measurement in found["measurements"]:
        timed = [r for r in measurement["results"] if r["status"] == "timed"]
        via = "graph" if any(r["via"] == "graph" for r in timed) else "loop"
        ratio = {r["contestant"]: r["ratio"] for r in timed if r["via"] == via}
        case = measurement["case"]["name"]
        what = f"{measurement['dtype']} {measurement['layout']} {measurement['case']['mode']}"
        cells = [f"{ratio[name]:.2f}" if ratio.get(name) else "" for name in SHOWN]
        lines.append(
            f"| {path.stem} | {case} | {what} {measurement['positions']} | {' | '.join(cells)} |"
        )
    return lines


if __name__ == "__main__":
    head = ["| file | case | what | " + " | ".join(SHOWN) + " |", "|---" * (3 + len(SHOWN)) + "|"]
    table = head + [line for path in sorted(HERE.glob("*.json")) for line in rows(path)]
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(START)
    after = rest.partition(END)[2]
    readme.write_text(before + START + "\n".join(table) + "\n" + END + after)
