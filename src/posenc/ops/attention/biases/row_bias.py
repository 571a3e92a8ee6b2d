"""A bias that is a function of positions, computed for a few queries at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from posenc._contract import checks
from posenc.ops.attention.biases.kind import Where


class RowBias(NamedTuple):
    """Any other bias, computed for a few queries at a time.

    Attributes:
        rows: A function of the queries' key indices, int64 ``[1 or B, n]``, and of key indices,
            ``[k]``, that returns the bias, ``[1 or B, H, n, k]``. Both are consecutive; keys that
            none of the queries see may be left out. It is called again in the backward pass, and
            must then return the same.
    """

    rows: Callable[[Tensor, Tensor], Tensor]

    def of(self, where: Where, scores: Tensor) -> Tensor:
        """The bias of queries and keys, ``[1 or B, H, n, k]``."""
        return self.rows(where.query_index, where.key_index)


def check_rows(who: str, rows: Tensor, scores: Tensor) -> None:
    """Refuse what a function returned, if it does not fit the scores."""
    sizes = zip(getattr(rows, "shape", ()), scores.shape, strict=False)
    if getattr(rows, "ndim", 0) != 4 or any(n != 1 and n != m for n, m in sizes):
        rule = f"RowBias.rows must return a tensor of shape {tuple(scores.shape)}, or (1, ...)"
        hint = "Return [1 or B, H, n, k] for queries [1 or B, n] and keys [k]."
        checks.fail(who, rule, checks.describe(rows), hint)
