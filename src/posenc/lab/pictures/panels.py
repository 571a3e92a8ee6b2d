"""Panels: numbers and words computed once, drawn on axes for a file or in characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from posenc.lab.pictures.characters import Line, characters, chart
from posenc.lab.pictures.style import FAINT, INK, SERIES, End, label_ends, note, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Heat:
    """A matrix: blue above zero and red below if it has both, else dark for small."""

    title: str
    x: str
    y: str
    table: Tensor

    def draw(self, ax: Axes) -> None:
        """Draw on these axes; what is infinite is left empty."""
        plain(ax, self.title, self.x, self.y)
        ax.grid(visible=False)
        ax.locator_params(integer=True)
        table = self.table.masked_fill(self.table.isinf(), math.nan)
        finite = table[table.isfinite()]
        colours: dict[str, Any] = {"cmap": "cividis"}
        if finite.min() < 0 < finite.max():
            most = float(finite.abs().max())
            colours = {"cmap": "RdBu", "vmin": -most, "vmax": most}
        shown = ax.imshow(table.numpy(), aspect="auto", interpolation="nearest", **colours)
        bar = ax.figure.colorbar(shown, ax=ax, pad=0.015, fraction=0.05)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=7.5, colors=INK, length=2)

    def text(self, columns: int) -> str:
        """The same in characters."""
        words = f"{self.title}, {self.y} down, {self.x} across:"
        return f"{words}\n{characters(self.table, columns=columns)}"


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines, at most four, each with its label at its end if there are several.

    Attributes:
        log_x: Whether equal steps across are equal ratios; ``log_y``, upwards.
        above: A height above which the background is shaded, and what that means.
        right: The same for what is drawn across.
        points: A word for each point of the only line, which then has dots.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    above: tuple[float, str] | None = None
    right: tuple[float, str] | None = None
    points: Sequence[str] = ()

    def draw(self, ax: Axes) -> None:
        """Draw on these axes."""
        plain(
            ax, self.title, self.x + ", log scale" * self.log_x, self.y + ", log scale" * self.log_y
        )
        ax.set(xscale="log" if self.log_x else "linear", yscale="log" if self.log_y else "linear")
        ax.margins(x=0.08 if self.points else 0, y=0.12)
        farthest, ends = max(line.x[-1] for line in self.lines), []
        for line, colour in zip(self.lines, SERIES, strict=False):
            ax.plot(line.x, line.y, color=colour, lw=1.6, marker="o" if self.points else "")
            if line.x[-1] == farthest:
                ends.append(End(line.y[-1], line.label, colour))
            else:
                note(ax, line.label, (line.x[-1], line.y[-1]), (4, 2), color=colour)
            for x, y, word in zip(line.x, line.y, self.points, strict=False):
                note(ax, word, (x, y), (-8, 7))
        if self.above is not None:
            height, words = self.above
            ax.axhline(height, color=INK, lw=1, ls=(0, (4, 3)))
            low, high = ax.get_ylim()
            ax.axhspan(height, high, color=FAINT, alpha=0.45, lw=0)
            ax.set_ylim(low, high)
            ax.text(0.02, 0.97, words, transform=ax.transAxes, va="top", fontsize=8, color=INK)
        if self.right is not None and self.right[0] < farthest:
            ax.axvspan(self.right[0], farthest, color=FAINT, alpha=0.45, lw=0)
            top = {"xycoords": ("data", "axes fraction"), "ha": "right", "va": "top"}
            note(ax, self.right[1], (self.right[0], 1), (-4, -2), **top)
        if len(self.lines) > 1:
            label_ends(ax, ends)

    def text(self, columns: int) -> str:
        """The same in characters."""
        drawn = chart(
            self.lines, columns=columns, log_x=self.log_x, log_y=self.log_y, mark=self.above
        )
        words = ", log scale across" * self.log_x + ", log scale" * self.log_y
        return f"{self.title}{words}:\n{drawn}"


@dataclass(frozen=True, slots=True)
class Circles:
    """Where up to three pairs point at the first positions, each on a circle of its own."""

    title: str
    rates: dict[int, float]
    positions: int

    @classmethod
    def of(cls, rates: Tensor, positions: int) -> Circles:
        """The first pair, a slower one and a slow one."""
        shown = {i: float(rates[i]) for i in (0, len(rates) // 8, len(rates) // 4)}
        count = ("One pair", "Two pairs", "Three pairs")[len(shown) - 1]
        return cls(f"{count} at positions 0 to {positions - 1}", shown, positions)

    def draw(self, ax: Axes) -> None:
        """Draw on these axes."""
        plain(ax, self.title, "", "")
        ax.grid(visible=False)
        for spine in ax.spines.values():
            spine.set_visible(False)
        ax.set(aspect="equal", xticks=[], yticks=[], xlim=(-1.12, 1.7), ylim=(-1.12, 1.12))
        ax.plot((0, 1), (0, 0), color=INK, lw=0.6)
        circle = torch.linspace(0, math.tau, 200)
        for i, (pair, rate) in enumerate(self.rates.items()):
            radius, angle = 1 - 0.28 * i, torch.arange(self.positions) * rate
            ax.plot(radius * circle.cos(), radius * circle.sin(), color=FAINT, lw=0.8)
            ax.plot(radius * angle.cos(), radius * angle.sin(), "o", color=SERIES[i], ms=3.5)
            words = f"pair {pair}\n{math.tau / rate:.3g} positions a turn"
            ax.text(1.15, 0.75 - 0.45 * i, words, fontsize=8, color=SERIES[i], va="center")

    def text(self, columns: int) -> str:
        """Nothing: circles of characters would not be round."""
        return ""


Panel: TypeAlias = Heat | Chart | Circles
