"""Panels of a picture: what they show, how they are drawn, and the files of pictures."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, GREY = "#24292f", "#d0d7de", "#8c8c8c"
# Okabe and Ito's colours, which suit colour-blind readers, without their yellow, which is faint on
# white; and five more that are as far from all others as theirs are from each other.
COLOURS = (
    "#000000 #e69f00 #d55e00 #0072b2 #56b4e9 #009e73 #cc79a7 "
    "#5a2d00 #6969ff #78e187 #1e0087 #0000ff"
).split()
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_MARKERS, _DASHES = "os^Dv<>PX*hpd", ("-", "--", ":", "-.")
_DPI = 144
# Points between a title and its axes, and those that a row of names between them takes.
_PAD, _ROW = 8, 14


class Look(NamedTuple):
    """How one line of many is drawn."""

    colour: str
    marker: str
    dash: str


def look(index: int) -> Look:
    """A look for each line of a figure; the first twelve have a colour of their own."""
    dash = _DASHES[index // len(COLOURS) % len(_DASHES)]
    return Look(COLOURS[index % len(COLOURS)], _MARKERS[index % len(_MARKERS)], dash)


def figure(width: float, height: float, title: str = "") -> Figure:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    if title:
        # A title may contain a file name with a dollar sign.
        drawn.suptitle(title, fontsize=14, color=INK, x=0.01, ha="left", parse_math=False)
    return drawn


def plain(ax: Axes, title: str, x: str, y: str, *, names: int = 0) -> None:
    """Set title, labels, ticks and a faint grid; rows of ``names`` fit below the title."""
    pad = _PAD + _ROW * names
    ax.set_title(title, fontsize=11, color=INK, loc="left", pad=pad)
    ax.set_xlabel(x, fontsize=9, color=INK)
    ax.set_ylabel(y, fontsize=9, color=INK)
    ax.tick_params(labelsize=8, colors=INK, length=3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(INK)
    ax.grid(visible=True, color=FAINT, lw=0.6)
    ax.set_axisbelow(True)
    ax.patch.set_alpha(0)


def legend(ax: Axes, *, columns: int) -> None:
    """Name what has a label above the axes, in its colour: there the names hide no line."""
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        borderpad=0,
        handlelength=1.5,
        handletextpad=0.5,
        columnspacing=1,
        fontsize=8,
        **_look_of_names(ax),
    )


def legend_of_figure(ax: Axes) -> None:
    """Name what has a label in these axes right of all axes."""
    handles, labels = ax.get_legend_handles_labels()
    ax.figure.legend(
        handles,
        labels,
        loc="outside right upper",
        handlelength=3,
        fontsize=10,
        **_look_of_names(ax),
    )


def _look_of_names(ax: Axes) -> dict[str, Any]:
    # A line has a colour that letters can be read in, a shade has none.
    handles, _ = ax.get_legend_handles_labels()
    colours: dict[Any, Any] = {each: each.get_color() for each in ax.lines}
    return {"frameon": False, "labelcolor": [colours.get(each, INK) for each in handles]}


def image(picture: Figure, suffix: str) -> bytes:
    """The content of a file with this suffix, the same bytes every time."""
    import matplotlib as mpl

    content = io.BytesIO()
    when = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
    with mpl.rc_context({"svg.hashsalt": "posenc", "svg.fonttype": "none"}):
        picture.savefig(content, format=suffix[1:], dpi=_DPI, metadata=when)
    return content.getvalue()


def save(picture: Figure, path: Path) -> None:
    """Write a picture in the format that the suffix of ``path`` names."""
    path.write_bytes(image(picture, path.suffix))


def in_page(picture: Figure) -> str:
    """An address that holds the picture itself, so that a page needs no other file."""
    picture.patch.set_alpha(0)
    return f"data:image/svg+xml;base64,{base64.b64encode(image(picture, '.svg')).decode()}"


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
    # Whether rows are as high as columns are wide.
    square: bool = False

    names: ClassVar[int] = 0

    def draw(self, ax: Axes, *, names: int = 0) -> None:
        """Draw on these axes; infinite values are left empty."""
        plain(ax, self.title, self.x, self.y, names=names)
        ax.grid(visible=False)
        ax.locator_params(integer=True)
        table = self.table.masked_fill(self.table.isinf(), math.nan)
        finite = table[table.isfinite()]
        colours: dict[str, Any] = {"cmap": "cividis"}
        if finite.min() < 0 < finite.max():
            most = float(finite.abs().max())
            colours = {"cmap": "RdBu", "vmin": -most, "vmax": most}
        aspect: Literal["equal", "auto"] = "equal" if self.square else "auto"
        ax.set_anchor("W")
        shown = ax.imshow(table.numpy(), aspect=aspect, interpolation="nearest", **colours)
        # In coordinates of the axes, so that it is beside them whatever their size is.
        bar = ax.figure.colorbar(shown, cax=ax.inset_axes((1.02, 0, 0.03, 1)))
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=7.5, colors=INK, length=2)


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines, named above the axes if there are several."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    # The axis with a log scale: x, y or none.
    log: str = ""
    # An axis (x or y), the value from which the background is shaded, and what the shade is called.
    shaded: tuple[str, float, str] | None = None
    # Whether points are drawn instead of lines between them.
    dots: bool = False
    # Whether both axes have the same scale.
    square: bool = False
    # Tick labels of the x axis, by value.
    ticks: dict[int, str] | None = None
    # Names in a row.
    columns: int = 9

    @property
    def names(self) -> int:
        """Rows of names."""
        lines = sum(bool(line.label) for line in self.lines) if len(self.lines) > 1 else 0
        return math.ceil((lines + self._has_shade) / self.columns)

    @property
    def _has_shade(self) -> bool:
        if self.shaded is None:
            return False
        axis, place, _ = self.shaded
        # The end of a log scale is rounded, and may be past the last point by that.
        return any(value > place for line in self.lines for value in getattr(line, axis))

    def draw(self, ax: Axes, *, names: int | None = None) -> None:
        """Draw on these axes, with room for rows of ``names``, its own if None; 0 for no names."""
        names = self.names if names is None else names
        plain(ax, self.title, self.x, self.y, names=names)
        if self.log:
            words = {"x": self.x, "y": self.y}[self.log]
            ax.set(**{f"{self.log}scale": "log", f"{self.log}label": f"{words}, log scale"})
        if self.square:
            ax.set_aspect("equal", anchor="W")
        if self.ticks:
            ax.set_xticks(list(self.ticks), list(self.ticks.values()))
            ax.minorticks_off()
        ax.margins(x=0.1 if self.dots or self.ticks else 0, y=0.06)
        for i, (line, usual) in enumerate(zip(self.lines, cycle(SERIES), strict=False)):
            colour = line.colour or usual
            look: dict[str, Any] = {"ms": 4, "ls": "", "marker": "o"}
            if not self.dots:
                # Markers of a long line are apart, and not above those of the others.
                apart = max(1, len(line.x) // 8)
                look = {"ms": 6, "lw": 1.6, "ls": line.dash, "marker": line.marker or None}
                look["markevery"] = (i * apart // len(self.lines), apart)
            label = line.label if len(self.lines) > 1 else ""
            ax.plot(line.x, line.y, color=colour, label=label, **look)
            if line.band:
                ax.fill_between(line.x, *line.band, color=colour, alpha=0.18, lw=0)
        if self._has_shade and self.shaded is not None:
            axis, place, words = self.shaded
            limits = ax.get_xlim() if axis == "x" else ax.get_ylim()
            span = ax.axvspan if axis == "x" else ax.axhspan
            span(place, limits[1], color=FAINT, alpha=0.45, lw=0, label=words)
            ax.set(**{f"{axis}lim": limits})
        if names and self.names:
            legend(ax, columns=self.columns)


Panel: TypeAlias = Heat | Chart


class View(NamedTuple):
    """One encoding: a title, panels with the most important first, and numbers for JSON."""

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
    for row, first in zip(axes, range(0, len(panels), columns), strict=True):
        shown = panels[first : first + columns]
        # Titles of a row are at one height.
        names = max(panel.names for panel in shown)
        for ax, panel in zip(row, shown, strict=True):
            panel.draw(ax, names=names)
    return drawn
