"""What `posenc show` shows: panels for a file, characters for a terminal, numbers for a program."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from posenc import nn
from posenc.lab.pictures import panels, style
from posenc.lab.pictures.characters import Line, characters, chart
from posenc.lab.pictures.panels import Rotation
from posenc.numerics import scaling
from posenc.numerics.frequencies import inverse_frequencies

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From the factor and the trained length to the rule for sequences that many times longer.
RuleFor: TypeAlias = Callable[[float, int], scaling.Rule]
RULES: dict[str, RuleFor] = {
    "linear": lambda factor, trained: scaling.Linear(factor),
    "ntk": lambda factor, trained: scaling.NTK(factor),
    "dynamic": lambda factor, trained: scaling.DynamicNTK(factor, original_length=trained),
    "yarn": lambda factor, trained: scaling.YaRN(factor, original_length=trained),
    "llama3": lambda factor, trained: scaling.Llama3(factor, original_length=trained),
}


@dataclass(frozen=True, slots=True)
class View:
    """What to show.

    Attributes:
        encoding: ``sinusoidal``, ``learned``, ``rope`` or ``alibi``.
        dim: Channels; of one head for RoPE.
        trained: The context that is marked.
        length: Positions of a heatmap.
        base: Of the rates.
        heads: Of ALiBi.
        rotations: Of RoPE: as trained, and by each rule that is compared.
        farthest: Largest distance that scores are drawn for.
    """

    encoding: str
    dim: int = 128
    trained: int = 4096
    length: int = 128
    base: float = 10_000.0
    heads: int = 8
    rotations: tuple[Rotation, ...] = ()
    farthest: int = 4096

    @property
    def title(self) -> str:
        """One line that says what this is."""
        what = {
            "sinusoidal": f"Sinusoidal: added to the input, {self.dim} channels",
            "learned": f"Learned: added to the input, {self.dim} channels, before training",
            "rope": f"RoPE: queries and keys rotated, {self.dim} channels, base {self.base:g}",
            "alibi": f"ALiBi: subtracted from the score, {self.heads} heads",
        }
        return what[self.encoding]


def rotation(rope: nn.RoPE, label: str, seq_len: int) -> Rotation:
    """How a module rotates in a sequence of this length."""
    return Rotation(label, rope.inv_freq(seq_len), rope.attention_factor(seq_len))


def rope_view(
    dim: int = 128,
    *,
    base: float = 10_000.0,
    trained: int = 4096,
    length: int = 128,
    factor: float = 8.0,
    rules: tuple[str, ...] = (),
) -> View:
    """RoPE as trained, and stretched ``factor`` times by each of ``rules``."""
    farthest = math.ceil(trained * factor) if rules else trained
    seen = [rotation(nn.RoPE(dim, None, base), "as trained", trained)]
    for name in rules:
        rope = nn.RoPE(dim, None, base, scaling=RULES[name](factor, trained))
        seen.append(rotation(rope, f"{name} × {factor:g}", farthest))
    return View("rope", dim, trained, length, base, rotations=tuple(seen), farthest=farthest)


def config_view(
    rope: nn.RoPE, trained: int, longest: int, length: int = 128, against: str | None = None
) -> View:
    """The rotation that a model's config describes, beside the one without its rule.

    Args:
        rope: What the config describes.
        trained: The context it was trained on.
        longest: The longest sequence it is meant for.
        length: Positions of the heatmap.
        against: A rule to draw beside it, for the same stretch.
    """
    dim = rope.rotary_dim or rope.head_dim
    seen = [rotation(nn.RoPE(dim, None, rope.base), "without a rule", trained)]
    if rope.scaling is not None:
        seen.append(rotation(rope, type(rope.scaling).__name__, longest))
    if against is not None:
        factor = longest / trained
        other = nn.RoPE(dim, None, rope.base, scaling=RULES[against](factor, trained))
        seen.append(rotation(other, f"{against} × {factor:g}", longest))
    return View("rope", dim, trained, length, rope.base, rotations=tuple(seen), farthest=longest)


def figure(view: View) -> Figure:
    """Four panels of one encoding."""
    drawn = style.figure(11.5, 7.4, view.title)
    for ax, draw in zip(drawn.subplots(2, 2).flat, _panels(view), strict=True):
        draw(ax)
    return drawn


def cover(view: View) -> Figure:
    """The one panel that says most about an encoding, for a page of several."""
    drawn = style.figure(4.6, 3.1)
    _panels(view)[3 if view.encoding == "alibi" else 0](drawn.subplots())
    return drawn


def _panels(view: View) -> list[Callable[[Axes], None]]:
    if view.encoding == "alibi":
        alibi = nn.ALiBi(view.heads)
        middle = view.heads // 2
        return [
            lambda ax: panels.slopes(ax, alibi),
            lambda ax: panels.bias(ax, alibi, view.length),
            lambda ax: panels.reach(ax, alibi, view.trained),
            lambda ax: panels.bias_heat(ax, alibi, middle, view.length),
        ]
    table, rotations = _table(view), _rotations(view)
    if view.encoding == "rope":
        shown = _shown(view)

        def last(ax: Axes) -> None:
            if len(rotations) > 1:
                panels.slowdown(ax, rotations)
            else:
                panels.turns(ax, shown.rates, min(view.length, 24))

        return [
            lambda ax: panels.heat(ax, table, f"Cosines of the angles{_named(view)}", x="pair"),
            lambda ax: panels.wavelengths(ax, rotations, view.trained),
            lambda ax: panels.decay(ax, rotations, view.trained, view.farthest),
            last,
        ]
    alike: list[Callable[[Axes], None]] = [
        lambda ax: panels.heat(ax, table, "What is added"),
        lambda ax: panels.similarity(ax, table, "Cosine between the vectors of two positions"),
    ]
    if view.encoding == "learned":
        return [*alike, lambda ax: _norms(ax, table), lambda ax: _values(ax, table)]
    title = "The same cosine, by distance"
    return [
        *alike,
        lambda ax: panels.wavelengths(ax, rotations, view.trained),
        lambda ax: panels.decay(ax, rotations, view.trained, view.farthest, title),
    ]


def _norms(ax: Axes, table: torch.Tensor) -> None:
    style.plain(ax, "Length of the vector of each position", "position", "")
    ax.plot(table.norm(dim=-1).numpy(), color=style.SERIES[1], lw=1.4)
    ax.set_ylim(bottom=0)


def _values(ax: Axes, table: torch.Tensor) -> None:
    style.plain(ax, "Values of the table", "value", "how many")
    ax.hist(table.flatten().numpy(), bins=60, color=style.SERIES[1])


def _rotations(view: View) -> tuple[Rotation, ...]:
    """RoPE's own, or the rates of the sinusoid."""
    return view.rotations or (Rotation("", inverse_frequencies(view.dim, view.base)),)


