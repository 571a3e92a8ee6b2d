"""The results of a comparison as charts, and as a board of scores and ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.tasks import TASKS
from posenc.lab.pictures.panels import Chart, Line
from posenc.lab.pictures.style import INK, Look, figure, legend, look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows: TypeAlias = Sequence[dict[str, Any]]
# More lines than this are hard to tell apart in a chart.
_MOST_LINES = 12


def overview(plan: Plan, results: dict[str, Any]) -> Figure:
    """The charts of one task on a sheet, or the board of several tasks or many encodings."""
    done = {task: rows for task, rows in results["summary"].items() if rows}
    if needs_board(done):
        return board(plan, done)
    ((task, rows),) = done.items()
    what = results["text"]["name"] if task == "text" else TASKS[task].label
    title = f"Trained on {plan.train_length} symbols of {what}"
    drawn = figure(13, 7.2, f"{title}, tested on up to {plan.longest}")
    found = charts(plan, task, rows)
    first, *others = found
    axes = drawn.subplot_mosaic([[first, name] for name in others])
    for name, chart in found.items():
        chart.draw(axes[name], named=False)
    # The first chart has a line for each encoding.
    legend(axes[first], of_figure=True)
    return drawn


def looks(plan: Plan) -> dict[str, Look]:
    """How each encoding of a comparison is drawn, in all of its charts."""
    return {name: look(i) for i, name in enumerate(dict.fromkeys(plan.encodings))}


def charts(plan: Plan, task: str, rows: Rows) -> dict[str, Chart]:
    """Score by length of the sequence, loss while training, and of a text also by position."""
    past = ("x", plan.train_length, "longer than in training")
    names = {n: f"{n}\n{times} ×" for times, n in zip(plan.times, plan.lengths, strict=True)}
    by_length, by_position, training = [], [], {}
    drawn_as = looks(plan)
    for row in rows:
        name, losses, curve = row["encoding"], row["by_position"], row["curve"]
        label, own, band = ENCODINGS[name].label, drawn_as[name], (row["low"], row["high"])
        by_length.append(Line(label, plan.lengths, row["score"], *own, band))
        middles = [(i + 0.5) * plan.longest / len(losses) for i in range(len(losses))]
        by_position.append(Line(label, middles, losses, *own))
        # Encodings that share a training share a line. The first fall is the same for all, and
        # would hide the rest.
        first = len(curve["step"]) // 10
        settled = curve["step"][first:], curve["loss"][first:]
        trained = trained_as(row)
        own = drawn_as.get(trained, own)
        training[trained] = Line(ENCODINGS[trained].label, *settled, *own)
    nats = partial(Chart, y="nats per symbol")
    lines = list(training.values())
    at_length: dict[str, Any] = {"lines": by_length, "log": "x", "shaded": past, "ticks": names}
    if task != "text":
        title = f"Accuracy in {TASKS[task].label}, by length of the sequence"
        return {
            "by_length": Chart(title, "symbols", TASKS[task].measure, **at_length),
            "training": nats("Loss while training", "step", lines=lines),
        }
    title = "Loss of the last symbols, by length of the sequence"
    at_position = f"Loss at each position of {plan.longest} symbols"
    return {
        "by_length": nats(title, "symbols", **at_length),
        "by_position": nats(at_position, "position", lines=by_position, shaded=past),
        "training": nats("Loss while training", "step", lines=lines),
    }


def needs_board(summary: dict[str, Rows]) -> bool:
    """Whether charts alone would not show who is better: several tasks, or many lines."""
    return len(summary) > 1 or any(len(rows) > _MOST_LINES for rows in summary.values())


def board(plan: Plan, summary: dict[str, Rows]) -> Figure:
    """Every score, coloured by its rank; the encoding with the best mean rank is first."""
    columns = [(task, at) for task in summary for at in range(len(plan.times))]
    found = {task: {row["encoding"]: row for row in rows} for task, rows in summary.items()}
    shared = [name for name in plan.encodings if all(name in rows for rows in found.values())]
    ranks = {name: [found[task][name]["rank"][at] for task, at in columns] for name in shared}
    shared.sort(key=lambda name: statistics.fmean(ranks[name]))
    title = f"Trained on {plan.train_length} symbols: scores, coloured by rank at each length"
    drawn = figure(3.2 + 0.85 * len(columns), 1.7 + 0.27 * len(shared), title)
    ax = drawn.subplots()
    ax.imshow([ranks[name] for name in shared], aspect="auto", cmap="cividis_r")
    for row, name in enumerate(shared):
        for column, (task, at) in enumerate(columns):
            score = found[task][name]["score"][at]
            dark = ranks[name][column] > len(shared) / 2
            look: dict[str, Any] = {"color": "white" if dark else INK, "fontsize": 8}
            text = f"{score:.2f}" if TASKS[task].lower_is_better else f"{score:.0%}"
            ax.text(column, row, text, ha="center", va="center", **look)
    for edge in range(len(plan.times), len(columns), len(plan.times)):
        ax.axvline(edge - 0.5, color="white", lw=4)
    for start, task in enumerate(summary):
        middle = (start + 0.5) * len(plan.times) - 0.5
        words = f"{TASKS[task].label}\n{TASKS[task].measure}\n"
        ax.annotate(
            words,
            (middle, -0.5),
            (0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=INK,
        )
    labels = [f"{plan.times[at]} ×" for _, at in columns]
    ax.set_xticks(range(len(columns)), labels, fontsize=8, color=INK)
    afterwards = {name: " *" if ENCODINGS[name].trained_as else "" for name in shared}
    names = [f"{ENCODINGS[name].label}{afterwards[name]}" for name in shared]
    ax.set_yticks(range(len(shared)), names, fontsize=8, color=INK)
    ax.tick_params(length=0, labeltop=True, labelbottom=False)
    ax.spines[:].set_visible(False)
    if any(afterwards.values()):
        ax.set_xlabel("* applied to a trained model", fontsize=8, color=INK, loc="left")
    return drawn


def trained_as(row: dict[str, Any]) -> str:
    """The encoding that the model of a row was trained with."""
    return ENCODINGS[row["encoding"]].trained_as or row["encoding"]
