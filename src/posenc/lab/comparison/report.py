"""The results of a comparison as a page that opens offline, and as sentences."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posenc.lab.comparison.charts import Rows, board, charts, looks, needs_board
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.tasks import TASKS
from posenc.lab.pictures.panels import Chart, sheet
from posenc.lab.pictures.style import in_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Labels that read differently inside a sentence.
_SPOKEN = {"none": "no encoding"} | {n: f"{n} positions" for n in ("sinusoidal", "learned")}


class Picture(NamedTuple):
    """An image as an address that holds it, and what it shows in words."""

    source: str
    words: str


def page(plan: Plan, results: dict[str, Any]) -> str:
    """The template ``page.html``, filled in; one encoding at least must be finished.

    Jinja escapes every word and number: the name of a text may hold any character.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    done = {task: rows for task, rows in results["summary"].items() if rows}
    # The same encodings in every task, up to those that are not finished.
    rows = max(done.values(), key=len)
    words = "Scores and ranks: the numbers are in the tables"
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        plan=plan,
        results=results,
        machine=results["machine"],
        slowest=round(math.tau * plan.base ** ((plan.head_dim - 2) / plan.head_dim)),
        board=Picture(in_page(board(plan, done)), words) if needs_board(done) else None,
        tasks=[_task(plan, *each) for each in done.items()],
        rows=rows,
        looks=looks(plan),
        scores=scores,
        costs=costs,
    )


def _task(plan: Plan, task: str, rows: Rows) -> dict[str, Any]:
    """What the page says of one task, and its charts."""
    pictures = [
        Picture(in_page(_tall_enough(chart)), f"{chart.title}: the numbers are in the tables")
        for chart in charts(plan, task, rows).values()
    ]
    best_first = sorted(rows, key=lambda row: row["rank"][-1])
    return {"about": TASKS[task], "pictures": pictures, "rows": best_first}


def _tall_enough(chart: Chart) -> Figure:
    """The chart on a sheet with room for its legend."""
    return sheet([chart], 4.9, max(3.6, 0.9 + 0.19 * len(chart.lines)))


def scores(row: dict[str, Any]) -> list[str]:
    """Mean and half the range of the seeds at each length, as text."""
    found = []
    for score, low, high in zip(row["score"], row["low"], row["high"], strict=True):
        spread = f" ± {(high - low) / 2:.3f}" if len(row["seeds"]) > 1 else ""
        found.append(f"{score:.3f}{spread}")
    return found


def costs(cost: dict[str, Any]) -> list[str]:
    """Parameters, time and memory of a step, time and memory of reading, as text."""
    step = f"{cost['step']:.2f}" if cost["step"] else "as trained"
    memory = f"{cost['step_bytes'] / 1e6:.1f}" if cost["step_bytes"] else ""
    read = f"{cost['read']:.2f}", f"{cost['read_bytes'] / 1e6:.2f}"
    return [f"{cost['parameters']:,}", step, memory, *read]


COSTS = ("parameters", "step, ×", "step, MB", "reading, ×", "reading, MB")


def sentence(plan: Plan, task: str, rows: Rows) -> str:
    """The best and the worst past the training length; empty if there is nothing to compare."""
    if len(rows) < 2 or len(plan.times) < 2:
        return ""

    def say(row: dict[str, Any]) -> str:
        name = _SPOKEN.get(row["encoding"], row["label"])
        return f"{name} ({row['score'][0]:.2f} → {row['score'][-1]:.2f})"

    if TASKS[task].lower_is_better:
        best, *_, worst = map(say, sorted(rows, key=lambda row: row["worse"][-1]))
        return (
            f"From {plan.lengths[0]} to {plan.lengths[-1]} symbols, a transformer trained on "
            f"{plan.train_length} kept its loss best with {best} and worst with {worst}."
        )
    if max(row["score"][0] for row in rows) < 0.5:
        return f"No encoding learned {TASKS[task].label} in {plan.steps} steps: train longer."
    # An encoding that was never right loses nothing: here the last score tells.
    best, *_, worst = map(say, sorted(rows, key=lambda row: -row["score"][-1]))
    return (
        f"In {TASKS[task].label}, a transformer trained on {plan.train_length} symbols was right "
        f"at {plan.lengths[-1]} most often with {best} and least with {worst}."
    )
