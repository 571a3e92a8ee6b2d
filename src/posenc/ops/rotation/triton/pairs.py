"""The layouts of pairs and tables in memory, and their loads and stores in a kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from posenc.ops.plan import START, Operand, Plan, Step
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
    constants = {"BLOCK": triton.next_power_of_2(pairs)}
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


def table_numbers(cos: Operand, rows: TableRows) -> tuple[int | Step, ...]:
    """Rows of a table, its batch and row strides, and batch and token strides of the positions."""
    whole = cos.is_aligned and all(step % 16 == 0 for step in cos.stride()[:-1])
    by_sequence = cos.stride(0) if cos.dim() == 3 else 0
    table = cos.shape[-2], Step(by_sequence, whole), Step(cos.stride(-2), whole)
    if rows.positions is None:
        return *table, 0, 0
    return *table, *rows.positions.stride()


def shared_constants(x: Operand, cos: Operand, rows: TableRows, spec: Spec) -> dict[str, Any]:
    """The constexpr parameters that all kernels share, in their order."""
    pairs, rest = cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]
    return {
        "PAIRS": pairs,
        "FIRST": spec.first_channel,
        "REST": rest,
        "COLUMN": max(cos.stride(-1), 1),
        "HAS_POSITIONS": rows.positions is not None,
        "ADVANCES": rows.is_sequential(),
        "IN": spec.interleaved,
        "OUT": spec.interleaved_out,
        "TRANSPOSED": spec.transposed,
        "WIDE": tl.float64 if x.dtype in (torch.float32, torch.float64) else tl.float32,
        "BLOCK_P": triton.next_power_of_2(pairs),
        "BLOCK_REST": triton.next_power_of_2(max(rest, 1)),
    }


@triton.jit
def load_pairs(
    row, present, pair, FIRST: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Both channels ``[T, H, P]`` of each pair of the rows ``[T, H, 1]`` that are ``present``."""
    if INTERLEAVED:
        # One wide load: both channels of a pair are in the same thread.
        both = tl.arange(0, 2 * pair.shape[2])[None, None, :]
        x = tl.load(row + FIRST + both, mask=present & (both < 2 * PAIRS), other=0)
        a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], pair.shape[2], 2)))
    else:
        mask = present & (pair < PAIRS)
        a = tl.load(row + FIRST + pair, mask=mask, other=0)
        b = tl.load(row + FIRST + PAIRS + pair, mask=mask, other=0)
    # A conversion waits for its load, so both loads are issued first.
    return a.to(WIDE), b.to(WIDE)


@triton.jit
def store_pairs(
    row, present, pair, a, b, FIRST: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """The counterpart of :func:`load_pairs`."""
    element: tl.constexpr = row.dtype.element_ty
    if INTERLEAVED:
        both = tl.arange(0, 2 * pair.shape[2])[None, None, :]
        x = tl.reshape(tl.join(a, b), (a.shape[0], a.shape[1], 2 * pair.shape[2])).to(element)
        tl.store(row + FIRST + both, x, mask=present & (both < 2 * PAIRS))
    else:
        mask = present & (pair < PAIRS)
        tl.store(row + FIRST + pair, a.to(element), mask=mask)
        tl.store(row + FIRST + PAIRS + pair, b.to(element), mask=mask)


@triton.jit
def negative(x):
    """Negate ``x``, and zeros too: Triton 3.6 compiles ``-x`` as ``0 - x``, one operation more."""
    return x * -1


@triton.jit
def rotated(p, q, c, s):
    """Rotate pairs, with the same roundings in every kernel."""
    return tl.fma(p, c, negative(q * s)), tl.fma(q, c, p * s)


@triton.jit
def load_tables(
    table, b, t, alive, pair, in_pairs,
    COLUMN: tl.constexpr, HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr, LATE: tl.constexpr = False,
):  # fmt: skip
    """Cosine and sine ``[T, 1, P]`` of tokens ``t`` of sequence ``b``, and which have a row.

    A device_assert waits for the loads before it, and later loads wait for the assert. With
    ``LATE`` the caller asserts, and rows outside the table are not read.
    """
    cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start = table
    row = tl.zeros_like(t) + start
    if HAS_POSITIONS:
        row += tl.load(positions + b * positions_b + t * positions_t, mask=alive, other=0)
    if ADVANCES:
        row += t
    inside = (row >= 0) & (row < rows) | (alive == 0)
    if LATE:
        alive &= inside
    else:
        tl.device_assert(inside, "position outside the table")
    where = b * table_b + row[:, None, None] * table_t + pair * COLUMN
    mask = alive[:, None, None] & in_pairs
    c = tl.load(cos + where, mask=mask, other=0).to(WIDE)
    s = tl.load(sin + where, mask=mask, other=0).to(WIDE)
    if TRANSPOSED:
        s = negative(s)
    return c, s, inside
