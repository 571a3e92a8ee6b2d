"""The layouts of pairs and tables in memory, and their loads and stores in a kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from posenc.ops.plan import START, Constant, Operand, Plan, Step, power_of_two, strides
from posenc.ops.rotation.spec import (
    DOUBLED_TABLES,
    Spec,
    TableRows,
    Turn,
    last_start,
    turn_of,
    wrong_start,
)


def index(*tensors: Operand) -> Any:
    """The dtype of offsets: int32, or the slower int64 if one may reach 2^31 elements."""
    last = max(
        sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) for t in tensors
    )
    return tl.int32 if last < 2**31 else tl.int64


def tables_in(plan: Plan, call: Any, length: int) -> tuple[Operand, Operand]:
    """Tables that lie at the same places of their memory; the plan is for starts within them."""
    cos, sin = call.cos, call.sin
    rows = cos.shape[-2]
    plan.most = last_start(rows, length, call.positions)
    plan.wrong_start = lambda start: wrong_start(start, rows, length, call.positions)
    if cos.has_dense_rows() and cos.stride() == sin.stride():
        return cos, sin
    return plan.contiguous(cos), plan.contiguous(sin)


def turn_in(plan: Plan, call: Any, length: int, width: int) -> Turn:
    """The rotation of a call by such tables.

    If they have each number twice, and nobody has checked that, a kernel does.
    """
    cos, sin = tables_in(plan, call, length)
    rotation = turn_of(cos, sin, call.positions, START, call.layout, width)
    if rotation.cos.shape[-1] < cos.shape[-1] and not call.layout & DOUBLED_TABLES:
        _check_doubled(plan, cos, sin, rotation.spec.interleaved)
    return rotation


def _check_doubled(plan: Plan, cos: Operand, sin: Operand, interleaved: bool) -> None:
    """Stop the device if tables ``[..., R, 2 P]`` do not have each number twice."""
    pairs, rows = cos.shape[-1] // 2, cos.shape[-2]
    steps = [(t.stride(0) if t.dim() == 3 else 0, *t.stride()[-2:]) for t in (cos, sin)]
    step, to_second = (2, 1) if interleaved else (1, pairs)
    numbers = (*steps[0], *steps[1], pairs, step, to_second)
    grid = rows, cos.shape[0] if cos.dim() == 3 else 1
    constants = {"BLOCK": power_of_two(pairs)}
    plan.launch(check_doubled, grid, (cos, sin, *numbers), constants)


@triton.jit
def check_doubled(
    cos, sin, cos_b, cos_t, cos_d, sin_b, sin_t, sin_d, pairs, step, to_second,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compare a row of each table with its own other numbers."""
    row, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first, mask = tl.arange(0, BLOCK) * step, tl.arange(0, BLOCK) < pairs
    second = first + to_second
    cos += b * cos_b + row * cos_t
    sin += b * sin_b + row * sin_t
    same = tl.load(cos + first * cos_d, mask=mask) == tl.load(cos + second * cos_d, mask=mask)
    same &= tl.load(sin + first * sin_d, mask=mask) == tl.load(sin + second * sin_d, mask=mask)
    tl.device_assert(same | (mask == 0), "both numbers of a pair must be the same in cos and sin")


class Heads(NamedTuple):
    """A tensor ``(B, H, T, D)``: its address and strides, and how many heads it has."""

    at: Any
    b: Any
    h: Any
    t: Any
    heads: Any


class Table(NamedTuple):
    """Cosines and sines, ``[1 or B, R, P]``, and the row of each token.

    Tokens follow each other from row `start` on, if `advances`, and have `positions` besides, if
    these are not None.
    """

    cos: Any
    sin: Any
    rows: Any
    b: Any
    t: Any
    column: Any
    positions: Any
    positions_b: Any
    positions_t: Any
    start: Any
    advances: Any
    is_transposed: Any


class Channels(NamedTuple):
    """Which channels of a head are pairs, how they lie, and the dtype of the arithmetic."""

    pairs: Any
    first: Any
    rest: Any  # how many channels are not rotated: all after the pairs, or all before them
    is_interleaved: Any
    is_interleaved_out: Any
    wide: Any
    block: Any  # the powers of two that hold the pairs, and the rest
    block_rest: Any


def heads_of(x: Operand) -> Heads:
    """A tensor as kernels read its heads."""
    b, h, t = strides(x)
    return Heads(x, b, h, t, Constant(x.shape[1]))


