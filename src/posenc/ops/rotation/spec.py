"""The arguments of a rotation besides its tensors: table rows, the layout of pairs, a norm."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc._contract.sharding import replicate_like


class TableRows(NamedTuple):
    """The table row of each token: ``start``, plus ``positions`` if given.

    ``positions`` are int64: ``[1 or B, T]`` for every token, or ``[1 or B, 1]`` for the first token
    of every sequence. In the second case, and without ``positions``, rows are consecutive.
    """

    start: int = 0
    positions: Tensor | None = None

    def is_sequential(self) -> bool:
        """Whether the tokens of a sequence take consecutive rows."""
        return self.positions is None or self.positions.shape[1] == 1

    def as_index(self, length: int, device: torch.device) -> Tensor:
        """Rows as a tensor ``[1 or B, T]``."""
        if self.positions is None:
            return torch.arange(length, device=device)[None] + self.start
        index = self.positions + self.start if self.start else self.positions
        if length != 1 and self.is_sequential():
            index = index + replicate_like(index, torch.arange(length, device=device))
        return index


# The bits of a layout, which is an argument of an op: those of a `Spec`, and DOUBLED_TABLES for
# tables that are known to have each number twice.
INTERLEAVED, INTERLEAVED_OUT, ROTATE_LAST, TRANSPOSED, DOUBLED_TABLES = 1, 2, 4, 8, 16
# Tensors of (B, T, H, D), caches of (pages, page, H, D), and times WIDTH the channels that a head
# must have.
TOKENS_FIRST, PAGES_OF_TOKENS, WIDTH = 32, 64, 2**16


class Spec(NamedTuple):
    """Which channels form pairs, and the direction of the rotation."""

    interleaved: bool = True  # pairs of the input are (2i, 2i + 1), otherwise (i, P + i)
    interleaved_out: bool = True  # the same for the output
    first_channel: int = 0  # first channel that is rotated
    transposed: bool = False  # rotate by the negative angle

    def transpose(self) -> Spec:
        """The rotation of a gradient, from the layout of the output to that of the input."""
        return Spec(self.interleaved_out, self.interleaved, self.first_channel, not self.transposed)

    def bits(self) -> int:
        """The layout as an op takes it: a number is read faster than four flags."""
        return (
            INTERLEAVED * self.interleaved
            + INTERLEAVED_OUT * self.interleaved_out
            + ROTATE_LAST * (self.first_channel > 0)
            + TRANSPOSED * self.transposed
        )


def flatten(rows: TableRows, spec: Spec) -> tuple[Any, ...]:
    """``rows`` and ``spec`` as the last three arguments of an op."""
    return rows.positions, rows.start, spec.bits()


class Turn(NamedTuple):
    """What a rotation needs besides its tensors; tables have a number for each pair."""

    cos: Any  # [R, P] or [B, R, P], a tensor or an `Operand`
    sin: Any
    rows: TableRows
    spec: Spec


def turn_of(cos: Any, sin: Any, positions: Any, start: Any, layout: int, width: int) -> Turn:
    """The rotation of heads of ``width`` channels by these arguments of an op.

    An op also takes positions ``[T]``, one table for all sequences as ``[1, R, P]``, and tables
    that have each number twice.
    """
    cos, sin, rows = rows_of(cos, sin, positions, start)
    interleaved, columns = bool(layout & INTERLEAVED), cos.shape[-1]
    if layout & DOUBLED_TABLES or (width < 2 * columns <= 2 * width and columns % 2 == 0):
        cos, sin = undoubled(cos, interleaved), undoubled(sin, interleaved)
    first_channel = width - 2 * cos.shape[-1] if layout & ROTATE_LAST else 0
    out, transposed = bool(layout & INTERLEAVED_OUT), bool(layout & TRANSPOSED)
    return Turn(cos, sin, rows, Spec(interleaved, out, first_channel, transposed))


def rows_of(cos: Any, sin: Any, positions: Any, start: Any) -> tuple[Any, Any, TableRows]:
    """Tables and rows in one form."""
    if positions is not None and positions.dim() == 1:
        positions = positions[None]
    if cos.dim() == 3 and cos.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    return cos, sin, TableRows(start, positions)


def turned_back(layout: int) -> int:
    """The layout of the rotation of a gradient, from that of the output to that of the input."""
    if bool(layout & INTERLEAVED) != bool(layout & INTERLEAVED_OUT):
        layout ^= INTERLEAVED | INTERLEAVED_OUT
    return layout ^ TRANSPOSED


def heads_first(x: Any, layout: int) -> Any:
    """``x`` as (B, H, T, D), from the form that the layout names; and back to that form."""
    return x.transpose(1, 2) if layout & TOKENS_FIRST else x


def undoubled(table: Tensor, interleaved: bool) -> Tensor:
    """A table ``[..., P]`` from one ``[..., 2 P]`` that has each number twice."""
    return table[..., ::2] if interleaved else table[..., : table.shape[-1] // 2]


class Norm(NamedTuple):
    """RMSNorm before the rotation: ``x / sqrt(mean(x^2) + eps) * (weight + shift)``.

    The weight is ``[D]``, for a mean over each head, or ``[H * D]``, for one mean over all heads of
    a token (OLMo 2).
    """

    eps: float = 1e-6
    shift: float = 0.0  # 1 for weights that are stored around zero (Gemma)


class CacheTarget(NamedTuple):
    """A cache that rows are written to, and what divides them before they are rounded.

    The scale is one of: ``scale``, given; ``scales``, worked out and written; neither, which is 1.
    """

    cache: Tensor  # [pages, H, page, D], dense along D
    scale: Tensor | None = None  # float32 [B, H, T], with strides of zero where it is shared
    scales: Tensor | None = None  # float32 [pages, H, page]

    def slots(self) -> int:
        """How many rows of a head the cache has."""
        pages, _, page, _ = self.cache.shape
        return pages * page


class CacheWrite(NamedTuple):
    """What `rotate_and_cache` reads and writes, besides the rotation.

    Slot ``s`` is row ``s % page`` of page ``s // page``, where ``page`` may differ between the two
    caches; -1 stores nothing. A weight means RMSNorm before the rotation.
    """

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hk, T, D], of the dtype of q, as v is
    v: Tensor  # [B, Hv, T, Dv]
    slots: Tensor  # int64 or int32 [B, T]
    k_target: CacheTarget
    v_target: CacheTarget
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    norm: Norm = Norm()


# The largest number of each dtype of 8 bits that a cache may have; int8 is symmetric.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
# What Triton calls these dtypes; 0 is that of the keys.
FORMATS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.int8: 3}


class RowOutOfRange(ValueError):
    """A position is outside the table; ``row`` is the row it would take."""

    def __init__(self, row: int, rows: int) -> None:
        hint = "Pass smaller positions, or make a longer table."
        super().__init__(f"positions must be in [0, {rows}), got {row}.\n  {hint}")
        self.row = row


def last_start(rows: int, length: int, positions: Any) -> int:
    """The greatest start with which tokens have rows, as far as their positions tell."""
    return rows - length if positions is None else rows


def wrong_start(start: int, rows: int, length: int, positions: Any) -> RowOutOfRange:
    """The error of a start with which a token has no row."""
    end = start + length if positions is None else start
    return RowOutOfRange(start if start < 0 else max(start, end - 1), rows)


class SlotOutOfRange(ValueError):
    """A slot is outside the cache."""

    def __init__(self, slot: int, slots: int) -> None:
        hint = "Pass page * page length + place, or -1 to store nothing."
        super().__init__(f"slots must be in [-1, {slots}), got {slot}.\n  {hint}")
        self.slot = slot


def is_of_all_heads(weight: Any, x: Any) -> bool:
    """Whether the weight of a norm is ``[H * D]``."""
    return bool(weight.shape[0] != x.shape[3])


def shardable(
    x: Tensor, cos: Tensor, sin: Tensor, rows: TableRows
) -> tuple[Tensor, Tensor, TableRows]:
    """The arguments as DTensors, with one table row or one position for each token of ``x``.

    DTensor shards them like the tokens, so that no rank needs the row of its first token.
    """
    length, count = x.shape[2], cos.shape[-2]
    if rows.positions is None:
        if rows.start + length > count:
            raise RowOutOfRange(rows.start + length - 1, count)
        if length != count:
            cos, sin = (table.narrow(-2, rows.start, length) for table in (cos, sin))
        return replicate_like(x, cos), replicate_like(x, sin), TableRows()
    positions = replicate_like(x, rows.positions)
    if rows.start or rows.is_sequential():
        positions = TableRows(rows.start, positions).as_index(length, x.device)
    return replicate_like(x, cos), replicate_like(x, sin), TableRows(0, positions)
