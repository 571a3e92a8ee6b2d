"""Panels: numbers and words, and how they are drawn on axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor

from posenc.lab.pictures.style import FAINT, INK, SERIES, figure, legend, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Line(NamedTuple):
    """One line of a chart; without a colour it takes the next of ``SERIES``."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = ""
    marker: str = ""
    dash: str = "-"
    band: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True, slots=True)
class Heat:
    """A matrix: blue above zero and red below if it has both, else dark for small."""

    title: str
    x: str
    y: str
    table: Tensor

    def draw(self, ax: Axes) -> None:
        """Draw on these axes; infinite values are left empty."""
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


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines, named in a legend."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    # The axis with a log scale: x, y or none.
    log: str = ""
    # An axis (x or y), the value from which the background is shaded, and the label of the shade.
    shaded: tuple[str, float, str] | None = None
    # Whether points are drawn instead of lines between them.
    dots: bool = False
    # Labels of the points of the first line.
    words: Sequence[str] = ()
    # Whether both axes have the same scale.
    square: bool = False
    # Tick labels of the x axis, by value.
    ticks: dict[int, str] | None = None

    def draw(self, ax: Axes, *, named: bool = True) -> None:
        """Draw on these axes, with a legend if lines are to be ``named``."""
        plain(ax, self.title, self.x, self.y)
        if self.log:
            words = {"x": self.x, "y": self.y}[self.log]
            ax.set(**{f"{self.log}scale": "log", f"{self.log}label": f"{words}, log scale"})
        if self.square:
            ax.set_aspect("equal")
        if self.ticks:
            ax.set_xticks(list(self.ticks), list(self.ticks.values()))
            ax.minorticks_off()
        ax.margins(x=0.1 if self.dots or self.ticks else 0, y=0.12)
        for i, (line, usual) in enumerate(zip(self.lines, cycle(SERIES), strict=False)):
            colour = line.colour or usual
            look: dict[str, Any] = {"ms": 4, "ls": "", "marker": "o"}
            if not self.dots:
                # Markers of a long line are apart, and not above those of the others.
                apart = max(1, len(line.x) // 8)
                look = {"ms": 6, "lw": 1.6, "ls": line.dash, "marker": line.marker or None}
                look["markevery"] = (i * apart // len(self.lines), apart)
            ax.plot(line.x, line.y, color=colour, label=line.label, **look)
            if line.band:
                ax.fill_between(line.x, *line.band, color=colour, alpha=0.18, lw=0)
        for x, y, word in zip(self.lines[0].x, self.lines[0].y, self.words, strict=False):
            ax.annotate(word, (x, y), (-8, 7), textcoords="offset points", fontsize=8, color=INK)
        if self.shaded is not None:
            self._shade(ax, *self.shaded)
        if named:
            legend(ax)

    def _shade(self, ax: Axes, axis: str, place: float, words: str) -> None:
        limits = ax.get_xlim() if axis == "x" else ax.get_ylim()
        # The end of a log scale is rounded, and may be past the last point by that.
        if any(value > place for line in self.lines for value in getattr(line, axis)):
            span = ax.axvspan if axis == "x" else ax.axhspan
            span(place, limits[1], color=FAINT, alpha=0.45, lw=0)
            ax.set(**{f"{axis}lim": limits})
            look: dict[str, Any] = {
                "transform": ax.transAxes,
                "va": "top",
                "fontsize": 8,
                "color": INK,
            }
            ax.text(0.02, 0.97, f"shaded: {words}", **look)


Panel: TypeAlias = Heat | Chart


class View(NamedTuple):
    """One encoding: a title, four panels with the most important first, and numbers for JSON."""

    title: str
    panels: tuple[Panel, ...]
    numbers: dict[str, Any]


def line(label: str, x: Tensor, y: Tensor) -> Line:
    """A line through tensors."""
    return Line(label, x.tolist(), y.tolist())


def sheet(
    panels: Sequence[Panel], width: float, height: float, *, columns: int = 1, title: str = ""
) -> Figure:
    """Panels in rows of ``columns``, on a figure of this size in inches."""
    drawn = figure(width, height, title)
    axes = drawn.subplots(len(panels) // columns, columns, squeeze=False)
    for ax, panel in zip(axes.flat, panels, strict=True):
        panel.draw(ax)
    return drawn