def table_of(cos: Operand, sin: Operand, rows: TableRows, transposed: bool = False) -> Table:
    """Tables that lie at the same places of their memory, as kernels read them."""
    whole = cos.is_aligned and all(step % 16 == 0 for step in cos.stride()[:-1])
    positions = rows.positions
    return Table(
        cos=cos,
        sin=sin,
        rows=cos.shape[-2],
        b=Step(cos.stride(0) if cos.dim() == 3 else 0, whole),
        t=Step(cos.stride(-2), whole),
        column=Constant(max(cos.stride(-1), 1)),
        positions=Constant(None) if positions is None else positions,
        positions_b=0 if positions is None else positions.stride(0),
        positions_t=0 if positions is None else positions.stride(1),
        start=START,
        advances=Constant(rows.is_sequential()),
        is_transposed=Constant(transposed),
    )


def channels_of(x: Operand, cos: Operand, spec: Spec) -> Channels:
    """The channels of a tensor that tables of so many pairs rotate."""
    pairs, rest = cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]
    of = (
        pairs,
        spec.first_channel,
        rest,
        spec.interleaved,
        spec.interleaved_out,
        tl.float64 if x.dtype in (torch.float32, torch.float64) else tl.float32,
        power_of_two(pairs),
        power_of_two(max(rest, 1)),
    )
    return Channels(*map(Constant, of))


@triton.jit
def load_pairs(row, present, pair, channels, INTERLEAVED: tl.constexpr):
    """Both channels ``[T, H, P]`` of each pair of the rows ``[T, H, 1]`` that are ``present``."""
    if INTERLEAVED:
        # One wide load: both channels of a pair are in the same thread.
        both = tl.arange(0, 2 * pair.shape[2])[None, None, :]
        mask = present & (both < 2 * channels.pairs)
        x = tl.load(row + channels.first + both, mask=mask, other=0)
        a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], pair.shape[2], 2)))
    else:
        mask = present & (pair < channels.pairs)
        a = tl.load(row + channels.first + pair, mask=mask, other=0)
        b = tl.load(row + channels.first + channels.pairs + pair, mask=mask, other=0)
    # A conversion waits for its load, so both loads are issued first.
    return a.to(channels.wide), b.to(channels.wide)


@triton.jit
def store_pairs(row, present, pair, a, b, channels, INTERLEAVED: tl.constexpr):
    """The counterpart of :func:`load_pairs`."""
    element: tl.constexpr = row.dtype.element_ty
    if INTERLEAVED:
        both = tl.arange(0, 2 * pair.shape[2])[None, None, :]
        x = tl.reshape(tl.join(a, b), (a.shape[0], a.shape[1], 2 * pair.shape[2])).to(element)
        tl.store(row + channels.first + both, x, mask=present & (both < 2 * channels.pairs))
    else:
        mask = present & (pair < channels.pairs)
        tl.store(row + channels.first + pair, a.to(element), mask=mask)
        tl.store(row + channels.first + channels.pairs + pair, b.to(element), mask=mask)


@triton.jit
def rows_at(x, b, t, h):
    """The rows ``[T, H, 1]`` of tokens and heads."""
    return x.at + (b * x.b + t[:, None] * x.t + h[None, :] * x.h)[:, :, None]


@triton.jit
def others_of(channels):
    """The numbers of the channels that are not rotated."""
    before = 2 * channels.pairs if channels.first == 0 else 0
    return before + tl.arange(0, channels.block_rest)[None, None, :]


@triton.jit
def negative(x):
    """Negate ``x``, and zeros too: Triton 3.6 compiles ``-x`` as ``0 - x``, one operation more."""
    return x * -1


@triton.jit
def rotated(p, q, c, s):
    """Rotate pairs, with the same roundings in every kernel."""
    return tl.fma(p, c, negative(q * s)), tl.fma(q, c, p * s)


@triton.jit
def load_tables(table, b, t, alive, pair, in_pairs, WIDE: tl.constexpr, LATE: tl.constexpr = False):
    """Cosine and sine ``[T, 1, P]`` of tokens ``t`` of sequence ``b``, and which have a row.

    A device_assert waits for the loads before it, and later loads wait for the assert. With
    ``LATE`` the caller asserts, and rows outside the table are not read.
    """
    row = tl.zeros_like(t) + table.start
    if table.positions is not None:
        at = table.positions + b * table.positions_b + t * table.positions_t
        row += tl.load(at, mask=alive, other=0)
    if table.advances:
        row += t
    inside = (row >= 0) & (row < table.rows) | (alive == 0)
    if LATE:
        alive &= inside
    else:
        tl.device_assert(inside, "position outside the table")
    where = b * table.b + row[:, None, None] * table.t + pair * table.column
    mask = alive[:, None, None] & in_pairs
    c = tl.load(table.cos + where, mask=mask, other=0).to(WIDE)
    s = tl.load(table.sin + where, mask=mask, other=0).to(WIDE)
    if table.is_transposed:
        s = negative(s)
    return c, s, inside
