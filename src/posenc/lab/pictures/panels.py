"""One function for each picture of an encoding, drawn on axes that are given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from posenc import nn
from posenc.lab.pictures.style import FAINT, INK, SERIES, End, label_ends, note, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage


class Rotation(NamedTuple):
    """Rates of a rotary embedding, and the name to call them by.

    Attributes:
        label: Name.
        rates: float64 ``[P]``, radians per position, fastest first.
        gain: What cosines and sines are multiplied with.
    """

    label: str
    rates: Tensor
    gain: float = 1.0


def heat(ax: Axes, table: Tensor, title: str, *, x: str = "channel", y: str = "position") -> None:
    """A table as it is, blue above zero and red below, the middle at zero."""
    plain(ax, title, x, y)
    ax.grid(visible=False)
    ax.locator_params(integer=True)
    most = float(table[table.isfinite()].abs().max())
    shown = ax.imshow(
        table.numpy(), aspect="auto", cmap="RdBu", vmin=-most, vmax=most, interpolation="nearest"
    )
    _scale(ax, shown)


def similarity(ax: Axes, table: Tensor, title: str) -> None:
    """Cosine between the vectors of every two positions."""
    plain(ax, title, "position", "position")
    ax.grid(visible=False)
    unit = table.double() / table.double().norm(dim=-1, keepdim=True)
    shown = ax.imshow((unit @ unit.T).numpy(), cmap="cividis", vmin=-1, vmax=1, aspect="auto")
    _scale(ax, shown)


def wavelengths(ax: Axes, rotations: Sequence[Rotation], trained: int) -> None:
    """Positions for a full turn of each pair, and which are longer than the trained context."""
    plain(ax, "Positions for a full turn", "pair", "positions, log scale")
    ends = []
    top = trained
    for rotation, colour in zip(rotations, SERIES, strict=False):
        moving = rotation.rates > 0
        turn = math.tau / rotation.rates[moving]
        ax.semilogy(moving.nonzero().flatten().numpy(), turn.numpy(), color=colour, lw=2)
        ends.append(End(float(turn[-1]), rotation.label, colour))
        top = max(top, int(turn.max()))
    ax.axhspan(trained, 4 * top, color=FAINT, alpha=0.45, lw=0)
    ax.axhline(trained, color=INK, lw=1, ls=(0, (4, 3)))
    ax.set_ylim(2, 3 * top)
    words = f"never a full turn in\nthe trained context, {trained}"
    ax.text(0.02, 0.97, words, transform=ax.transAxes, va="top", fontsize=8, color=INK)
    if len(rotations) > 1:
        label_ends(ax, ends)


def decay(
    ax: Axes,
    rotations: Sequence[Rotation],
    trained: int,
    farthest: int,
    title: str = "Score of equal vectors, q·k / D",
) -> None:
    """Score of equal vectors at each distance."""
    plain(ax, title, "distance, log scale", "")
    ends = []
    for rotation, colour in zip(rotations, SERIES, strict=False):
        distance, score = scores(rotation, farthest)
        ax.semilogx(distance.numpy(), score.numpy(), color=colour, lw=1.4)
        ends.append(End(float(score[-24:].mean()), rotation.label, colour))
    ax.axhline(0, color=INK, lw=0.8)
    if farthest > trained:
        ax.axvspan(trained, farthest, color=FAINT, alpha=0.45, lw=0)
        top = {"xycoords": ("data", "axes fraction"), "ha": "right", "va": "top"}
        note(ax, "trained\ncontext", (trained, 1), (-4, -2), **top)
    ax.set_xlim(1, farthest)
    if len(rotations) > 1:
        label_ends(ax, ends)


def scores(rotation: Rotation, farthest: int) -> tuple[Tensor, Tensor]:
    r"""Distances, evenly spaced in their logarithm, and :math:`g^2 / P \sum_i \cos d\theta_i`."""
    distance = torch.logspace(0, math.log10(farthest), 600, dtype=torch.float64).round().unique()
    return distance, (distance[:, None] * rotation.rates).cos().mean(-1) * rotation.gain**2


def slowdown(ax: Axes, rotations: Sequence[Rotation]) -> None:
    """How many times slower each pair rotates than in the first of ``rotations``."""
    plain(ax, "How many times slower each pair rotates", "pair", "")
    ends = []
    for rotation, colour in zip(rotations, SERIES, strict=False):
        moving = rotation.rates > 0
        times = rotations[0].rates[moving] / rotation.rates[moving]
        pairs = moving.nonzero().flatten()
        ax.plot(pairs.numpy(), times.numpy(), color=colour, lw=2)
        ends.append(End(float(times[-1]), rotation.label, colour))
    ax.set_ylim(bottom=0.8)
    label_ends(ax, ends)


def turns(ax: Axes, rates: Tensor, positions: int = 24) -> None:
    """Where three pairs point at the first positions: quick, slower, slow."""
    shown = sorted({0, len(rates) // 8, len(rates) // 4})
    count = ("One pair", "Two pairs", "Three pairs")[len(shown) - 1]
    plain(ax, f"{count} at positions 0 to {positions - 1}", "", "")
    ax.grid(visible=False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set(aspect="equal", xticks=[], yticks=[], xlim=(-1.12, 1.7), ylim=(-1.12, 1.12))
    ends = []
    for pair, radius, colour in zip(shown, (1.0, 0.72, 0.44), SERIES, strict=False):
        angle = torch.arange(positions, dtype=torch.float64) * rates[pair]
        circle = torch.linspace(0, math.tau, 200, dtype=torch.float64)
        ax.plot(radius * circle.cos(), radius * circle.sin(), color=FAINT, lw=0.8)
        ax.plot(radius * angle.cos(), radius * angle.sin(), "o", color=colour, ms=3.5)
        ax.plot((0, radius), (0, 0), color=INK, lw=0.6)
        ends.append((pair, math.tau / float(rates[pair]), colour))
    for line, (pair, turn, colour) in enumerate(ends):
        text = f"pair {pair}\n{turn:.3g} positions a turn"
        ax.text(1.15, 0.75 - 0.45 * line, text, fontsize=8, color=colour, va="center")


def slopes(ax: Axes, alibi: nn.ALiBi) -> None:
    """The slope of each head."""
    plain(ax, "Slope of each head", "head", "subtracted per position, log scale")
    values = alibi.slopes.numpy()
    heads = range(len(values))
    ax.vlines(heads, values.min() / 1.6, values, color=SERIES[2], lw=1.4, alpha=0.6)
    ax.semilogy(heads, values, "o", color=SERIES[2], ms=6)
    for head, value in enumerate(values if len(values) <= 16 else []):
        whole = abs(1 / value - round(1 / value)) < 1e-6
        label = f"1/{round(1 / value)}" if whole else f"{value:.3g}"
        note(ax, label, (head, value), (-8, 7))
    ax.set_ylim(values.min() / 1.6, values.max() * 1.9)
    ax.set_xticks(list(heads)[:: max(1, len(values) // 16)])


def bias(ax: Axes, alibi: nn.ALiBi, length: int) -> None:
    """What each head subtracts at each distance."""
    plain(ax, "Subtracted from the score", "distance", "")
    ends = []
    rows = alibi.get_bias(length)[:, -1].flip(-1)
    floor = -12.0
    for head in _some(len(rows)):
        line = rows[head]
        seen = line[line >= floor]
        colour = _shade(head, len(rows))
        ax.plot(range(len(seen)), seen.numpy(), color=colour, lw=1.8)
        if len(seen) == len(line):
            ends.append(End(float(line[-1]), f"head {head}", colour))
        else:
            end = (len(seen) - 1, float(seen[-1]))
            note(ax, f"head {head}", end, (4, 2), color=colour)
    ax.set_ylim(floor, 0.4)
    ax.set_xlim(0, length - 1)
    label_ends(ax, ends)


def reach(ax: Axes, alibi: nn.ALiBi, length: int) -> None:
    """What is left of a score's weight at each distance, all scores being equal."""
    plain(ax, "Weight that is left, equal scores", "distance, log scale", "")
    distance = torch.logspace(0, math.log10(length), 300, dtype=torch.float64)
    for head in _some(alibi.num_heads):
        left = (-alibi.slopes[head].double() * distance).exp()
        colour = _shade(head, alibi.num_heads)
        ax.semilogx(distance.numpy(), left.numpy(), color=colour, lw=1.8)
        half = math.log(2) / float(alibi.slopes[head])
        if 1 < half < length:
            note(ax, f"head {head}", (half, 0.5), (3, 2), color=colour)
    ax.set_xlim(1, length)
    ax.set_ylim(0, 1.02)


def bias_heat(ax: Axes, alibi: nn.ALiBi, head: int, length: int) -> None:
    """The bias matrix of one head; what no query sees is left empty."""
    plain(ax, f"Bias of head {head}", "key", "query")
    ax.grid(visible=False)
    table = alibi.get_bias(length)[head]
    table[table.isneginf()] = float("nan")
    _scale(ax, ax.imshow(table.numpy(), cmap="cividis", aspect="auto", interpolation="nearest"))


def _some(heads: int) -> list[int]:
    """Four heads at most, first and last among them."""
    return sorted({round(i * (heads - 1) / 3) for i in range(4)})


def _shade(head: int, heads: int) -> str:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return str(to_hex(colormaps["viridis"](0.78 * head / max(heads - 1, 1))))


def _scale(ax: Axes, shown: AxesImage) -> None:
    bar = ax.figure.colorbar(shown, ax=ax, pad=0.015, fraction=0.05)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7.5, colors=INK, length=2)
