"""Charts of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from posenc.lab.pictures.style import COLOURS, FAINT, End, figure, label_ends, note, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def overview(results: dict[str, Any]) -> Figure:
    """All three charts on one sheet."""
    plan = results["plan"]
    title = (
        f"Trained on {plan['train_length']} symbols of {results['text']['name']}, "
        f"tested on up to {plan['train_length'] * max(plan['times'])}"
    )
    drawn = figure(13, 7.2, title)
    axes = drawn.subplot_mosaic([["length", "position"], ["length", "training"]])
    by_length(axes["length"], results)
    by_position(axes["position"], results)
    training(axes["training"], results)
    return drawn


def by_length(ax: Axes, results: dict[str, Any]) -> None:
    """Loss against the length of the sequence, in training lengths."""
    plan, rows = results["plan"], results["summary"]
    lengths = [plan["train_length"] * times for times in plan["times"]]
    plain(ax, "Loss of the last symbols, by length of the sequence", "symbols", "nats per symbol")
    ax.set_xscale("log", base=2)
    ends = []
    for row in rows:
        colour, marker = COLOURS[row["encoding"]]
        ax.fill_between(lengths, row["low"], row["high"], color=colour, alpha=0.18, lw=0)
        ax.plot(lengths, row["tail"], color=colour, marker=marker, ms=6, lw=2)
        ends.append(End(row["tail"][-1], row["label"], colour))
    names = [f"{n}\n{t} ×" for n, t in zip(lengths, plan["times"], strict=True)]
    ax.set_xticks(lengths, names)
    ax.minorticks_off()
    _past(ax, plan["train_length"], lengths[-1])
    label_ends(ax, ends)


def by_position(ax: Axes, results: dict[str, Any]) -> None:
    """Loss at each position of the longest sequence."""
    plan = results["plan"]
    longest = plan["train_length"] * max(*plan["times"], 1)
    plain(ax, f"Loss at each position of {longest} symbols", "position", "nats per symbol")
    ends = []
    for row in results["summary"]:
        losses = row["by_position"]
        size = longest / len(losses)
        middles = [(i + 0.5) * size for i in range(len(losses))]
        colour, _ = COLOURS[row["encoding"]]
        ax.plot(middles, losses, color=colour, lw=1.6)
        ends.append(End(sum(losses[-4:]) / len(losses[-4:]), row["label"], colour))
    ax.set_xlim(0, longest)
    _past(ax, plan["train_length"], longest)
    label_ends(ax, ends)


def training(ax: Axes, results: dict[str, Any]) -> None:
    """Loss while training; encodings that share a training share a line."""
    plain(ax, "While training", "step", "nats per symbol")
    ends, drawn = [], set()
    for row in results["summary"]:
        steps, losses = row["curve"]["step"], row["curve"]["loss"]
        if tuple(losses) in drawn:
            continue
        drawn.add(tuple(losses))
        colour, _ = COLOURS[row["encoding"]]
        ax.plot(steps, losses, color=colour, lw=1.6)
        ends.append(End(losses[-1], row["label"].split(" + ")[0], colour))
    ax.set_xlim(left=0)
    _zoom(ax, [row["curve"]["loss"] for row in results["summary"]])
    label_ends(ax, ends)


def _past(ax: Axes, trained: int, longest: int) -> None:
    if longest <= trained:
        return
    low, high = ax.get_xlim()
    ax.axvspan(trained, high, color=FAINT, alpha=0.35, lw=0, zorder=0)
    ax.set_xlim(low, high)
    top = {"xycoords": ("data", "axes fraction"), "va": "top"}
    note(ax, "past the training length", (trained, 1), (5, -4), **top)
    # Room for the words, above the lines.
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.06 * (high - low))


def _zoom(ax: Axes, curves: Sequence[Sequence[float]]) -> None:
    """Leave out the first fall, which is the same for all and hides the rest."""
    settled = [loss for curve in curves for loss in curve[max(1, len(curve) // 10) :]]
    if settled:
        low, high = min(settled), max(settled)
        room = max(high - low, 0.1)
        ax.set_ylim(low - 0.05 * room, high + 0.15 * room)
