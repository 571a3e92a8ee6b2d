"""CoPE: positions that gates of the scores count, and levels at them.

A query's position of key ``j`` is the sum of the gates of keys ``j`` to its own. `count_gates`
counts, before any walk, from the query's own tile backwards, until all queries of a block have
counted to the last position; earlier tiles have the level of that one, and no gate is needed. The
walks then take tiles in any order, and the gradient of a gate is the sum of those of the positions
of its key and of earlier ones.

A number for each query and tile is kept for a backward pass, and for few queries. `forward` takes
the gates of its tiles, which it visits in order, from a query's sum of all of them instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from posenc.ops.attention.triton.parts import (
    BEFORE,
    LN2,
    LOG2E,
    QUERIES,
    block_at,
    load_tile,
    number_of,
    program_of,
    start_of,
    store_tile,
    tile_at,
    tiles_of,
)
from posenc.ops.attention.triton.walks import (
    NOTHING,
    OPTIONS,
    Above,
    Gradient,
    Prepared,
    Tiles,
    Walks,
    hooks,
    rows_of,
)
from posenc.ops.plan import Constant, Operand, cdiv

# Queries of a block that count together, where there are few.
FEW = tl.constexpr(16)


class Cope(NamedTuple):
    """Levels ``(B, H, Q, P)`` at whole positions, and how far was counted before each tile."""

    hooks: Any
    levels: Any  # Rows
    totals: Any  # of gates of each query, (B, H, Q)
    counted: Any  # (B, H, tiles, Q), or None; only tiles with gates are written
    gated: Any  # the first of these of each block of queries, and the one after, (B, H, blocks, 2)
    passed: Any  # sums of positions' gradients of tiles before, as `counted`, or None
    to_levels: Any  # Rows, or None
    last: Any  # position
    queries: Any  # of a sequence
    block: Any  # keys of a tile


class CopeRows(NamedTuple):
    """The levels of queries, their gates, where the first tile was counted, the gated tiles."""

    levels: Any
    total: Any
    at: Any
    present: Any
    begin: Any
    end: Any


class Gates(NamedTuple):
    """The gates of a tile, its positions, and the slopes of their levels."""

    gates: Any
    places: Any
    slopes: Any


class Levels(NamedTuple):
    """The sums of positions' gradients of earlier tiles, and the gradients of levels."""

    passed: Any
    to_levels: Any
    to_last: Any


@triton.jit
def cope_rows(bias, head, sees, block, q):
    M: tl.constexpr = block.rows.shape[0]
    levels = load_tile(bias.levels, block.b, block.h, block.row0, sees.queries, M, True)
    gated = bias.gated + 2 * number_of(block, sees)
    tiles = (sees.keys + bias.block - 1) // bias.block
    at = (block.b * sees.heads + block.h) * tiles * sees.queries + block.rows
    total = ()
    if bias.counted is None:
        of_head = (block.b * sees.heads + block.h) * sees.queries
        total = tl.load(bias.totals + of_head + block.rows, mask=block.present, other=0.0)
    begin = tl.load(gated)
    return CopeRows(levels.to(tl.float32), total, at, block.present, begin, tl.load(gated + 1))


@triton.jit
def gated_tiles(bias, rows, i0, begin, end, M: tl.constexpr, N: tl.constexpr):
    return rows.begin, end


@triton.jit
def cope_columns(bias, head, sees, b, h, j0, k):
    """Where the blocks of queries of a head say which of their tiles have gates."""
    N: tl.constexpr = k.shape[0]
    blocks = (sees.queries + N - 1) // N
    return bias.gated + 2 * (b * sees.heads + h) * blocks


