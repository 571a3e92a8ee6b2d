"""What a rotation takes besides its tensors: table rows, the layout of pairs, a norm."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc._contract.sharding import replicate_like


class Rows(NamedTuple):
    """Which table row each token takes: ``start + positions[b, t]``, plus ``t`` in a sequence.

    Attributes:
        start: Row of the first token.
        positions: None for a sequence from ``start`` on; int64 ``[1 or B, T]`` for a row of each
            token's own; ``[1 or B, 1]`` for the first row of each sequence.
    """

    start: int = 0
    positions: Tensor | None = None

    def is_sequential(self) -> bool:
        """Whether the row moves on with the token."""
        return self.positions is None or self.positions.shape[1] == 1

    def as_index(self, length: int, device: torch.device) -> Tensor:
        """Rows as a tensor ``[1 or B, T]``."""
        if self.positions is None:
            return torch.arange(length, device=device)[None] + self.start
        index = self.positions + self.start
        if self.is_sequential():
            index = index + replicate_like(index, torch.arange(length, device=device))
        return index


class Spec(NamedTuple):
    """Which channels form pairs, and the direction of the rotation.

    Attributes:
        interleaved: Pairs of the input are ``(2i, 2i + 1)`` if true, ``(i, P + i)`` if false.
        interleaved_out: The same for the output.
        first_channel: First channel that is rotated.
        transposed: Rotate by the negative angle: the gradient.
    """

    interleaved: bool = True
    interleaved_out: bool = True
    first_channel: int = 0
    transposed: bool = False

    def transpose(self) -> Spec:
        """The rotation that a gradient takes: from the output's layout to the input's."""
        return Spec(self.interleaved_out, self.interleaved, self.first_channel, not self.transposed)


def flatten(rows: Rows, spec: Spec) -> tuple[Any, ...]:
    """Arguments of an op that follow the tables."""
    return (rows.positions, rows.start, *spec)


def unflatten(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of an op as ``xs, cos, sin, rows, spec``."""
    *xs, cos, sin, positions, start = arguments[:-4]
    return xs, cos, sin, Rows(start, positions), Spec(*arguments[-4:])


class Norm(NamedTuple):
    """RMSNorm before the rotation: ``x / sqrt(mean(x^2) + eps) * (weight + shift)``.

    Attributes:
        eps: Added to the mean square.
        shift: Added to the weight: 1 for weights that are stored around zero (Gemma).
        all_heads: Take the mean over all heads of a token together (OLMo 2), not over each.
    """

    eps: float = 1e-6
    shift: float = 0.0
    all_heads: bool = False


class RowOutOfRange(ValueError):
    """A position is outside the table; ``row`` is the row it would take."""

    def __init__(self, row: int, rows: int) -> None:
        way_out = "Pass smaller positions, or make a longer table."
        super().__init__(f"positions must be in [0, {rows}), got {row}.\n  {way_out}")
        self.row = row


def shardable(x: Tensor, cos: Tensor, sin: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Rows]:
    """Tables with one row for each token of a DTensor ``x``, or a position for each token.

    Where the tokens are sharded, so are then the rows or the positions, and no rank needs the row
    of its first token.
    """
    length, held = x.shape[2], cos.shape[-2]
    if rows.positions is None:
        if rows.start + length > held:
            raise RowOutOfRange(rows.start + length - 1, held)
        if length != held:
            cos, sin = (table.narrow(-2, rows.start, length) for table in (cos, sin))
        return replicate_like(x, cos), replicate_like(x, sin), Rows()
    positions = replicate_like(x, rows.positions)
    if rows.start or rows.is_sequential():
        positions = Rows(rows.start, positions).as_index(length, x.device)
    return replicate_like(x, cos), replicate_like(x, sin), Rows(0, positions)
