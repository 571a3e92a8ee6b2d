"""A number for each head and distance, the same for all distances beyond either end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from posenc.ops.attention.triton.parts import (
    AFTER,
    BEFORE,
    DIAGONAL,
    KEYS,
    LOG2E,
    NEAR,
    QUERIES,
    number_of,
    sum_blocks,
)
from posenc.ops.attention.triton.walks import (
    NOTHING,
    OPTIONS,
    Above,
    Gradient,
    Prepared,
    Walks,
    hooks,
)
from posenc.ops.plan import Constant, Operand, cdiv

# Copies of a table's ends on each side of it, as many as a tile has distances.
PAD = tl.constexpr(256)


class Table(NamedTuple):
    """A table ``(H, width)``, whose column ``zero`` is of distance zero, in units of log2.

    `padded` begins with its largest distance, and has `PAD` copies of each end beyond it: further
    distances are alike. The gradients of distances beyond the last column, and of those before the
    first, are summed by blocks of queries, ``(B, H, blocks)``; those of columns by diagonals,
    ``(H, diagonals, 2 * block)``.
    """

    hooks: Any
    padded: Any  # as it is, for few queries
    padded_h: Any
    padded_t: Any
    width: Any
    zero: Any
    beyond_last: Any
    before_first: Any
    by_diagonal: Any
    has_ptx: Any


class TableRows(NamedTuple):
    """Where the table of a head begins."""

    at: Any


class TableSums(NamedTuple):
    """Sums of gradients of distances that have no column."""

    beyond_last: Any
    before_first: Any


@triton.jit
def head_table(bias, b, h):
    return TableRows(bias.padded + h * bias.padded_h)


@triton.jit
def table_rows(bias, head, sees, block, q):
    return head


@triton.jit
def near_tiles(bias, rows, i0, begin, end, M: tl.constexpr, N: tl.constexpr):
    """Keys of tiles before these are beyond the last column for all queries of a block."""
    near = tl.maximum(i0 + bias.zero - bias.width + 1, 0) // N
    return near, tl.maximum(i0 + M + bias.zero + N, 0) // N


@triton.jit
def near_blocks(bias, columns, start, j0, begin, end, M: tl.constexpr, N: tl.constexpr):
    """Queries of blocks before these are before the first column for all keys of a tile."""
    near = tl.maximum(j0 - bias.zero - start + 1, 0) // M
    far = j0 + N - 1 + bias.width - 1 - bias.zero - start + M - 1
    return near, tl.maximum(far, 0) // M


@triton.jit
def table_tile(bias, at, distance, M: tl.constexpr, N: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """The bias of a tile whose keys begin ``distance`` before its queries."""
    # Keys are the inner axis, so that a thread needs few addresses.
    distance = tl.minimum(tl.maximum(distance, -bias.zero - M), bias.width - bias.zero + N)
    queries = at + (bias.width - 1 - bias.zero - distance + PAD) - tl.arange(0, M)
    if KEYS_FIRST:
        places = queries[None, :] + tl.arange(0, N)[:, None]
    else:
        places = queries[:, None] + tl.arange(0, N)[None, :]
    if bias.has_ptx:
        # In the layout of the scores: Triton's own load would use another one and convert it.
        tile = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [places], tl.float32, is_pure=True, pack=1
        )
    else:
        tile = tl.load(places)
    if KEYS_FIRST:
        tile = tile.T
    return tile


@triton.jit
def begin_table(
    bias, head, own, i0, j0,
    M: tl.constexpr, N: tl.constexpr, PLACE: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """All tiles of a diagonal have one bias."""
    state = ()
    if WALK == DIAGONAL:
        state = table_tile(bias, head.at, i0 - j0, M, N, False)
    return state


@triton.jit
def add_table(
    scores, state, rows, columns, bias, tile, scale, PLACE: tl.constexpr, WALK: tl.constexpr
):
    scores *= scale
    if WALK == DIAGONAL:
        scores += state
    elif PLACE == BEFORE:
        scores += tl.load(rows.at)
    elif PLACE == AFTER:
        scores += tl.load(rows.at + PAD + bias.width - 1)
    else:
        scores += table_tile(
            bias, rows.at, tile.i0 - tile.j0, scores.shape[0], scores.shape[1], WALK == KEYS
        )
    return scores, state, ()


@triton.jit
def open_table(bias, M: tl.constexpr, N: tl.constexpr, WALK: tl.constexpr):
    state = ()
    if WALK == DIAGONAL:
        state = tl.zeros((M, N), tl.float32)
    elif WALK == QUERIES:
        nothing = tl.zeros((M,), tl.float32)
        state = TableSums(nothing, nothing)
    return state


@triton.jit
def collect_table(
    state, ds, dx, rows, columns, bias, tile, PLACE: tl.constexpr, WALK: tl.constexpr
):
    if WALK == DIAGONAL:
        state += ds
    elif WALK == QUERIES:
        column = tile.i[:, None] - tile.j[None, :] + bias.zero
        beyond = state.beyond_last
        before = state.before_first
        if bias.beyond_last is not None and PLACE == BEFORE:
            beyond += tl.sum(ds, 1)
        elif bias.beyond_last is not None and PLACE == NEAR:
            beyond += tl.sum(tl.where(column >= bias.width, ds, 0.0), 1)
        if bias.before_first is not None and PLACE != BEFORE:
            before += tl.sum(tl.where(column < 0, ds, 0.0), 1)
        state = TableSums(beyond, before)
    return state, dx


@triton.jit
def close_table(state, dx, own, bias, sees, at, WALK: tl.constexpr):
    if WALK == DIAGONAL:
        # Skew the tile so that its diagonals become columns.
        M: tl.constexpr = state.shape[0]
        place = tl.arange(0, 2 * M)
        source = tl.arange(0, M)[:, None] - place[None, :] + M
        inside = (source >= 0) & (source < M)
        skewed = tl.gather(state, tl.where(inside, source, 0), 1)
        to = bias.by_diagonal + at.number * (2 * M) + place
        tl.store(to, tl.sum(tl.where(inside, skewed, 0.0), 0))
    elif WALK == QUERIES:
        block = number_of(at, sees)
        if bias.beyond_last is not None:
            sums = tl.where(at.present, state.beyond_last, 0.0)
            tl.store(bias.beyond_last + block, tl.sum(sums))
        if bias.before_first is not None:
            sums = tl.where(at.present, state.before_first, 0.0)
            tl.store(bias.before_first + block, tl.sum(sums))
    return state, dx


@triton.jit
def few_tables(bias, sees, b, h, i):
    return TableRows(bias.padded + h * bias.padded_h)


@triton.jit
def add_few_tables(products, rows, bias, sees, b, h, i, j, k, seen, scale):
    distance = i[:, None] - j[None, :]
    column = tl.minimum(tl.maximum(distance + bias.zero, 0), bias.width - 1)
    numbers = tl.load(rows.at[:, None] + column.to(tl.int64) * bias.padded_t)
    return products * scale + numbers.to(tl.float32) * LOG2E


HOOKS = hooks(
    has_far_keys=True,
    has_far_queries=True,
    head=head_table,
    rows=table_rows,
    spans=near_tiles,
    query_spans=near_blocks,
    begin=begin_table,
    add=add_table,
    open=open_table,
    collect=collect_table,
    close=close_table,
    few_rows=few_tables,
    few=add_few_tables,
)


@triton.jit
def pad_table(values, padded, values_h, values_t, width, BLOCK: tl.constexpr):
    """A head's table from its largest distance on, in units of log2, with copies of its ends."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.program_id(1).to(tl.int64)
    column = tl.minimum(tl.maximum(width - 1 + PAD - at, 0), width - 1)
    numbers = tl.load(values + h * values_h + column.to(tl.int64) * values_t).to(tl.float32)
    size = width + 2 * PAD
    tl.store(padded + h * size + at, numbers * LOG2E, mask=at < size)


