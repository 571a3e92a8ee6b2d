"""The look of every picture, and its file: colours, axes, legend, image formats."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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


def plain(ax: Axes, title: str, x: str, y: str) -> None:
    """Set title, labels, ticks and a faint grid."""
    ax.set_title(title, fontsize=11, color=INK, loc="left", pad=8)
    ax.set_xlabel(x, fontsize=9, color=INK)
    ax.set_ylabel(y, fontsize=9, color=INK)
    ax.tick_params(labelsize=8, colors=INK, length=3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(INK)
    ax.grid(visible=True, color=FAINT, lw=0.6)
    ax.set_axisbelow(True)
    ax.patch.set_alpha(0)


def legend(ax: Axes, *, of_figure: bool = False) -> None:
    """Name the lines that have a label right of the axes, or of all axes, in their colours."""
    lines, labels = ax.get_legend_handles_labels()
    if lines:
        words: dict[str, Any] = {"labelcolor": "linecolor", "frameon": False, "fontsize": 8.5}
        if of_figure:
            words["fontsize"] = 10
            ax.figure.legend(lines, labels, loc="outside right upper", handlelength=3, **words)
        else:
            ax.legend(loc="upper left", bbox_to_anchor=(1, 1), handlelength=2, **words)


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
