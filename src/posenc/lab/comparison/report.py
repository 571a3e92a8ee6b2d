"""The results of a comparison as a page that opens offline, as figures, and as cells of tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from posenc.lab.comparison.encodings import find, trained_with
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.tasks import TASKS, Game
from posenc.lab.panels import INK, Chart, Line, figure, in_page, legend_of_figure, look, sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# For each task, the rows of :func:`posenc.lab.comparison.run.summarize`.
Summary: TypeAlias = dict[str, list[dict[str, Any]]]
# More lines than this are hard to tell apart in a chart, and names in a row of a page's.
_MOST_LINES, _COLUMNS = 12, 3


def page(plan: Plan, results: dict[str, Any]) -> str:
    """The template ``page.html``, filled in; one encoding at least must be finished.

    Jinja escapes every word and number: the name of a text may hold any character.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    done = _finished(results)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    tasks = [
        {
            "about": TASKS[task],
            "guess": guess(plan, results, task),
            "charts": _pictures(_charts(plan, task, rows)),
            "rows": sorted(rows, key=lambda row: row["rank"][-1]),
        }
        for task, rows in done.items()
    ]
    cost_heads, cost_rows = cost_table(results["costs"])
    board = _board(plan, done) if _needs_board(done) else None
    return environment.get_template("page.html").render(
        plan=plan,
        results=results,
        machine=results["machine"],
        slowest=round(math.tau * plan.base ** ((plan.head_dim - 2) / plan.head_dim)),
        board=board and in_page(board),
        # Its smallest words can be read at three quarters of its size.
        board_width=board and round(0.75 * 96 * board.get_figwidth()),
        tasks=tasks,
        # The same encodings in every task, up to those that are not finished.
        rows=max(done.values(), key=len),
        scores=scores,
        cost_heads=cost_heads,
        cost_rows=cost_rows,
    )


def overview(plan: Plan, results: dict[str, Any]) -> Figure:
    """The charts of one task, or the board of several tasks or many encodings."""
    done = _finished(results)
    if _needs_board(done):
        return _board(plan, done)
    ((task, rows),) = done.items()
    what = results["text"]["name"] if task == "text" else TASKS[task].label
    title = f"Trained on {plan.train_length} symbols of {what}, tested on up to {plan.longest}"
    drawn, charts = figure(13, 7.2, title), _charts(plan, task, rows)
    # The first chart has a column, and the others share one.
    axes = drawn.subplot_mosaic([[0, at] for at in range(1, len(charts))])
    for at, chart in enumerate(charts):
        chart.draw(axes[at], names=0)
    # The first chart has a line for each encoding.
    legend_of_figure(axes[0])
    return drawn


def scores(row: dict[str, Any]) -> list[str]:
    """Mean and half the range of the seeds at each length, and the rank of the mean, as text.

    One seed has no range, and so no rank that could be told from chance.
    """
    found = zip(row["score"], row["low"], row["high"], row["rank"], strict=True)
    if len(row["seeds"]) == 1:
        return [f"{score:.3f}" for score, *_ in found]
    return [f"{score:.3f} ± {(high - low) / 2:.3f} #{rank}" for score, low, high, rank in found]


def guess(plan: Plan, results: dict[str, Any], task: str) -> str:
    """What the measure of a task is, and what a model scores that only guesses."""
    if task == "text":
        symbols = results["text"]["symbols"]
        evenly = f"ln {symbols} = {math.log(symbols):.2f} nats"
        return (
            "A loss of x nats is a probability of e^-x for the right symbol, in the geometric "
            f"mean. Guessing among all {symbols} symbols costs {evenly}."
        )
    size = Game(plan).size
    return (
        f"Guessing among the {size} letters of the string is right in {1 / size:.1%} of the "
        f"answers, and among all {2 * size} letters in {0.5 / size:.1%}."
    )


def costs(cost: dict[str, Any]) -> list[str]:
    """Parameters, time and memory of a step, time and memory of reading, as text."""
    step = f"{cost['step']:.2f}" if cost["step"] else "as trained"
    step_bytes, read_bytes = (
        "" if cost[name] is None else f"{cost[name] / 1e6:.2f}"
        for name in ("step_bytes", "read_bytes")
    )
    return [f"{cost['parameters']:,}", step, step_bytes, f"{cost['read']:.2f}", read_bytes]


COSTS = ("parameters", "step, ×", "step, MB", "reading, ×", "reading, MB")


