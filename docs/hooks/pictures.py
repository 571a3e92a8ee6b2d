"""The manual's pictures, drawn when it is built: by the code of `posenc show` where it has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from posenc.lab import show
from posenc.lab.panels import INK, SERIES, figure, image, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(encoding: str, **options: str) -> Figure:
    """What `posenc show` draws of an encoding."""
    return show.figure(show.ENCODINGS[encoding](**options))


def layouts() -> Figure:
    """Eight channels and which of them turn together, in both layouts."""
    drawn = figure(7.2, 3.4)
    upper, lower = drawn.subplots(2, 1)
    _channels(upper, "interleaved: neighbours", [(0, 1), (2, 3), (4, 5), (6, 7)])
    _channels(lower, "half: each with the one D/2 further on", [(0, 4), (1, 5), (2, 6), (3, 7)])
    return drawn


def axes() -> Figure:
    """The rate of each pair of a head, and the coordinate that it follows, three times."""
    import posenc
    from posenc.axes import Axial, Sections

    kinds = {
        "Sections((16, 24, 24))": Sections((16, 24, 24)),
        "Axial(2)": Axial(2),
        "Axial((16, 56, 56))": Axial((16, 56, 56)),
    }
    drawn = figure(9.6, 3.2)
    for ax, (name, kind) in zip(drawn.subplots(1, 3, sharey=True), kinds.items(), strict=True):
        rates, followed = posenc.RoPE(128, axes=kind).scaled_inv_freq().tolist(), kind.followed(64)
        words = ("row", "column") if kind.count() == 2 else ("time", "row", "column")
        for axis, (word, colour) in enumerate(zip(words, SERIES[-len(words) :], strict=True)):
            mine = [i for i, one in enumerate(followed) if one == axis]
            ax.semilogy(mine, [rates[i] for i in mine], ".", color=colour, label=word, ms=5)
        plain(ax, name, "pair", "")
    first = drawn.axes[0]
    first.set_ylabel("radians per step, log scale", fontsize=9)
    first.legend(frameon=False, fontsize=8.5, labelcolor="linecolor", loc="lower left")
    return drawn


def precision() -> Figure:
    """How far cosines are from the truth, by position: the usual ways, and ours."""
    from mpmath import mp, mpf

    import posenc

    dim, octaves = 128, range(4, 31)
    at = [int(2**octave * part) for octave in octaves for part in (1.17, 1.43, 1.91)]
    with mp.workprec(200):
        rates = [mpf(10_000) ** (mpf(-2 * i) / dim) for i in range(0, dim // 2, 4)]
        truth = [[float(mp.cos(p * rate)) for rate in rates] for p in at]
    exact = torch.tensor(truth, dtype=torch.float64)
    single = (10_000.0 ** -(torch.arange(0, dim, 2).float() / dim))[::4]
    double = (10_000.0 ** -(torch.arange(0, dim, 2).double() / dim))[::4]
    whole = torch.tensor(at)
    found = {
        "positions in bfloat16": (whole.bfloat16().float()[:, None] * single).cos(),
        "angles in float32": (whole.float()[:, None] * single).cos(),
        "angles in float64": (whole.double()[:, None] * double).cos(),
        "posenc": posenc.RoPE(dim, None).tables(whole)[0][:, ::4],
    }
    drawn = figure(7.2, 4)
    ax = drawn.subplots()
    x = [2.0**octave for octave in octaves]
    for (name, cos), colour in zip(found.items(), SERIES, strict=True):
        error = (cos.double() - exact).abs().amax(1).view(len(x), -1).amax(1).clamp(min=1e-17)
        ax.loglog(x, error.numpy(), color=colour, lw=2)
        place = (x[-1], float(error[-1]))
        above = (0, -14 if name.endswith("float32") else 6)
        ax.annotate(name, place, above, textcoords="offset points", color=colour, ha="right")
    plain(ax, "Largest error of a cosine", "position, log scale", "error, log scale")
    ax.set_ylim(1e-17, 300)
    return drawn


def extended() -> Figure:
    """The relative position of every query and key: plain, Self-Extend, Dual Chunk."""
    import posenc

    length, rope = 48, posenc.RoPE(64, None)
    found = {
        "RoPE": posenc.SelfExtend(rope, group=1, window=1),
        "Self-Extend by 4": posenc.SelfExtend(rope, group=4, window=12),
        "Dual Chunk of 16": posenc.DualChunk(rope, chunk=16, window=6),
    }
    drawn = figure(9.6, 3.3)
    for ax, (name, extend) in zip(drawn.subplots(1, 3), found.items(), strict=True):
        distance = extend.distances(length).double()
        shown = distance.masked_fill(distance < 0, float("nan"))
        picture = ax.imshow(shown.numpy(), vmin=0, vmax=length - 1, cmap="viridis")
        plain(ax, f"{name}: up to {int(distance.max())}", "key", "query")
        ax.grid(visible=False)
    bar = drawn.colorbar(picture, cax=ax.inset_axes((1.06, 0, 0.06, 1)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, colors=INK, length=2)
    return drawn


_SHOWN = "sinusoidal learned rope pope alibi t5 fire forget-gate fourier transformer-xl".split()
PICTURES: dict[str, Callable[[], Figure]] = {
    "gallery": show.gallery,
    **{name: partial(draw, name) for name in _SHOWN},
    "scaling": partial(draw, "rope", scaling="yarn", against="linear"),
    "layouts": layouts,
    "axes": axes,
    "precision": precision,
    "extended": extended,
}


def on_files(files: Any, config: Any) -> Any:
    """Put the pictures among the files of the site."""
    from mkdocs.structure.files import File

    for name, picture in PICTURES.items():
        content = image(picture(), ".svg")
        files.append(File.generated(config, f"pictures/{name}.svg", content=content))
    return files


def _channels(ax: Axes, title: str, pairs: list[tuple[int, int]]) -> None:
    from matplotlib.patches import Arc, Rectangle

    for pair, ((left, right), colour) in enumerate(zip(pairs, SERIES, strict=True)):
        for channel in (left, right):
            ax.add_patch(Rectangle((channel, 0), 0.92, 0.92, color=colour))
            ax.text(channel + 0.46, 0.46, channel, color="white", ha="center", va="center")
        middle, wide = (left + right) / 2 + 0.46, right - left
        ax.add_patch(Arc((middle, 1), wide, 1.1, theta1=0, theta2=180, color=colour, lw=2))
        ax.text(middle, 1.6, rf"$\theta_{pair}$", color=colour, ha="center", va="bottom")
    ax.set_title(title, loc="left", fontsize=11)
    ax.set(xlim=(-0.1, 8), ylim=(-0.05, 2.3), aspect="equal")
    ax.set_axis_off()
