"""The difference of a running sum: the bias ``c_i - c_j``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from posenc.ops.attention.triton.flash.parts import KEYS, LOG2E, NO_HOOKS, QUERIES
from posenc.ops.attention.triton.flash.walks import (
    NOTHING,
    OPTIONS,
    Above,
    Gradient,
    Prepared,
    Walks,
    hooks,
)
from posenc.ops.plan import Constant, Operand

# Keys that share a bound of their sums.
CHUNK = tl.constexpr(256)


class Sums(NamedTuple):
    """Sums ``(1 or B, H, width)`` in units of log2, as two float32, which `split_sums` makes.

    The difference of the greater parts of near keys is exact. The bias is left out of the rows, and
    added to the log-sum-exp, unless its rounding would show (`is_exact`).
    """

    hooks: Any
    high: Any
    low: Any
    sums_b: Any
    sums_h: Any
    width: Any
    least: Any  # of each `CHUNK` of keys, (1 or B, H, chunks)
    chunks: Any
    by_row: Any  # sums of the gradient of the scores, (B, H, Q) and (B, H, K), or None
    by_key: Any
    is_exact: Any


class Sum(NamedTuple):
    """Where a head's sums are, and those of some keys; `chunk` is the head's least ones."""

    at: Any
    chunk: Any
    high: Any
    low: Any
    high0: Any
    low0: Any


class Columns(NamedTuple):
    """The sums of a tile of keys."""

    high: Any
    low: Any


class Head(NamedTuple):
    """Where the sums of a head begin, and its least ones."""

    at: Any
    chunk: Any


@triton.jit
def head_sums(bias, b, h):
    at = b * bias.sums_b + h * bias.sums_h
    return Head(at, at // bias.width * bias.chunks)


@triton.jit
def load_sums(bias, at, index):
    near = at + tl.minimum(tl.maximum(index, 0), bias.width - 1)
    return tl.load(bias.high + near), tl.load(bias.low + near)


@triton.jit
def sum_rows(bias, head, sees, block, q):
    high, low = load_sums(bias, head.at, block.i)
    high0, low0 = load_sums(bias, head.at, block.i0)
    return Sum(head.at, head.chunk, high, low, high0, low0)


@triton.jit
def sum_columns(bias, head, sees, b, h, j0, k):
    j = j0 + tl.arange(0, k.shape[0])
    inside = (j >= 0) & (j < bias.width)
    high = tl.load(bias.high + head.at + j, mask=inside, other=0.0)
    return Columns(high, tl.load(bias.low + head.at + j, mask=inside, other=0.0))


@triton.jit
def add_sums(
    scores, state, rows, columns, bias, tile, scale, PLACE: tl.constexpr, WALK: tl.constexpr
):
    scores *= scale
    high = columns.high
    low = columns.low
    if bias.is_exact:
        scores += (rows.high[:, None] - high[None, :]) + (rows.low[:, None] - low[None, :])
    else:
        scores += ((rows.high0 - high) + (rows.low0 - low))[None, :]
    return scores, state, ()


@triton.jit
def sums_of_rows(bias, rows, block):
    sums = (rows.high - rows.high0) + (rows.low - rows.low0)
    if bias.is_exact:
        sums *= 0.0
    return sums


@triton.jit
def narrow_by_sums(
    bias, rows, bound, sees, block, begin, edge, after, end, M: tl.constexpr, N: tl.constexpr
):
    """A chunk of keys is needed if the bias of one of them is above minus the bound."""
    if bias.is_exact:
        bound += (rows.high - rows.high0) + (rows.low - rows.low0)
    reach = tl.where(
        block.low <= block.high, bound + tl.log2(sees.keys.to(tl.float32)), float("-inf")
    )
    furthest = tl.max(tl.where(reach == reach, reach, float("inf")))
    needed = edge
    for first in range(0, bias.chunks, 64):
        part = first + tl.arange(0, 64)
        inside = part < bias.chunks
        least = tl.load(bias.least + rows.chunk + part, mask=inside, other=0.0)
        # The least sums are rounded down, and this difference is rounded up.
        greatest = (rows.high0 - least) + rows.low0
        greatest += tl.abs(greatest) * 2.0**-22
        is_needed = inside & (greatest > -furthest)
        needed = tl.minimum(needed, tl.min(tl.where(is_needed, part * (CHUNK // N), edge)))
    return tl.maximum(begin, needed), end


@triton.jit
def open_sums(bias, M: tl.constexpr, N: tl.constexpr, WALK: tl.constexpr):
    state = ()
    if bias.by_row is not None and WALK == QUERIES:
        state = tl.zeros((M,), tl.float32)
    elif bias.by_key is not None and WALK == KEYS:
        state = tl.zeros((N,), tl.float32)
    return state


@triton.jit
def collect_sums(
    state, ds, dx, rows, columns, kept, bias, tile, PLACE: tl.constexpr, WALK: tl.constexpr
):
    if bias.by_row is not None and WALK == QUERIES:
        state += tl.sum(ds, 1)
    elif bias.by_key is not None and WALK == KEYS:
        state += tl.sum(ds, 0)
    return state, ds, dx


@triton.jit
def close_sums(state, dx, own, bias, sees, at, WALK: tl.constexpr):
    sequence = at.b * sees.heads + at.h
    if bias.by_row is not None and WALK == QUERIES:
        tl.store(bias.by_row + sequence * sees.queries + at.rows, state, mask=at.present)
    elif bias.by_key is not None and WALK == KEYS:
        tl.store(bias.by_key + sequence * sees.keys + at.j, state, mask=at.seen)
        state = tl.zeros_like(state)
    return state, dx


@triton.jit
def few_sums(bias, sees, b, h, i):
    at = b * bias.sums_b + h * bias.sums_h
    near = at + tl.minimum(tl.maximum(i, 0), bias.width - 1)
    return Sum(at, at, tl.load(bias.high + near), tl.load(bias.low + near), at, at)


@triton.jit
def add_few_sums(products, rows, bias, sees, b, h, i, j, k, scale):
    at = rows.at[:, None] + j[None, :]
    inside = j < sees.keys
    high = tl.load(bias.high + at, mask=inside[None, :], other=0.0)
    low = tl.load(bias.low + at, mask=inside[None, :], other=0.0)
    return products * scale + ((rows.high[:, None] - high) + (rows.low[:, None] - low))


HOOKS = NO_HOOKS._replace(
    head=head_sums,
    rows=sum_rows,
    columns=sum_columns,
    add=add_sums,
    row_part=sums_of_rows,
    narrow=narrow_by_sums,
    open=open_sums,
    collect=collect_sums,
    close=close_sums,
    few_rows=few_sums,
    few=add_few_sums,
)


@triton.jit
def split_sums(sums, high, low, least, sums_b, sums_h, sums_t, width, chunks, BLOCK: tl.constexpr):
    """Sums in units of log2 as a float32 and the rest of it, and the least of each chunk."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    inside = at < width
    numbers = tl.load(
        sums + b * sums_b + h * sums_h + at.to(tl.int64) * sums_t, mask=inside, other=0.0
    )
    wide = numbers.to(tl.float64) * LOG2E
    greater = wide.to(tl.float32)
    row = b * tl.num_programs(1) + h
    tl.store(high + row * width + at, greater, mask=inside)
    # Infinities have no rest.
    rest = tl.where(tl.abs(greater) == float("inf"), 0.0, wide - greater.to(tl.float64))
    tl.store(low + row * width + at, rest.to(tl.float32), mask=inside)
    # NaN must prune nothing. The number below a float32 is not above what was rounded to it.
    below = greater - tl.abs(greater) * 2.0**-23
    below = tl.where(greater == greater, below, float("-inf"))
    tl.store(least + row * chunks + tl.program_id(0), tl.min(tl.where(inside, below, float("inf"))))