def cost_table(found: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """The heads that have a number, and the cells of each encoding: memory is counted on CUDA."""
    rows = {name: costs(cost) for name, cost in found.items()}
    shown = [i for i in range(len(COSTS)) if any(cells[i] for cells in rows.values())]
    heads = tuple(COSTS[i] for i in shown)
    return heads, {name: tuple(cells[i] for i in shown) for name, cells in rows.items()}


def _finished(results: dict[str, Any]) -> Summary:
    return {task: rows for task, rows in results["summary"].items() if rows}


def _needs_board(summary: Summary) -> bool:
    """Whether charts would not show which is better: several tasks, or many lines."""
    return len(summary) > 1 or any(len(rows) > _MOST_LINES for rows in summary.values())


def _charts(plan: Plan, task: str, rows: Sequence[dict[str, Any]]) -> list[Chart]:
    """Score by length of the sequence, loss while training, and for a text also by position."""
    looks = {name: look(i) for i, name in enumerate(dict.fromkeys(plan.encodings))}
    by_length, by_position, training = [], [], {}
    for row in rows:
        name, losses, curve = row["encoding"], row["by_position"], row["curve"]
        label, band = find(name).label, (row["low"], row["high"])
        by_length.append(Line(label, plan.lengths, row["score"], *looks[name], band))
        middles = [(i + 0.5) * plan.longest / len(losses) for i in range(len(losses))]
        by_position.append(Line(label, middles, losses, *looks[name]))
        # Encodings that share a training share a line. The first fall is the same for all, and
        # would hide the rest.
        first, trained = len(curve["step"]) // 10, trained_with(name)
        shown = curve["step"][first:], curve["loss"][first:], *looks.get(trained, looks[name])
        training[trained] = Line(find(trained).label, *shown)
    past = ("x", plan.train_length, "longer than in training")
    names = {n: f"{n}\n{times} ×" for times, n in zip(plan.times, plan.lengths, strict=True)}
    measure, nats = TASKS[task].measure, "nats per symbol"
    is_fitted = any(trained_with(row["encoding"]) != row["encoding"] for row in rows)
    title_of = "Loss of the last symbols" if task == "text" else measure.capitalize()
    by_length_title = f"{title_of} by length{', rules fitted to it' * is_fitted}"
    charts = [
        Chart(by_length_title, "symbols", measure, by_length, log="x", shaded=past, ticks=names),
        Chart("Loss while training", "step", nats, list(training.values())),
    ]
    if task == "text":
        fitted = f", rules fitted to {plan.longest}" * is_fitted
        at_position = f"Loss at each position of {plan.longest} symbols{fitted}"
        charts.insert(1, Chart(at_position, "position", nats, by_position, shaded=past))
    return charts


def _pictures(charts: Sequence[Chart]) -> list[tuple[str, str]]:
    """The title of each chart, and a picture that a phone shows at its full size.

    The first names the encodings of all.
    """
    longest = max(len(line.label) for line in charts[0].lines)
    columns = _COLUMNS if longest <= 20 else _COLUMNS - 1
    first, *others = (replace(chart, title="", columns=columns) for chart in charts)
    drawn = [sheet([first], 4.8, 3.3 + 0.18 * first.names)]
    for chart in others:
        drawn.append(figure(4.8, 3.3))
        chart.draw(drawn[-1].subplots(), names=0)
    return [(c.title, in_page(each)) for c, each in zip(charts, drawn, strict=True)]


def _board(plan: Plan, summary: Summary) -> Figure:
    """Every score, coloured by its rank; the encoding with the best mean rank is first."""
    columns = [(task, at) for task in summary for at in range(len(plan.times))]
    by_name = {task: {row["encoding"]: row for row in rows} for task, rows in summary.items()}
    shared = [name for name in plan.encodings if all(name in rows for rows in by_name.values())]
    ranks = {name: [by_name[task][name]["rank"][at] for task, at in columns] for name in shared}
    shared.sort(key=lambda name: statistics.fmean(ranks[name]))
    one = "; one seed: near ones may be chance" if plan.seeds == 1 else ""
    title = f"Trained on {plan.train_length} symbols: scores, coloured by rank at each length{one}"
    drawn = figure(3.2 + 0.85 * len(columns), 1.7 + 0.27 * len(shared), title)
    ax = drawn.subplots()
    ax.imshow([ranks[name] for name in shared], aspect="auto", cmap="cividis_r")
    for row, name in enumerate(shared):
        for column, (task, at) in enumerate(columns):
            score = by_name[task][name]["score"][at]
            dark = ranks[name][column] > len(shared) / 2
            text = f"{score:.2f}" if TASKS[task].lower_is_better else f"{score:.0%}"
            ink = "white" if dark else INK
            ax.text(column, row, text, ha="center", va="center", color=ink, fontsize=8)
    for edge in range(len(plan.times), len(columns), len(plan.times)):
        ax.axvline(edge - 0.5, color="white", lw=4)
    for start, task in enumerate(summary):
        middle = (start + 0.5) * len(plan.times) - 0.5
        words = f"{TASKS[task].label}\n{TASKS[task].measure}\n"
        look: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 9}
        ax.annotate(words, (middle, -0.5), (0, 8), color=INK, **look)
    labels = [f"{plan.times[at]} ×" for _, at in columns]
    ax.set_xticks(range(len(columns)), labels, fontsize=8, color=INK)
    afterwards = {name: " *" if find(name).trained_as else "" for name in shared}
    names = [f"{find(name).label}{afterwards[name]}" for name in shared]
    ax.set_yticks(range(len(shared)), names, fontsize=8, color=INK)
    ax.tick_params(length=0, labeltop=True, labelbottom=False)
    ax.spines[:].set_visible(False)
    if any(afterwards.values()):
        ax.set_xlabel("* applied to a trained model", fontsize=8, color=INK, loc="left")
    return drawn
