"""The page of the tournament, made from what `posenc compare` wrote; no number on it is typed."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from posenc.lab.comparison import report
from posenc.lab.comparison.run import RESULTS, read
from posenc.lab.comparison.tasks import TASKS
from posenc.lab.panels import image

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FOLDER = _BENCHMARKS / "tournament"
# What each text is, by its folder.
LARGE = {
    "tales": "The built-in tales, half a megabyte, each part seen ten times",
    "long": "Sixteen megabytes of tales, each part seen once",
}
_MISSING = """!!! note
    No numbers are in `benchmarks/tournament` yet. The command above writes them.
"""


def results(folder: Path = FOLDER) -> tuple[Any, dict[str, Any]] | None:
    """The plan and the numbers of the tournament, if it was run."""
    return read(folder) if (folder / RESULTS).exists() else None


def large(text: str) -> tuple[Any, dict[str, Any]]:
    """The plan and the numbers of the large models that learned this text."""
    return read(_BENCHMARKS / "tournament-30m" / text)


def fill(markdown: str, folder: Path = FOLDER) -> str:
    """Put the picture and the numbers of ``folder`` at the marks of the page."""
    found = results(folder)
    picture, numbers = (_MISSING, "") if found is None else (_picture(*found), _write(*found))
    markdown = markdown.replace("<!-- large -->", _large())
    return markdown.replace("<!-- picture -->", picture).replace("<!-- numbers -->", numbers)


def _large() -> str:
    parts = []
    for text, words in LARGE.items():
        plan, found = large(text)
        lines = [
            [*line, *report.costs(found["costs"][row["encoding"]])[1::2]]
            for row, line in _ranked(found["summary"]["text"])
        ]
        heads = [f"{length:,}" for length in plan.lengths]
        parts.append(f"{words}, {plan.steps:,} steps:\n")
        parts.append(_table(("nats per symbol", ""), [*heads, *report.COSTS[1::2]], lines))
    return "\n".join(parts)


def _picture(plan: Any, found: dict[str, Any]) -> str:
    machine = found["machine"]
    where = machine["gpu"] if plan.device == "cuda" else machine["cpu"]
    return (
        "![Scores of all encodings](pictures/tournament.svg)\n\n"
        f"{where}, torch {machine['torch']}, {machine['date'][:10]}. {plan.layers} layers of "
        f"{plan.width} channels and {plan.heads} heads, {plan.steps} steps of {plan.batch} "
        f"sequences of {plan.train_length} symbols, {plan.seeds} seeds."
    )


def _write(plan: Any, found: dict[str, Any]) -> str:
    parts = []
    for task, rows in found["summary"].items():
        about = TASKS[task]
        heads = [f"{times} ×" for times in plan.times]
        lines = [line for _, line in _ranked(rows)]
        guess = report.guess(plan, found, task)
        parts.append(f"## {about.label.capitalize()}\n\n{about.about} {guess}\n")
        parts.append(_table((about.measure, ""), heads, lines))
    labels = {row["encoding"]: row["label"] for rows in found["summary"].values() for row in rows}
    lines = [[labels[name], *report.costs(cost)] for name, cost in found["costs"].items()]
    parts.append("## What each costs\n")
    parts.append(_table(("",), report.COSTS, lines))
    return "\n".join(parts)


def _ranked(rows: list[Any]) -> list[tuple[Any, list[str]]]:
    """Each row and its cells, the best on the longest sequences first."""
    lines = []
    for row in sorted(rows, key=lambda row: row["rank"][-1]):
        # One seed has no range that could reach that of the best.
        several = len(row["seeds"]) > 1
        cells = [
            re.sub("^[^#]+(?= #)", r"**\g<0>**", score) if level and several else score
            for score, level in zip(report.scores(row), row["level"], strict=True)
        ]
        lines.append((row, [row["label"], row["how"], *cells]))
    return lines


def _table(words: tuple[str, ...], numbers: Any, rows: list[list[str]]) -> str:
    cells = [[html.escape(cell) for cell in row] for row in ([*words, *numbers], *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    lines.insert(1, "|---" * len(words) + "|--:" * len(numbers) + "|")
    return '<div class="numbers scores" markdown>\n\n' + "\n".join(lines) + "\n\n</div>\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill the page of the tournament."""
    return fill(markdown) if page.file.src_uri == "tournament.md" else markdown


def on_files(files: Any, config: Any) -> Any:
    """Put the figure among the files of the site."""
    from mkdocs.structure.files import File

    found = results()
    if found is not None:
        content = image(report.overview(*found), ".svg")
        files.append(File.generated(config, "pictures/tournament.svg", content=content))
    return files