@triton.jit
def gated_blocks(bias, columns, start, j0, begin, end, M: tl.constexpr, N: tl.constexpr):
    """No block from the second of these on has gates of a tile of keys."""
    far = begin
    for m in range(begin, end, 64):
        block = m + tl.arange(0, 64)
        first = tl.load(columns + 2 * block, mask=block < end, other=0)
        is_gated = (block < end) & (first <= j0 // N)
        far = tl.maximum(far, tl.max(tl.where(is_gated, block + 1, begin)))
    return begin, far


@triton.jit
def place_of(rows, bias, n):
    """Where sums of a tile are, and whether it has gates: there are none if not."""
    number = tl.zeros_like(rows.at) + n
    has_gates = rows.present & (number >= rows.begin) & (number < rows.end)
    return rows.at + bias.queries.to(tl.int64) * n, has_gates


@triton.jit
def last_level(levels, LAST: tl.constexpr):
    places = tl.arange(0, levels.shape[1])[None, :]
    return tl.sum(tl.where(places == LAST, levels, 0.0), 1)


@triton.jit
def gates_of(scores, seen):
    return tl.where(seen, tl.sigmoid(scores * LN2), 0.0)


@triton.jit
def gated_levels(gates, counts, levels, LAST: tl.constexpr):
    """The levels at the positions of a tile, in units of log2, and what their gradient needs."""
    places = tl.minimum(counts[:, None] + tl.cumsum(gates, 1, reverse=True), LAST * 1.0)
    below = tl.floor(places).to(tl.int32)
    left = tl.gather(levels, below, 1)
    slopes = tl.gather(levels, tl.minimum(below + 1, LAST), 1) - left
    level = left + slopes * (places - below.to(tl.float32))
    return level * LOG2E, Gates(gates, places, slopes)


@triton.jit
def add_levels(
    scores, state, rows, columns, bias, tile, scale, PLACE: tl.constexpr, WALK: tl.constexpr
):
    scores *= scale
    kept = ()
    if PLACE == BEFORE:
        scores += (last_level(rows.levels, bias.last) * LOG2E)[:, None]
    else:
        gates = gates_of(scores, tile.seen)
        if bias.counted is None:
            state -= tl.sum(gates, 1)
            # Of the last tile, but for rounding, it is zero.
            counts = tl.maximum(state, 0.0)
        else:
            at, has_gates = place_of(rows, bias, tile.j0 // bias.block)
            counts = tl.load(bias.counted + at, mask=has_gates, other=bias.last * 1.0)
        level, kept = gated_levels(gates, counts, rows.levels, bias.last)
        scores += level
    return scores, state, kept


@triton.jit
def begin_levels(
    bias, head, own, i0, j0,
    M: tl.constexpr, N: tl.constexpr, PLACE: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """The gates of a block's tiles from the first one with gates on."""
    state = ()
    if bias.counted is None and PLACE != BEFORE:
        state = own.total
    return state


@triton.jit
def open_levels(bias, M: tl.constexpr, N: tl.constexpr, WALK: tl.constexpr):
    state = ()
    if bias.passed is not None and WALK == QUERIES:
        nothing = tl.zeros((M,), tl.float32)
        state = Levels(nothing, tl.zeros((M, bias.levels.block), tl.float32), nothing)
    return state


@triton.jit
def to_places(dl, ds, places, LAST: tl.constexpr):
    """Add to the gradients of levels: a position's is shared by the two next to it."""
    position = tl.arange(0, dl.shape[1])[None, :]
    begin = tl.floor(tl.min(places)).to(tl.int32)
    end = tl.minimum(tl.floor(tl.max(places)).to(tl.int32) + 2, LAST + 1)
    for n in tl.range(begin, end):
        share = tl.maximum(1.0 - tl.abs(places - n * 1.0), 0.0)
        dl += tl.where(position == n, tl.sum(ds * share, 1)[:, None], 0.0)
    return dl


@triton.jit
def add_gates(state, ds, rows, kept, bias, tile, PLACE: tl.constexpr, WALK: tl.constexpr):
    """Add the gradients of scores by way of their gates."""
    if PLACE == BEFORE and WALK == QUERIES:
        state = Levels(state.passed, state.to_levels, state.to_last + tl.sum(ds, 1))
    elif PLACE != BEFORE:
        at, has_gates = place_of(rows, bias, tile.j0 // bias.block)
        by_place = tl.where(kept.places < bias.last, ds * kept.slopes, 0.0)
        if WALK == QUERIES:
            tl.store(bias.passed + at, state.passed, mask=has_gates)
            to_levels = to_places(state.to_levels, ds, kept.places, bias.last)
            earlier = state.passed
            state = Levels(state.passed + tl.sum(by_place, 1), to_levels, state.to_last)
        else:
            earlier = tl.load(bias.passed + at, mask=has_gates, other=0.0)
        earlier = earlier[:, None] + tl.cumsum(by_place, 1)
        # Past the last position there are no gates, and nothing was passed.
        of_gates = earlier * kept.gates * (1.0 - kept.gates)
        ds += tl.where(kept.places < bias.last, of_gates, 0.0)
    return state, ds


@triton.jit
def close_levels(state, dx, own, bias, sees, at, WALK: tl.constexpr):
    if bias.passed is not None and WALK == QUERIES:
        places = tl.arange(0, bias.levels.block)[None, :]
        to = state.to_levels + tl.where(places == bias.last, state.to_last[:, None], 0.0)
        store_tile(bias.to_levels, at.b, at.h, at.rows, at.present, to)
    return state, dx


@triton.jit
def few_levels(bias, sees, b, h, i):
    """As `cope_rows`, of queries of several heads."""
    t = i - start_of(sees, b)
    places = tl.arange(0, bias.levels.block)
    at = b * bias.levels.b + h * bias.levels.h + t.to(tl.int64) * bias.levels.t
    inside = (places < bias.levels.width)[None, :]
    levels = tl.load(bias.levels.at + at[:, None] + places[None, :], mask=inside, other=0.0)
    sequence = b * sees.heads + h
    blocks = (sees.queries + FEW - 1) // FEW
    gated = bias.gated + 2 * (sequence * blocks + t // FEW)
    tiles = (sees.keys + bias.block - 1) // bias.block
    present = t < sees.queries
    at = sequence * tiles * sees.queries + t
    return CopeRows(levels.to(tl.float32), (), at, present, tl.load(gated), tl.load(gated + 1))


@triton.jit
def add_few_levels(products, rows, bias, sees, b, h, i, j, k, seen, scale):
    scores = products * scale
    n = tl.min(j) // bias.block
    level = tl.zeros_like(scores) + (last_level(rows.levels, bias.last) * LOG2E)[:, None]
    if n >= tl.min(rows.begin):
        at, has_gates = place_of(rows, bias, n)
        counts = tl.load(bias.counted + at, mask=has_gates, other=bias.last * 1.0)
        level, _ = gated_levels(gates_of(scores, seen), counts, rows.levels, bias.last)
    return scores + level


HOOKS = hooks(
    has_far_keys=True,
    has_far_queries=True,
    masks_all=True,
    keys_first=False,
    rows=cope_rows,
    columns=cope_columns,
    spans=gated_tiles,
    query_spans=gated_blocks,
    begin=begin_levels,
    add=add_levels,
    open=open_levels,
    to_scores=add_gates,
    close=close_levels,
    few_rows=few_levels,
    few=add_few_levels,
)


@triton.jit
def count_gates(
    q, k, totals, counted, gated, sees, scale,
    LAST: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """How far each query has counted before each tile of keys, until all of a block have."""
    b, h, row0 = program_of(sees, M)
    block = block_at(sees, b, h, start_of(sees, b), row0, M)
    query = load_tile(q, b, h, row0, sees.queries, M, True)
    tiles = (sees.keys + N - 1) // N
    sequence = b * sees.heads + h
    begin, end = tiles_of(block, N)
    counts = tl.zeros((M,), tl.float32)
    n = end - 1
    # A query that sees no key from here on has counted.
    while (n >= begin) & (tl.min(tl.where(block.low < (n + 1) * N, counts, LAST * 1.0)) < LAST):
        key = load_tile(k, b, h // sees.group, n * N, sees.keys, N, True)
        scores = tl.dot(query, key.T, input_precision=PRECISION) * scale
        tile = tile_at(block, sees, n * N, N, True)
        if counted is not None:
            to = counted + (sequence * tiles + n) * sees.queries + block.rows
            tl.store(to, counts, mask=block.present)
        counts += tl.sum(gates_of(scores, tile.seen), 1)
        n -= 1
    tl.store(totals + sequence * sees.queries + block.rows, counts, mask=block.present)
    to = gated + 2 * number_of(block, sees)
    tl.store(to, n + 1)
    tl.store(to + 1, end)


# Queries and keys of all tiles, then warps and stages of each walk: of halves in heads up to 64, up
# to 128 and wider, then of float32 in the same heads.
TILES = (
    (64, ((4, 3), (4, 3), (4, 3))),
    (64, ((4, 1), (4, 1), (4, 1))),
    (32, ((4, 1), (4, 1), (4, 1))),
    (32, ((4, 1), (4, 1), (4, 1))),
    (32, ((4, 1), (4, 1), (4, 1))),
    (16, ((4, 1), (4, 1), (4, 1))),
)


def prepare(walks: Walks) -> Prepared:
    """Count the gates of a call."""
    levels, q = walks.call.bias.levels, walks.q
    wide = max(walks.width, levels.shape[3])
    at = (wide > 64) + (wide > 128) + (3 if q.dtype == torch.float32 else 0)
    block, settings = TILES[at]
    tiles = Tiles(*[(block, block, *of_walk) for of_walk in (*settings, (4, 1))])
    return Prepared(_count(walks, block, block, walks.is_backward), tiles)


def prepare_few(walks: Walks) -> Prepared:
    """Count the gates of few queries."""
    tiles = Tiles(*[(0, 0, 0, 0)] * 4)
    return Prepared(_count(walks, FEW.value, walks.few_keys, True), tiles)


def _count(walks: Walks, block: int, keys: int, each: bool) -> Cope:
    """What blocks of queries counted, also before ``each`` tile of keys."""
    plan, q, k = walks.plan, walks.q, walks.k
    levels = plan.with_dense_rows(walks.call.bias.levels)
    (batch, heads, queries, _), last = q.shape, levels.shape[3] - 1
    blocks = cdiv(queries, block)
    totals, counted = plan.empty((batch, heads, queries), torch.float32), NOTHING
    if each:
        counted = plan.empty((batch, heads, cdiv(k.shape[2], keys), queries), torch.float32)
    gated = plan.empty((batch, heads, blocks, 2), torch.int32)
    constants = {"LAST": last, "M": block, "N": keys, "PRECISION": walks.precision}
    scale = walks.call.scale * LOG2E.value
    arguments = rows_of(q), rows_of(k), totals, counted, gated, walks.sees, scale
    grid = (blocks * walks.sequences,)
    plan.launch(count_gates, grid, arguments, constants, **OPTIONS, num_warps=4)
    return Cope(
        hooks=HOOKS,
        levels=rows_of(levels),
        totals=totals,
        counted=counted,
        gated=gated,
        passed=NOTHING,
        to_levels=NOTHING,
        last=Constant(last),
        queries=queries,
        block=Constant(keys),
    )


def gradient_of(
    walks: Walks, prepared: Prepared, above: Above, results: Mapping[str, Operand]
) -> Gradient:
    """The gradient of levels, which the walk to queries makes."""
    to_levels = rows_of(results["levels"])
    passed = walks.plan.empty(prepared.bias.counted.shape, torch.float32)
    return Gradient(prepared.bias._replace(passed=passed, to_levels=to_levels))
