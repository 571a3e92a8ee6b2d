"""Pictures in characters, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_SHADES = " .:-=+*#%@"
_MARKS = "*o+x"


class Line(NamedTuple):
    """One line of a chart; without a colour of its own it has one by its place."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = ""
    marker: str = ""
    band: tuple[Sequence[float], Sequence[float]] | None = None


def characters(table: Tensor, *, rows: int = 12, columns: int = 64) -> str:
    """A matrix as a coarse picture in characters, dark for small and bright for large."""
    shown = table.float()
    for axis, cells in enumerate((rows, columns)):
        size = table.shape[axis]
        picked = torch.linspace(0, size - 1, min(cells, size)).round().long()
        shown = shown.index_select(axis, picked)
    finite = table[table.isfinite()].float()
    low, high = finite.aminmax() if len(finite) else torch.zeros(2)
    level = (shown - low) / (high - low).clamp(min=1e-30) * (len(_SHADES) - 1)
    level = level.nan_to_num(0, neginf=0).floor().long()
    return "\n".join("".join(_SHADES[i] for i in row) for row in level.tolist())


def chart(
    lines: Sequence[Line],
    *,
    rows: int = 10,
    columns: int = 60,
    log: str = "",
    mark: tuple[float, str] | None = None,
) -> str:
    """Lines as a coarse chart in characters, with ``mark``, a height and its name, drawn across.

    Examples:
        >>> print(chart([Line("", [0, 1, 2, 3], [0, 1, 2, 3])], rows=4, columns=7))
        3 |      *
          |    *
          |  *
        0 |*
           0     3
    """
    xs = [x for line in lines for x in line.x]
    ys = [y for line in lines for y in line.y] + ([mark[0]] if mark else [])
    grid = [[" "] * columns for _ in range(rows)]
    if mark is not None:
        grid[_cell(mark[0], ys, rows, "y" in log)] = ["-"] * columns
    for line, sign in zip(lines, _MARKS, strict=False):
        for x, y in zip(line.x, line.y, strict=True):
            grid[_cell(y, ys, rows, "y" in log)][_cell(x, xs, columns, "x" in log)] = sign
    bottom, top, left, right = (f"{end(values):.4g}" for values in (ys, xs) for end in (min, max))
    width = max(len(top), len(bottom))
    numbers = [top, *[""] * (rows - 2), bottom]
    drawn = [
        f"{number:>{width}} |{''.join(row)}".rstrip()
        for number, row in zip(numbers, reversed(grid), strict=True)
    ]
    gap = max(1, columns - len(left) - len(right))
    below = [f"{left}{'':{gap}}{right}"]
    if len(lines) > 1:
        names = (f"{sign} {line.label}" for line, sign in zip(lines, _MARKS, strict=False))
        below.append("   ".join(names))
    if mark is not None:
        below.append(f"- {mark[1]}")
    return "\n".join([*drawn, *(f"{'':{width}}  {words}" for words in below)])


def _cell(value: float, values: Sequence[float], cells: int, logarithmic: bool) -> int:
    """Which of ``cells`` between the least and the largest of ``values`` holds ``value``."""
    scale = math.log if logarithmic else float
    low, high = scale(min(values)), scale(max(values))
    return round((scale(value) - low) / (high - low) * (cells - 1)) if high > low else cells // 2