def _shown(view: View) -> Rotation:
    """The one of several whose angles are drawn: by the first rule, if there is one."""
    return view.rotations[:2][-1]


def _named(view: View) -> str:
    return f", {_shown(view).label}" if len(view.rotations) > 1 else ""


def _table(view: View) -> torch.Tensor:
    """What is added to the input, or the cosines of RoPE's angles."""
    if view.encoding == "rope":
        at = torch.arange(view.length, dtype=torch.float64)[:, None]
        return (at * _shown(view).rates).cos() * _shown(view).gain
    if view.encoding == "sinusoidal":
        return nn.SinusoidalPE(view.length, view.dim, base=view.base).get_encoding(view.length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.LearnedPosEmbedding(view.length, view.dim).pos_emb.weight.detach()


def terminal(view: View, columns: int = 72) -> str:
    """The same in characters."""
    wide = max(20, columns - 10)
    parts = [view.title, ""]
    if view.encoding == "alibi":
        alibi = nn.ALiBi(view.heads)
        heads = list(range(view.heads))
        parts += ["slope of each head, log scale:"]
        slopes = [Line("", heads, alibi.slopes.tolist())]
        parts += [chart(slopes, columns=min(wide, 4 * view.heads), log_y=True), ""]
        parts += [f"bias of head {view.heads // 2}, queries down, keys across:"]
        parts += [characters(alibi.get_bias(view.length)[view.heads // 2], columns=wide // 2 * 2)]
        return "\n".join(parts)
    what = "what is added, positions down, channels across:"
    if view.encoding == "rope":
        what = f"cosines{_named(view)}, positions down, pairs across, fastest first:"
    parts += [what, characters(_table(view), columns=wide), ""]
    if view.encoding == "learned":
        return "\n".join(parts).rstrip()
    rotations = _rotations(view)
    parts += ["positions for a full turn of each pair, log scale:"]
    lines = [
        Line(t.label, list(range(len(t.rates))), [math.tau / r for r in t.rates.tolist()])
        for t in rotations
        if float(t.rates[-1]) > 0
    ]
    mark = (float(view.trained), f"trained context, {view.trained}")
    parts += [chart(lines, columns=wide, log_y=True, mark=mark), ""]
    parts += ["score of equal vectors at each distance, log scale across:"]
    found = [(t.label, *panels.scores(t, view.farthest)) for t in rotations]
    lines = [Line(label, d.tolist(), s.tolist()) for label, d, s in found]
    parts += [chart(lines, columns=wide, log_x=True)]
    return "\n".join(parts)


def numbers(view: View) -> dict[str, Any]:
    """What a program would read: rates, wavelengths, gains, slopes."""
    found: dict[str, Any] = {"encoding": view.encoding, "trained": view.trained}
    if view.encoding == "alibi":
        return {**found, "heads": view.heads, "slopes": nn.ALiBi(view.heads).slopes.tolist()}
    found["dim"] = view.dim
    if view.encoding == "learned":
        return found
    found["base"] = view.base
    found["rates"] = [
        {
            "label": t.label,
            "gain": t.gain,
            "rates": t.rates.tolist(),
            "wavelengths": [math.tau / r if r else None for r in t.rates.tolist()],
        }
        for t in _rotations(view)
    ]
    return found
