"""The look of every picture, and its file: colours, axes, legend, image formats."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, GREY = "#24292f", "#d0d7de", "#8c8c8c"
# Okabe and Ito's colours suit colour-blind readers.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_DPI = 144


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


def legend(ax: Axes) -> None:
    """Name the lines that have a label right of the axes, in their colours."""
    if ax.get_legend_handles_labels()[0]:
        look: dict[str, Any] = {"labelcolor": "linecolor", "frameon": False, "fontsize": 8.5}
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1), handlelength=1, **look)


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


def in_page(picture: Figure, description: str) -> str:
    """An element that holds the picture itself, so that a page needs no other file."""
    picture.patch.set_alpha(0)
    content = base64.b64encode(image(picture, ".svg")).decode()
    return f'<img alt="{html.escape(description)}" src="data:image/svg+xml;base64,{content}"/>'
