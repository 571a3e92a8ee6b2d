"""What a comparison showed: charts, a page that opens without a network, and a sentence."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, TypeAlias

from posenc.lab.comparison.encodings import ENCODINGS, LOOKS
from posenc.lab.comparison.plan import Plan
from posenc.lab.pictures import show
from posenc.lab.pictures.style import FAINT, End, figure, inline_svg, label_ends, note, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows: TypeAlias = Sequence[dict[str, Any]]
Draw: TypeAlias = Callable[["Axes", Plan, Rows], None]

# Labels that a sentence cannot take as they are.
_SPOKEN = {"none": "no encoding"} | {n: f"{n} positions" for n in ("sinusoidal", "learned")}


def overview(plan: Plan, results: dict[str, Any]) -> Figure:
    """All three charts on one sheet."""
    text, rows = results["text"]["name"], results["summary"]
    title = f"Trained on {plan.train_length} symbols of {text}, tested on up to {plan.longest}"
    drawn = figure(13, 7.2, title)
    axes = drawn.subplot_mosaic([["length", "position"], ["length", "training"]])
    for name, draw in {"length": by_length, "position": by_position, "training": training}.items():
        draw(axes[name], plan, rows)
    return drawn


def by_length(ax: Axes, plan: Plan, rows: Rows) -> None:
    """Loss against the length of the sequence, in training lengths."""
    plain(ax, "Loss of the last symbols, by length of the sequence", "symbols", "nats per symbol")
    ax.set_xscale("log", base=2)
    for row in rows:
        colour, marker = LOOKS[row["encoding"]]
        ax.fill_between(plan.lengths, row["low"], row["high"], color=colour, alpha=0.18, lw=0)
        ax.plot(plan.lengths, row["tail"], color=colour, marker=marker, ms=6, lw=2)
    names = [f"{length}\n{times} ×" for length, times in zip(plan.lengths, plan.times, strict=True)]
    ax.set_xticks(plan.lengths, names)
    ax.minorticks_off()
    _shade_past(ax, plan)
    _label(ax, [(row["encoding"], row["tail"][-1]) for row in rows])


def by_position(ax: Axes, plan: Plan, rows: Rows) -> None:
    """Loss at each position of the longest sequence."""
    plain(ax, f"Loss at each position of {plan.longest} symbols", "position", "nats per symbol")
    for row in rows:
        losses, (colour, _) = row["by_position"], LOOKS[row["encoding"]]
        size = plan.longest / len(losses)
        ax.plot([(i + 0.5) * size for i in range(len(losses))], losses, color=colour, lw=1.6)
    ax.set_xlim(0, plan.longest)
    _shade_past(ax, plan)
    # The last four points together say where a line ends.
    _label(ax, [(row["encoding"], sum(row["by_position"][-4:]) / 4) for row in rows])


def training(ax: Axes, plan: Plan, rows: Rows) -> None:
    """Loss while training; encodings that share a training share a line."""
    plain(ax, "While training", "step", "nats per symbol")
    curves = {_trained_as(row): row["curve"] for row in rows}
    for name, curve in curves.items():
        ax.plot(curve["step"], curve["loss"], color=LOOKS[name][0], lw=1.6)
    ax.set_xlim(left=0)
    # The first fall is the same for all, and would hide the rest.
    settled = [
        loss for curve in curves.values() for loss in curve["loss"][len(curve["loss"]) // 10 :]
    ]
    low, high = min(settled), max(settled)
    room = max(high - low, 0.1)
    ax.set_ylim(low - 0.05 * room, high + 0.15 * room)
    _label(ax, [(name, curve["loss"][-1]) for name, curve in curves.items()])


def _trained_as(row: dict[str, Any]) -> str:
    return ENCODINGS[row["encoding"]].trained_as or row["encoding"]


def _label(ax: Axes, ends: Sequence[tuple[str, float]]) -> None:
    label_ends(ax, [End(y, ENCODINGS[name].label, LOOKS[name][0]) for name, y in ends])


def _shade_past(ax: Axes, plan: Plan) -> None:
    if plan.longest == plan.train_length:
        return
    low, high = ax.get_xlim()
    ax.axvspan(plan.train_length, high, color=FAINT, alpha=0.35, lw=0, zorder=0)
    ax.set_xlim(low, high)
    top = {"xycoords": ("data", "axes fraction"), "va": "top"}
    note(ax, "past the training length", (plan.train_length, 1), (5, -4), **top)
    # Room for the words, above the lines.
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.06 * (high - low))


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
        "unfinished": "" if results["complete"] else "Not finished: this is what was done so far.",
        "base": f"{plan.base:g}",
        "slowest": f"{math.tau * plan.base ** ((head_dim - 2) / head_dim):.0f}",
    }
    lengths = zip(plan.times, plan.lengths, strict=True)
    parts = {
        **{draw.__name__: _chart(draw, plan, rows) for draw in (by_length, by_position, training)},
        "lengths": "".join(f"<th>{times} × ({length})</th>" for times, length in lengths),
        "losses": "\n".join(map(_losses, rows)),
        "past": "\n".join(f"<dt>{_name(r)}</dt><dd>{html.escape(r['past'])}</dd>" for r in rows),
        "looks": "\n".join(_looks(plan, rows)),
        "costs": "\n".join(map(_costs, rows)),
    }
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute({k: html.escape(str(v)) for k, v in words.items()}, **parts)


def _chart(draw: Draw, plan: Plan, rows: Rows) -> str:
    drawn = figure(4.9, 3.6)
    draw(drawn.subplots(), plan, rows)
    title = drawn.axes[0].get_title(loc="left")
    return inline_svg(drawn, draw.__name__, f"Chart: {title}. The numbers are in the tables.")


def _looks(plan: Plan, rows: Rows) -> list[str]:
    """The pictures of `posenc show`, for the sizes of this model."""
    length, longest, base = plan.train_length, plan.longest, plan.base
    views = {
        "sinusoidal": show.sinusoidal(dim=plan.width, length=longest, trained=length, base=base),
        "learned": show.learned(dim=plan.width, length=longest),
        "rope": show.rope(dim=plan.width // plan.heads, length=longest, trained=length, base=base),
        "alibi": show.alibi(heads=plan.heads, length=longest),
    }
    found = []
    for view in (views[name] for name in dict.fromkeys(map(_trained_as, rows)) if name in views):
        picture = inline_svg(show.cover(view), f"look-{view.numbers['encoding']}", view.title)
        found.append(f"<figure>{picture}<figcaption>{view.title}</figcaption></figure>")
    return found


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
    """What was seen past the training length, or nothing where there is nothing to compare."""
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
