"""The results of a comparison as a page that opens offline, and as sentences."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from posenc.lab.comparison.charts import Rows, board, charts, needs_board, trained_as
from posenc.lab.comparison.encodings import LOOKS
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.tasks import TASKS
from posenc.lab.pictures import biases, show
from posenc.lab.pictures.panels import Chart, sheet
from posenc.lab.pictures.style import in_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Labels that read differently inside a sentence.
_SPOKEN = {"none": "no encoding"} | {n: f"{n} positions" for n in ("sinusoidal", "learned")}


def page(plan: Plan, results: dict[str, Any]) -> str:
    """The template ``page.html``, filled in; one encoding at least must be finished."""
    done = {task: rows for task, rows in results["summary"].items() if rows}
    # The same encodings in every task, up to those that are not finished.
    rows = max(done.values(), key=len)
    words = {
        **results,
        **results["plan"],
        **results["machine"],
        "longest": plan.longest,
        "bands": "Numbers are means of the seeds, ± half their range, which the bands show. "
        "Bold: the range reaches that of the best." * (plan.seeds > 1),
        "unfinished": "" if results["complete"] else "Not finished: these are the results so far.",
        "base": f"{plan.base:g}",
        "slowest": f"{math.tau * plan.base ** ((plan.head_dim - 2) / plan.head_dim):.0f}",
        "where": results["machine"]["gpu" if plan.device == "cuda" else "cpu"],
        "source": _source(results["text"]),
    }
    parts = {
        "tasks": "\n".join(_sections(plan, done)),
        "past": "\n".join(f"<dt>{_name(r)}</dt><dd>{html.escape(r['past'])}</dd>" for r in rows),
        "looks": "\n".join(_looks(plan, rows)),
        "costs": "\n".join(_cost(row, results["costs"][row["encoding"]]) for row in rows),
    }
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute({k: html.escape(str(v)) for k, v in words.items()}, **parts)


def _source(text: dict[str, Any] | None) -> str:
    if text is None:
        return ""
    sizes = f"{text['train']:,} symbols to learn from and {text['held']:,} to test on"
    return f"Text: {text['name']}, {sizes}, SHA-256 {text['sha256']}."


def _sections(plan: Plan, summary: dict[str, Rows]) -> Iterator[str]:
    """Charts and a table for each task; before them the board, if it is needed."""
    if needs_board(summary):
        drawn = in_page(board(plan, summary), "Scores and ranks: the numbers are in the tables")
        yield f"<figure>{drawn}</figure>"
    for task, rows in summary.items():
        pictures = {
            name: in_page(_tall_enough(chart), f"{chart.title}: the numbers are in the tables")
            for name, chart in charts(plan, task, rows).items()
        }
        first, *others = (f"<figure>{picture}</figure>" for picture in pictures.values())
        about = TASKS[task]
        better = "Lower" if about.lower_is_better else "Higher"
        yield f"<h2>{html.escape(about.label.capitalize())}</h2>"
        yield f"<p>{html.escape(about.about)} {better} is better.</p>"
        yield f'<div class="wide">{first}</div>'
        yield _table(plan, task, rows)
        yield f'<div class="pair">{"".join(others)}</div>'


def _tall_enough(chart: Chart) -> Figure:
    """The chart on a sheet with room for its legend."""
    return sheet([chart], 4.9, max(3.6, 0.9 + 0.19 * len(chart.lines)))


def _table(plan: Plan, task: str, rows: Rows) -> str:
    """Mean, spread and rank of every encoding at every length, the best of the longest first."""
    lengths = zip(plan.times, plan.lengths, strict=True)
    heads = "".join(f"<th>{times} × ({length})</th><th>rank</th>" for times, length in lengths)
    lines = [f"<tr><th>{TASKS[task].measure}</th><th></th>{heads}</tr>"]
    for row in sorted(rows, key=lambda row: row["rank"][-1]):
        cells = [html.escape(row["how"])]
        for at, score in enumerate(scores(row)):
            value, _, spread = score.partition(" ")
            value = f"<b>{value}</b>" if row["level"][at] else value
            cells += [f"{value} <small>{spread}</small>", str(row["rank"][at])]
        lines.append(_table_row(row, *cells))
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


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


def _cost(row: dict[str, Any], cost: dict[str, Any]) -> str:
    return _table_row(row, html.escape(row["how"]), *costs(cost))


def _looks(plan: Plan, rows: Rows) -> Iterator[str]:
    """The first picture of `posenc show` for each encoding, for the sizes of this model."""
    length, longest, base = plan.train_length, plan.longest, plan.base
    views = {
        "sinusoidal": show.sinusoidal(dim=plan.width, length=longest, trained=length, base=base),
        "learned": show.learned(dim=plan.width, length=longest),
        "rope": show.rope(dim=plan.head_dim, length=longest, trained=length, base=base),
        "alibi": show.alibi(heads=plan.heads, length=longest),
    }
    trained = dict.fromkeys(map(trained_as, rows))
    for name in biases.VIEWS.keys() & trained:
        sizes = {"heads": plan.heads, "length": longest, "trained": length}
        views[name] = biases.VIEWS[name](**sizes)
    for view in (views[name] for name in trained if name in views):
        picture = in_page(sheet(view.panels[:1], 4.6, 3.1), view.title)
        yield f"<figure>{picture}<figcaption>{view.title}</figcaption></figure>"


def _table_row(row: dict[str, Any], *cells: str) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in (_name(row), *cells))}</tr>"


def _name(row: dict[str, Any]) -> str:
    colour, _ = LOOKS[row["encoding"]]
    return f'<span class="dot" style="background:{colour}"></span>{html.escape(row["label"])}'


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
