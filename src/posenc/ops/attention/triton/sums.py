"""The difference of a running sum: the bias ``c_i - c_j``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from posenc.ops.attention.triton.parts import KEYS, LOG2E, QUERIES
from posenc.ops.attention.triton.walks import (
    NOTHING,
    OPTIONS,
    Above,
    Gradient,
    Prepared,
    Walks,
    hooks,
    whole,
)
from posenc.ops.plan import Constant, Operand, cdiv

# Keys that share a bound of their sums.
CHUNK = tl.constexpr(256)


class Sums(NamedTuple):
    """Sums ``(1 or B, H, width)``, in natural units.

    The bias is left out of the rows, and added to the log-sum-exp, unless its rounding would show
    (`is_exact`).
    """

    hooks: Any
    sums: Any
    sums_b: Any
    sums_h: Any
    width: Any
    least: Any  # of each `CHUNK` of keys, (1 or B, H, chunks), if far keys are left out
    chunks: Any
    by_row: Any  # sums of the gradient of the scores, (B, H, Q) and (B, H, K), or None
    by_key: Any
    is_exact: Any


class SumRows(NamedTuple):
    """Where the sums of a head begin, and that of a block's first query."""

    head: Any
    origin: Any


@triton.jit
def head_sums(bias, b, h):
    return b * bias.sums_b + h * bias.sums_h


@triton.jit
def load_own(bias, head, i):
    """The sums of queries; those past the keys have the last one."""
    own = tl.minimum(tl.maximum(i, 0), bias.width - 1)
    return tl.load(bias.sums + head + own).to(tl.float64)


@triton.jit
def sum_rows(bias, head, sees, block, q):
    return SumRows(head, load_own(bias, head, block.i0))


@triton.jit
def sum_columns(bias, head, sees, b, h, j0, k):
    j = j0 + tl.arange(0, k.shape[0])
    inside = (j >= 0) & (j < sees.keys)
    return tl.load(bias.sums + head + j, mask=inside, other=0.0).to(tl.float64)


@triton.jit
def in_two(sums):
    """A float64 as a float32 and the rest."""
    high = sums.to(tl.float32)
    return high, (sums - high.to(tl.float64)).to(tl.float32)


@triton.jit
def add_sums(
    scores, state, rows, columns, bias, tile, scale, PLACE: tl.constexpr, WALK: tl.constexpr
):
    scores *= scale
    if bias.is_exact:
        # The difference of the greater parts of near keys is exact.
        high, low = in_two(load_own(bias, rows.head, tile.i) - rows.origin)
        key_high, key_low = in_two(columns - rows.origin)
        line = (high[:, None] - key_high[None, :]) + (low[:, None] - key_low[None, :])
        scores += line * LOG2E
    else:
        scores += ((rows.origin - columns) * LOG2E).to(tl.float32)[None, :]
    return scores, state, ()


@triton.jit
def sums_of_rows(bias, rows, block):
    if bias.is_exact:
        sums = block.i.to(tl.float32) * 0.0
    else:
        sums = ((load_own(bias, rows.head, block.i) - rows.origin) * LOG2E).to(tl.float32)
    return sums


@triton.jit
def narrow_by_sums(
    bias, rows, bound, sees, block, begin, edge, after, end, M: tl.constexpr, N: tl.constexpr
):
    """A chunk of keys is needed if the bias of one of them is above minus the bound."""
    if bias.is_exact:
        bound += ((load_own(bias, rows.head, block.i) - rows.origin) * LOG2E).to(tl.float32)
    reach = tl.where(
        block.low <= block.high, bound + tl.log2(sees.keys.to(tl.float32)), float("-inf")
    )
    furthest = tl.max(tl.where(reach == reach, reach, float("inf")))
    needed = edge
    least = bias.least + rows.head // bias.width * bias.chunks
    for first in range(0, bias.chunks, 64):
        part = first + tl.arange(0, 64)
        sums = tl.load(least + part, mask=part < bias.chunks, other=float("inf"))
        greatest = ((rows.origin - sums) * LOG2E).to(tl.float32)
        chunk = tl.where(greatest > -furthest, part * (CHUNK // N), edge)
        needed = tl.minimum(needed, tl.min(chunk))
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
def collect_sums(state, ds, dx, rows, columns, bias, tile, PLACE: tl.constexpr, WALK: tl.constexpr):
    if bias.by_row is not None and WALK == QUERIES:
        state += tl.sum(ds, 1)
    elif bias.by_key is not None and WALK == KEYS:
        state += tl.sum(ds, 0)
    return state, dx


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
    head = b * bias.sums_b + h * bias.sums_h
    return SumRows(head, load_own(bias, head, i))


@triton.jit
def add_few_sums(products, rows, bias, sees, b, h, i, j, k, seen, scale):
    at = bias.sums + rows.head[:, None] + j[None, :]
    sums = tl.load(at, mask=(j < sees.keys)[None, :], other=0.0).to(tl.float64)
    return products * scale + ((rows.origin[:, None] - sums) * LOG2E).to(tl.float32)


HOOKS = hooks(
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
def least_sums(sums, least, sums_b, sums_h, width):
    """The least of each `CHUNK` of sums; minus infinity for NaN, which must prune nothing."""
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    found = tl.load(sums + b * sums_b + h * sums_h + at, mask=at < width, other=float("inf"))
    found = tl.where(found == found, found, float("-inf")).to(tl.float64)
    to = (b * tl.num_programs(1) + h) * tl.num_programs(0) + tl.program_id(0)
    tl.store(least + to, tl.min(found))


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
    """The sums of a call."""
    plan, values = walks.plan, whole(walks.plan, walks.call.bias.values)
    batch, heads, width = values.shape
    chunks, least = cdiv(width, CHUNK.value), NOTHING
    sums_b = 0 if batch == 1 else heads * width
    if walks.prunes:
        least = plan.empty((batch, heads, chunks), torch.float64)
        arguments = values, least, sums_b, width, width
        plan.launch(least_sums, (chunks, heads, batch), arguments, {}, **OPTIONS)
    bias = Sums(
        hooks=HOOKS,
        sums=values,
        sums_b=sums_b,
        sums_h=width,
        width=width,
        least=least,
        chunks=chunks,
        by_row=NOTHING,
        by_key=NOTHING,
        is_exact=Constant(walks.is_exact),
    )
    return Prepared(bias, walks.number_tiles())


prepare_few = prepare


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
    grid = cdiv(columns, 256), heads, to.shape[0]
    fold = fold_sums, grid, (by_key, by_row, *places, *numbers), {"BLOCK": 256}
    return Gradient(prepared.bias._replace(by_row=by_row, by_key=by_key), (fold,))
