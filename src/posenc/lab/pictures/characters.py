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
    """One line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def characters(table: Tensor, *, rows: int = 12, columns: int = 64) -> str:
    """A matrix as a coarse picture in characters, dark for small and bright for large.

    Examples:
        >>> print(characters(torch.tensor([[3.0, 0.0, 9.0], [6.0, 7.0, 8.0]])))
        - @
        *#%
    """
    finite = table.float().nan_to_num(neginf=float("nan"))
    seen = finite[~finite.isnan()]
    low, high = seen.aminmax() if len(seen) else torch.zeros(2)
    pick_row = torch.linspace(0, len(table) - 1, min(rows, len(table))).round().long()
    pick_column = torch.linspace(0, table.shape[1] - 1, min(columns, table.shape[1])).round()
    scaled = (finite - low) / (high - low).clamp(min=1e-30)
    level = (
        (scaled.nan_to_num(0) * (len(_SHADES) - 1)).floor().long()[pick_row][:, pick_column.long()]
    )
    return "\n".join("".join(_SHADES[i] for i in line) for line in level.tolist())


def chart(
    lines: Sequence[Line],
    *,
    rows: int = 10,
    columns: int = 60,
    log_x: bool = False,
    log_y: bool = False,
    mark: tuple[float, str] | None = None,
) -> str:
    """Lines as a coarse chart in characters, the range of each axis written at its ends.

    Args:
        lines: What to draw; each has a mark of its own, named below if there are several.
        rows: Height.
        columns: Width, without the numbers.
        log_x: Whether equal steps across are equal ratios.
        log_y: The same upwards.
        mark: A height to draw across, and its name.

    Examples:
        >>> print(chart([Line("", [0, 1, 2, 3], [0, 1, 2, 3])], rows=4, columns=7))
        3 |      *
          |    *
          |  *
        0 |*
           0     3
    """
    flat = [(x, y) for line in lines for x, y in zip(line.x, line.y, strict=True)]
    heights = [y for _, y in flat] + ([mark[0]] if mark else [])
    across = _Scale(min(x for x, _ in flat), max(x for x, _ in flat), columns, log_x)
    up = _Scale(min(heights), max(heights), rows, log_y)
    grid = [[" "] * columns for _ in range(rows)]
    if mark is not None:
        grid[up.cell(mark[0])] = list("-" * columns)
    for line, sign in zip(lines, _MARKS, strict=False):
        for x, y in zip(line.x, line.y, strict=True):
            grid[up.cell(y)][across.cell(x)] = sign
    top, bottom = f"{up.high:.4g}", f"{up.low:.4g}"
    wide = max(len(top), len(bottom))
    drawn = []
    for i in reversed(range(rows)):
        number = top if i == rows - 1 else bottom if i == 0 else ""
        drawn.append(f"{number:>{wide}} |{''.join(grid[i])}".rstrip())
    left, right = f"{across.low:.4g}", f"{across.high:.4g}"
    gap = max(1, columns - len(left) - len(right))
    drawn.append(f"{'':{wide}}  {left}{'':{gap}}{right}")
    names = [f"{sign} {line.label}" for line, sign in zip(lines, _MARKS, strict=False)]
    if len(lines) > 1:
        drawn.append(f"{'':{wide}}  {'   '.join(names)}")
    if mark is not None:
        drawn.append(f"{'':{wide}}  - {mark[1]}")
    return "\n".join(drawn)


class _Scale:
    def __init__(self, low: float, high: float, cells: int, logarithmic: bool) -> None:
        self.low, self.high, self.cells = low, high, cells
        self._of = math.log if logarithmic else float

    def cell(self, value: float) -> int:
        low, high = self._of(self.low), self._of(self.high)
        share = (self._of(value) - low) / (high - low) if high > low else 0.5
        return round(share * (self.cells - 1))