@triton.jit
def fold_table(
    by_diagonal, before_first, beyond_last, to, width, zero, nearest, furthest, diagonals,
    batch, blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a head's table from the sums of its diagonals.

    The first column also has the distances before it, and the last those beyond it. No column is
    computed as what the others leave of the sum of all ``dS`` of the head, although that sum is
    known: the rounding of the output in ``delta`` would all be in that column.
    """
    h = tl.program_id(0).to(tl.int64)
    before = 0.0
    beyond = 0.0
    if before_first is not None:
        before = sum_blocks(before_first, batch, blocks)
    if beyond_last is not None:
        beyond = sum_blocks(beyond_last, batch, blocks)
    for chunk in range(0, width, 1024):
        column = chunk + tl.arange(0, 1024)
        here = column - zero - nearest
        inside = (here >= 0) & (column - zero <= furthest)
        diagonal = here // BLOCK
        at = by_diagonal + (h * diagonals + diagonal) * (2 * BLOCK) + here % BLOCK
        # The second half of a diagonal's distances are the first half of the next one's.
        made = tl.load(at + BLOCK, mask=inside, other=0.0)
        made += tl.load(at + 2 * BLOCK, mask=inside & (diagonal + 1 < diagonals), other=0.0)
        made += tl.where(column == 0, before, 0.0) + tl.where(column == width - 1, beyond, 0.0)
        tl.store(to + h * width + column, made.to(to.dtype.element_ty), mask=column < width)


def prepare_few(walks: Walks) -> Prepared:
    """The table of a call as it is."""
    values = walks.call.bias.values
    bias = Table(
        hooks=HOOKS,
        padded=values,
        padded_h=values.stride(0),
        padded_t=values.stride(1),
        width=values.shape[1],
        zero=walks.call.bias.zero,
        beyond_last=NOTHING,
        before_first=NOTHING,
        by_diagonal=NOTHING,
        has_ptx=Constant(walks.target.vendor == "nvidia"),
    )
    tiles = walks.number_tiles()
    if walks.width <= 64 and not walks.is_exact:
        tiles = tiles._replace(to_queries=(64, 64, 4, 3))
    return Prepared(bias, tiles)


def prepare(walks: Walks) -> Prepared:
    """The padded table of a call."""
    values = walks.call.bias.values
    heads, width = values.shape
    size = width + 2 * PAD.value
    padded = walks.plan.empty((heads, size), torch.float32)
    arguments = values, padded, *values.stride(), width
    grid = cdiv(size, 1024), heads
    walks.plan.launch(pad_table, grid, arguments, {"BLOCK": 1024}, **OPTIONS)
    found = prepare_few(walks)
    return found._replace(bias=found.bias._replace(padded=padded, padded_h=size, padded_t=1))


def gradient_of(
    walks: Walks, prepared: Prepared, above: Above, results: Mapping[str, Operand]
) -> Gradient:
    """Sums along diagonals, and of distances past the ends by blocks of queries."""
    plan, call, (batch, heads) = walks.plan, walks.call, walks.q.shape[:2]
    to, zero = results["values"], call.bias.zero
    width, block = to.shape[1], prepared.tiles.to_bias[0]
    nearest, furthest, has_beyond = _distances(walks, width)
    diagonals = cdiv(furthest - nearest, block) + 1 if nearest <= furthest else 0
    blocks = walks.blocks(prepared.tiles.to_queries)
    shape = batch, heads, blocks
    beyond = plan.empty(shape, torch.float32) if has_beyond else NOTHING
    before = NOTHING if call.causal else plan.empty(shape, torch.float32)
    by_diagonal = plan.empty((heads, diagonals, 2 * block), torch.float32)
    bias = prepared.bias._replace(beyond_last=beyond, before_first=before, by_diagonal=by_diagonal)
    numbers = width, zero, nearest, furthest, diagonals, batch, blocks
    arguments = by_diagonal, before, beyond, to, *numbers
    fold = fold_table, (heads,), arguments, {"BLOCK": block}
    return Gradient(bias, (fold,), diagonals, nearest)


def _distances(walks: Walks, width: int) -> tuple[int, int, bool]:
    """The nearest and the furthest distance that is seen and has a column; if any is beyond it."""
    call, zero = walks.call, walks.call.bias.zero
    nearest = max(-zero, 0) if call.causal else -zero
    longest = max(walks.k.shape[2], call.start + walks.q.shape[2]) - 1
    if call.window is not None:
        nearest, longest = max(nearest, -call.window[1]), min(longest, call.window[0])
    last = width - 1 - zero
    return nearest, min(last, longest), last < longest