@triton.jit
def fold_sums(
    by_key, by_row, starts, to, start, starts_b, heads, keys, queries, columns, together,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of running sums: of each query's own, less that of each key.

    ``together`` sequences share their sums.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for n in range(together):
        b = tl.program_id(2).to(tl.int64) * together + n
        own = start
        if starts is not None:
            own = tl.load(starts + b * starts_b).to(tl.int32)
        head = b * heads + h
        total -= tl.load(by_key + head * keys + at, mask=at < keys, other=0.0)
        row = at - own
        here = (row >= 0) & (row < queries)
        total += tl.load(by_row + head * queries + row, mask=here, other=0.0)
    out = (tl.program_id(2).to(tl.int64) * heads + h) * columns + at
    tl.store(to + out, total.to(to.dtype.element_ty), mask=at < columns)


def prepare(walks: Walks) -> Prepared:
    """The sums of a call, split."""
    plan, values = walks.plan, walks.call.bias.values
    batch, heads, width = values.shape
    chunks = -(-width // CHUNK.value)
    high, low = (plan.empty(values.shape, torch.float32) for _ in range(2))
    least = plan.empty((batch, heads, chunks), torch.float32)
    arguments = values, high, low, least, *values.stride(), width, chunks
    plan.launch(split_sums, (chunks, heads, batch), arguments, {"BLOCK": CHUNK.value}, **OPTIONS)
    bias = Sums(
        hooks=hooks(HOOKS),
        high=high,
        low=low,
        sums_b=0 if batch == 1 else heads * width,
        sums_h=width,
        width=width,
        least=least,
        chunks=chunks,
        by_row=NOTHING,
        by_key=NOTHING,
        is_exact=Constant(walks.is_exact),
    )
    return Prepared(bias, walks.number_tiles())


def gradient_of(
    walks: Walks, prepared: Prepared, above: Above, results: Mapping[str, Operand]
) -> Gradient:
    """A key's sum lowers its scores, and a query's own raises all of its scores.

    The sums of a query's scores would be the gradient of its log-sum-exp, but for the rounding of
    the output in ``delta``; without that, gradients of gates, which add all of these, drift.
    """
    to = results["values"]
    (batch, heads, queries), keys, sees = walks.q.shape[:3], walks.k.shape[2], walks.sees
    by_row = walks.plan.empty((batch, heads, queries), torch.float32)
    by_key = walks.plan.empty((batch, heads, keys), torch.float32)
    columns, together = to.shape[2], batch if to.shape[0] == 1 else 1
    places = sees.starts, to, sees.start, sees.starts_b
    numbers = heads, keys, queries, columns, together
    grid = triton.cdiv(columns, 256), heads, to.shape[0]
    fold = fold_sums, grid, (by_key, by_row, *places, *numbers), {"BLOCK": 256}
    return Gradient(prepared.bias._replace(by_row=by_row, by_key=by_key), (fold,))
