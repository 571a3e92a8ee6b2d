"""The results of a comparison as charts, as a page that opens offline, and as a sentence."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, TypeAlias

from posenc.lab.comparison.plan import ENCODINGS, LOOKS, Plan
from posenc.lab.pictures import biases, show
from posenc.lab.pictures.panels import Chart, Line, sheet
from posenc.lab.pictures.style import figure, in_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows: TypeAlias = Sequence[dict[str, Any]]

# Labels that read differently inside a sentence.
_SPOKEN = {"none": "no encoding"} | {n: f"{n} positions" for n in ("sinusoidal", "learned")}


def overview(plan: Plan, results: dict[str, Any]) -> Figure:
    """All three charts on one sheet."""
    title = f"Trained on {plan.train_length} symbols of {results['text']['name']}"
    drawn = figure(13, 7.2, f"{title}, tested on up to {plan.longest}")
    axes = drawn.subplot_mosaic([["by_length", "by_position"], ["by_length", "training"]])
    for name, chart in charts(plan, results["summary"]).items():
        chart.draw(axes[name])
    return drawn


def charts(plan: Plan, rows: Rows) -> dict[str, Chart]:
    """Loss by length of the sequence, by position of the longest one, and while training."""
    past = ("x", plan.train_length, "longer than in training")
    names = {n: f"{n}\n{times} ×" for times, n in zip(plan.times, plan.lengths, strict=True)}
    by_length, by_position, training = [], [], {}
    for row in rows:
        name, losses, curve = row["encoding"], row["by_position"], row["curve"]
        marked = {"marker": LOOKS[name][1], "band": (row["low"], row["high"])}
        by_length.append(_line(name, plan.lengths, row["tail"], **marked))
        middles = [(i + 0.5) * plan.longest / len(losses) for i in range(len(losses))]
        by_position.append(_line(name, middles, losses))
        # Encodings that share a training share a line. The first fall is the same for all, and
        # would hide the rest.
        first = len(curve["step"]) // 10
        settled = curve["step"][first:], curve["loss"][first:]
        training[_trained_as(row)] = _line(_trained_as(row), *settled)
    nats = partial(Chart, y="nats per symbol")
    at_length = "Loss of the last symbols, by length of the sequence"
    at_position = f"Loss at each position of {plan.longest} symbols"
    return {
        "by_length": nats(at_length, "symbols", lines=by_length, log="x", shaded=past, ticks=names),
        "by_position": nats(at_position, "position", lines=by_position, shaded=past),
        "training": nats("While training", "step", lines=[*training.values()]),
    }


def _line(name: str, x: Sequence[float], y: Sequence[float], **look: Any) -> Line:
    return Line(ENCODINGS[name].label, x, y, LOOKS[name][0], **look)


def _trained_as(row: dict[str, Any]) -> str:
    return ENCODINGS[row["encoding"]].trained_as or row["encoding"]


def page(plan: Plan, results: dict[str, Any]) -> str:
    """The template ``page.html``, filled in; one encoding at least must be finished."""
    rows, text, head_dim = results["summary"], results["text"], plan.width // plan.heads
    words = {
        **results,
        **results["plan"],
        **results["machine"],
        **text,
        "train": f"{text['train']:,}",
        "held": f"{text['held']:,}",
        "longest": plan.longest,
        "bands": f"Means of {plan.seeds} seeds; bands are their range." if plan.seeds > 1 else "",
        "unfinished": "" if results["complete"] else "Not finished: these are the results so far.",
        "base": f"{plan.base:g}",
        "slowest": f"{math.tau * plan.base ** ((head_dim - 2) / head_dim):.0f}",
    }
    lengths = zip(plan.times, plan.lengths, strict=True)
    parts = {
        **{
            name: in_page(sheet([chart], 4.9, 3.6), f"{chart.title}: the numbers are in the tables")
            for name, chart in charts(plan, rows).items()
        },
        "lengths": "".join(f"<th>{times} × ({length})</th>" for times, length in lengths),
        "losses": "\n".join(map(_losses, rows)),
        "past": "\n".join(f"<dt>{_name(r)}</dt><dd>{html.escape(r['past'])}</dd>" for r in rows),
        "looks": "\n".join(_looks(plan, rows)),
        "costs": "\n".join(map(_costs, rows)),
    }
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute({k: html.escape(str(v)) for k, v in words.items()}, **parts)


def _looks(plan: Plan, rows: Rows) -> Iterator[str]:
    """The first picture of `posenc show` for each encoding, for the sizes of this model."""
    length, longest, base = plan.train_length, plan.longest, plan.base
    views = {
        "sinusoidal": show.sinusoidal(dim=plan.width, length=longest, trained=length, base=base),
        "learned": show.learned(dim=plan.width, length=longest),
        "rope": show.rope(dim=plan.width // plan.heads, length=longest, trained=length, base=base),
        "alibi": show.alibi(heads=plan.heads, length=longest),
    }
    trained = dict.fromkeys(map(_trained_as, rows))
    for name in biases.VIEWS.keys() & trained:
        sizes = {"heads": plan.heads, "length": longest, "trained": length}
        views[name] = biases.VIEWS[name](**sizes)
    for view in (views[name] for name in trained if name in views):
        picture = in_page(sheet(view.panels[:1], 4.6, 3.1), view.title)
        yield f"<figure>{picture}<figcaption>{view.title}</figcaption></figure>"


def _losses(row: dict[str, Any]) -> str:
    first, *later = zip(row["tail"], row["rise"], strict=True)
    cells = [f"{loss:.3f} <small>{rise:+.2f}</small>" for loss, rise in later]
    return _table_row(row, f"{first[0]:.3f}", *cells)


def _costs(row: dict[str, Any]) -> str:
    cost = row["cost"]
    speeds = f"{cost['train_tokens_per_second']:,.0f}", f"{cost['test_tokens_per_second']:,.0f}"
    memory = f"{cost['train_bytes'] / 1e6:.1f}", f"{cost['test_bytes'] / 1e6:.2f}"
    return _table_row(row, f"{row['parameters']:,}", *speeds, *memory)


def _table_row(row: dict[str, Any], *cells: str) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in (_name(row), *cells))}</tr>"


def _name(row: dict[str, Any]) -> str:
    colour, _ = LOOKS[row["encoding"]]
    return f'<span class="dot" style="background:{colour}"></span>{html.escape(row["label"])}'


def sentence(plan: Plan, rows: Rows) -> str:
    """The best and the worst past the training length; empty if there is nothing to compare."""
    if len(rows) < 2 or len(plan.times) < 2:
        return ""

    def say(row: dict[str, Any]) -> str:
        name = _SPOKEN.get(row["encoding"], row["label"])
        return f"{name} ({row['tail'][0]:.2f} → {row['tail'][-1]:.2f})"

    best, *_, worst = map(say, sorted(rows, key=lambda row: row["rise"][-1]))
    return (
        f"From {plan.lengths[0]} to {plan.lengths[-1]} symbols, a transformer trained on "
        f"{plan.train_length} kept its loss best with {best} and worst with {worst}."
    )
