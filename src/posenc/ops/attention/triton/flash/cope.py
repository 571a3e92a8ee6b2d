"""CoPE: positions that gates of the scores count, and levels at them.

A query's position of key ``j`` is the sum of the gates of keys ``j`` to its own. `count_gates`
counts, before any walk, from the query's own tile backwards, until all queries of a block have
counted to the last position; earlier tiles have the level of that one, and no gate is needed. The
walks then take tiles in any order, and the gradient of a gate is the sum of those of the positions
of its key and of earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from posenc.ops.attention.triton.flash.parts import (
    BEFORE,
    LN2,
    LOG2E,
    NO_HOOKS,
    QUERIES,
    block_at,
    load_tile,
    program_of,
    start_of,
    store_tile,
    tile_at,
    tiles_of,
)
from posenc.ops.attention.triton.flash.walks import (
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
from posenc.ops.plan import Constant, Operand


class Cope(NamedTuple):
    """Levels ``(B, H, Q, P)`` at whole positions, and how far was counted before each tile."""

    hooks: Any
    levels: Any  # Rows
    counted: Any  # (B, H, Q, tiles)
    near: Any  # the first tile with gates of each block of queries, (B, H, blocks)
    passed: Any  # sums of positions' gradients of tiles before, (B, H, Q, tiles), or None
    to_levels: Any  # Rows, or None
    last: Any  # position


class CopeRows(NamedTuple):
    """The levels of a block of queries, and where it was counted."""

    levels: Any
    at: Any
    present: Any
    near: Any


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
    sequence = block.b * sees.heads + block.h
    tiles = (sees.keys + M - 1) // M
    blocks = (sees.queries + M - 1) // M
    near = tl.load(bias.near + sequence * blocks + block.row0 // M)
    at = (sequence * sees.queries + block.rows) * tiles
    return CopeRows(levels.to(tl.float32), at, block.present, near)


@triton.jit
def counted_tiles(bias, rows, i0, begin, end, M: tl.constexpr, N: tl.constexpr):
    return rows.near, end


@triton.jit
def last_level(levels, LAST: tl.constexpr):
    places = tl.arange(0, levels.shape[1])[None, :]
    return tl.sum(tl.where(places == LAST, levels, 0.0), 1)


@triton.jit
def gates_of(scores, seen, counts, LAST: tl.constexpr):
    """The gates of a tile, and its positions."""
    gates = tl.sigmoid(scores * LN2)
    if seen is not None:
        gates = tl.where(seen, gates, 0.0)
    return gates, tl.minimum(counts[:, None] + tl.cumsum(gates, 1, reverse=True), LAST * 1.0)


@triton.jit
def add_levels(
    scores, state, rows, columns, bias, tile, scale, PLACE: tl.constexpr, WALK: tl.constexpr
):
    scores *= scale
    kept = ()
    flat = last_level(rows.levels, bias.last) * LOG2E
    if PLACE == BEFORE:
        scores += flat[:, None]
    else:
        n = tile.j0 // tile.j.shape[0]
        counts = tl.load(bias.counted + rows.at + n, mask=rows.present, other=bias.last * 1.0)
        gates = tl.zeros_like(scores)
        places = gates + bias.last
        slopes = gates
        level = gates + flat[:, None]
        if tl.min(counts) < bias.last:
            gates, places = gates_of(scores, tile.seen, counts, bias.last)
            below = tl.floor(places).to(tl.int32)
            left = tl.gather(rows.levels, below, 1)
            slopes = tl.gather(rows.levels, tl.minimum(below + 1, bias.last), 1) - left
            level = (left + slopes * (places - below.to(tl.float32))) * LOG2E
        scores += level
        kept = Gates(gates, places, slopes)
    return scores, state, kept


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
def collect_levels(
    state, ds, dx, rows, columns, kept, bias, tile, PLACE: tl.constexpr, WALK: tl.constexpr
):
    if PLACE == BEFORE and WALK == QUERIES:
        state = Levels(state.passed, state.to_levels, state.to_last + tl.sum(ds, 1))
    elif PLACE != BEFORE:
        n = tile.j0 // tile.j.shape[0]
        by_place = tl.where(kept.places < bias.last, ds * kept.slopes, 0.0)
        if WALK == QUERIES:
            tl.store(bias.passed + rows.at + n, state.passed, mask=rows.present)
            to_levels = to_places(state.to_levels, ds, kept.places, bias.last)
            earlier = state.passed
            state = Levels(state.passed + tl.sum(by_place, 1), to_levels, state.to_last)
        else:
            earlier = tl.load(bias.passed + rows.at + n, mask=rows.present, other=0.0)
        earlier = earlier[:, None] + tl.cumsum(by_place, 1)
        # Past the last position there are no gates, and nothing was passed.
        of_gates = earlier * kept.gates * (1.0 - kept.gates)
        ds += tl.where(kept.places < bias.last, of_gates, 0.0)
    return state, ds, dx


@triton.jit
def close_levels(state, dx, own, bias, sees, at, WALK: tl.constexpr):
    if bias.passed is not None and WALK == QUERIES:
        places = tl.arange(0, bias.levels.block)[None, :]
        to = state.to_levels + tl.where(places == bias.last, state.to_last[:, None], 0.0)
        store_tile(bias.to_levels, at.b, at.h, at.rows, at.present, to)
    return state, dx


HOOKS = NO_HOOKS._replace(
    has_far_keys=True,
    masks_all=True,
    keys_first=False,
    rows=cope_rows,
    spans=counted_tiles,
    add=add_levels,
    open=open_levels,
    collect=collect_levels,
    close=close_levels,
)


@triton.jit
def count_gates(
    q, k, counted, near, sees, scale, LAST: tl.constexpr, M: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """How far each query has counted before each tile of as many keys as queries."""
    b, h, row0 = program_of(sees, M)
    block = block_at(sees, b, h, start_of(sees, b), row0, M)
    query = load_tile(q, b, h, row0, sees.queries, M, True)
    sequence = b * sees.heads + h
    tiles = (sees.keys + M - 1) // M
    to = counted + (sequence * sees.queries + block.rows) * tiles
    begin, end = tiles_of(block, M)
    counts = tl.zeros((M,), tl.float32)
    n = end - 1
    # A query that sees no key from here on has counted.
    while (n >= begin) & (tl.min(tl.where(block.low < (n + 1) * M, counts, LAST * 1.0)) < LAST):
        key = load_tile(k, b, h // sees.group, n * M, sees.keys, M, True)
        scores = tl.dot(query, key.T, input_precision=PRECISION) * scale
        tile = tile_at(block, sees, n * M, M, True)
        tl.store(to + n, counts, mask=block.present)
        gates = tl.where(tile.seen, tl.sigmoid(scores * LN2), 0.0)
        counts += tl.sum(gates, 1)
        n -= 1
    blocks = (sees.queries + M - 1) // M
    tl.store(near + sequence * blocks + row0 // M, n + 1)
    # The other tiles have no gates.
    for m in tl.range(0, tiles):
        if (m <= n) | (m >= end):
            tl.store(to + m, counts * 0.0 + LAST, mask=block.present)


# Queries and keys of all tiles, then warps and stages of each walk: of halves in heads up to 64, up
# to 128 and wider, then of float32 in the same heads.
TILES = (
    (64, ((4, 2), (4, 2), (8, 1))),
    (64, ((4, 2), (4, 2), (8, 1))),
    (32, ((4, 1), (4, 1), (4, 1))),
    (32, ((4, 1), (4, 1), (4, 1))),
    (32, ((4, 1), (4, 1), (4, 1))),
    (16, ((4, 1), (4, 1), (4, 1))),
)


def prepare(walks: Walks) -> Prepared:
    """Count the gates of a call."""
    plan, q, k = walks.plan, walks.q, walks.k
    levels = plan.with_dense_rows(walks.call.bias.levels)
    wide = max(walks.width, levels.shape[3])
    at = (wide > 64) + (wide > 128) + (3 if walks.is_exact else 0)
    block, settings = TILES[at]
    tiles = Tiles(*[(block, block, *of_walk) for of_walk in (*settings, (4, 1))])
    blocks, last = walks.blocks(tiles.forward), levels.shape[3] - 1
    counted = plan.empty((*q.shape[:3], -(-k.shape[2] // block)), torch.float32)
    near = plan.empty((*q.shape[:2], blocks), torch.int32)
    constants = {"LAST": last, "M": block, "PRECISION": walks.precision}
    scale = walks.call.scale * LOG2E.value
    arguments = rows_of(q), rows_of(k), counted, near, walks.sees, scale
    grid = (blocks * walks.sequences,)
    plan.launch(count_gates, grid, arguments, constants, **OPTIONS, num_warps=4)
    bias = Cope(
        hooks=hooks(HOOKS),
        levels=rows_of(levels),
        counted=counted,
        near=near,
        passed=NOTHING,
        to_levels=NOTHING,
        last=Constant(last),
    )
    return Prepared(bias, tiles)


def gradient_of(
    walks: Walks, prepared: Prepared, above: Above, results: Mapping[str, Operand]
) -> Gradient:
    """The gradient of levels, which the walk to queries makes."""
    to_levels = rows_of(results["levels"])
    passed = walks.plan.empty(prepared.bias.counted.shape, torch.float32)
    return Gradient(prepared.bias._replace(passed=passed, to_levels=to_levels))
