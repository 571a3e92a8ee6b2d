"""The gradients of queries, of keys and values, and of a bias that is summed along diagonals.

With weights ``P`` and ``dP = dO V^T``, the gradient of a score is ``dS = P (dP - delta)``, where
``delta`` is the row sum of ``dO * O`` less the gradient of the log-sum-exp. Each program owns what
it writes, so that sums have one order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from posenc.ops.attention.triton.parts import (
    AFTER,
    BEFORE,
    DIAGONAL,
    KEYS,
    NEAR,
    QUERIES,
    RANGE,
    Tile,
    block_at,
    clip,
    load_lse,
    load_tile,
    product,
    program_of,
    start_of,
    store_tile,
    tile_at,
    tiles_of,
)


class Diagonal(NamedTuple):
    """A part of a diagonal of tiles, and its number among those of all heads and parts."""

    h: Any
    number: Any


@triton.jit
def score_gradient(scores, seen, lse, dp, delta, MASKED: tl.constexpr):
    """The weights of a tile, and the gradient of its scores."""
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    weights = tl.exp2(scores - lse[:, None])
    return weights, weights * (dp - delta[:, None])


@triton.jit
def visit_keys(
    state, q, g, lse, delta, k, v, bias, head, rows, block, sees, kv, scale, begin, end,
    N: tl.constexpr, PLACE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients from the tiles of keys ``begin .. end - 1``."""
    M: tl.constexpr = q.shape[0]
    dq, collected = state
    carried = bias.hooks.begin(bias, head, rows, block.i0, begin * N, M, N, PLACE, QUERIES)
    for n in tl.range(begin, end):
        keys = load_tile(k, block.b, kv, n * N, sees.keys, N, MASKED)
        values = load_tile(v, block.b, kv, n * N, sees.keys, N, MASKED)
        scores = product(q, keys, False, PRECISION)
        tile = tile_at(block, sees, n * N, N, MASKED)
        columns = bias.hooks.columns(bias, head, sees, block.b, block.h, n * N, keys)
        scores, carried, kept = bias.hooks.add(
            scores, carried, rows, columns, bias, tile, scale, PLACE, QUERIES
        )
        dp = product(g, values, False, PRECISION)
        _, ds = score_gradient(scores, tile.seen, lse, dp, delta, MASKED)
        collected, ds = bias.hooks.to_scores(collected, ds, rows, kept, bias, tile, PLACE, QUERIES)
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=PRECISION)
        collected, dq = bias.hooks.collect(
            collected, ds, dq, rows, columns, bias, tile, PLACE, QUERIES
        )
    return dq, collected


@triton.jit
def to_queries(
    q, k, v, g, out, dq, lse, g_lse, delta, bias, sees, ranges, scale, natural_scale,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries, and ``delta``, which the other walks read."""
    b, h, row0 = program_of(sees, M)
    kv = h // sees.group
    block = block_at(sees, b, h, start_of(sees, b), row0, M)
    query = load_tile(q, b, h, row0, sees.queries, M, True)
    grad = load_tile(g, b, h, row0, sees.queries, M, True)
    made = load_tile(out, b, h, row0, sees.queries, M, True)
    sequence = b * sees.heads + h
    of_head = sequence * sees.queries
    minus = tl.sum(grad.to(tl.float32) * made.to(tl.float32), 1)
    if g_lse is not None:
        minus -= tl.load(g_lse + of_head + block.rows, mask=block.present, other=0.0)
    tl.store(delta + of_head + block.rows, minus, mask=block.present)
    head = bias.hooks.head(bias, b, h)
    rows = bias.hooks.rows(bias, head, sees, block, query)
    sums = load_lse(lse + of_head, block.rows, block.present)
    sums -= bias.hooks.row_part(bias, rows, block)
    begin, end = tiles_of(block, N)
    if ranges is not None:
        count = (sees.queries + RANGE - 1) // RANGE
        saved = ranges + (sequence * count + row0 // RANGE) * 2
        begin = tl.maximum(begin, tl.load(saved) // N)
        end = tl.minimum(end, (tl.load(saved + 1) + N - 1) // N)
    masked: tl.constexpr = sees.is_cut or bias.hooks.masks_all
    # Tiles from the edge on have keys that are not seen.
    edge = end
    if bias.hooks.masks_all:
        pass
    elif sees.is_causal:
        edge = clip((tl.minimum(block.i0, sees.keys - 1) + 1) // N, begin, tl.maximum(begin, end))
    elif not sees.is_cut:
        edge = tl.minimum(sees.keys // N, end)
    state = tl.zeros((M, q.block), tl.float32), bias.hooks.open(bias, M, N, QUERIES)
    near = begin
    far = edge
    if bias.hooks.has_far_keys:
        near, after = bias.hooks.spans(bias, rows, block.i0, begin, edge, M, N)
        near = clip(near, begin, tl.maximum(begin, edge))
        state = visit_keys(
            state, query, grad, sums, minus, k, v, bias, head, rows, block, sees, kv, scale,
            begin, near, N, BEFORE, masked, PRECISION,
        )  # fmt: skip
        if not sees.is_causal:
            far = clip(after, near, tl.maximum(near, edge))
            state = visit_keys(
                state, query, grad, sums, minus, k, v, bias, head, rows, block, sees, kv, scale,
                far, edge, N, AFTER, masked, PRECISION,
            )  # fmt: skip
    state = visit_keys(
        state, query, grad, sums, minus, k, v, bias, head, rows, block, sees, kv, scale,
        near, far, N, NEAR, masked, PRECISION,
    )  # fmt: skip
    if not bias.hooks.masks_all:
        state = visit_keys(
            state, query, grad, sums, minus, k, v, bias, head, rows, block, sees, kv, scale,
            edge, end, N, NEAR, True, PRECISION,
        )  # fmt: skip
    dx, collected = state
    collected, dx = bias.hooks.close(collected, dx, rows, bias, sees, block, QUERIES)
    store_tile(dq, b, h, block.rows, block.present, dx * natural_scale)


@triton.jit
def visit_queries(
    state, k, v, q, g, lse, delta, bias, head, columns, b, h, start, j0, sees, scale, begin, end,
    M: tl.constexpr, PLACE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients from the blocks of queries ``begin .. end - 1``."""
    N: tl.constexpr = k.shape[0]
    dk, dv, collected = state
    carried = bias.hooks.begin(bias, head, columns, start + begin * M, j0, M, N, PLACE, KEYS)
    for m in tl.range(begin, end):
        block = block_at(sees, b, h, start, m * M, M)
        query = load_tile(q, b, h, m * M, sees.queries, M, True)
        grad = load_tile(g, b, h, m * M, sees.queries, M, True)
        scores = product(query, k, bias.hooks.keys_first, PRECISION)
        tile = tile_at(block, sees, j0, N, MASKED)
        rows = bias.hooks.rows(bias, head, sees, block, query)
        scores, carried, kept = bias.hooks.add(
            scores, carried, rows, columns, bias, tile, scale, PLACE, KEYS
        )
        sums = load_lse(lse, block.rows, block.present)
        sums -= bias.hooks.row_part(bias, rows, block)
        minus = tl.load(delta + block.rows, mask=block.present, other=0.0)
        dp = product(grad, v, bias.hooks.keys_first, PRECISION)
        weights, ds = score_gradient(scores, tile.seen, sums, dp, minus, MASKED)
        dv = tl.dot(weights.T.to(grad.dtype), grad, dv, input_precision=PRECISION)
        collected, ds = bias.hooks.to_scores(collected, ds, rows, kept, bias, tile, PLACE, KEYS)
        dk = tl.dot(ds.T.to(query.dtype), query, dk, input_precision=PRECISION)
        collected, dk = bias.hooks.collect(
            collected, ds, dk, rows, columns, bias, tile, PLACE, KEYS
        )
    return dk, dv, collected


@triton.jit
def to_keys(
    q, k, v, g, dk, dv, lse, delta, bias, sees, ranges, scale, natural_scale,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values."""
    tiles = (sees.keys + N - 1) // N
    j0 = tl.program_id(0) % tiles * N
    b = (tl.program_id(0) // tiles // (sees.heads // sees.group)).to(tl.int64)
    kv = (tl.program_id(0) // tiles % (sees.heads // sees.group)).to(tl.int64)
    start = start_of(sees, b)
    j = j0 + tl.arange(0, N)
    key = load_tile(k, b, kv, j0, sees.keys, N, True)
    value = load_tile(v, b, kv, j0, sees.keys, N, True)
    begin, end = blocks_of(sees, b, start, j0, M, N)
    dx = tl.zeros((N, k.block), tl.float32)
    dy = tl.zeros((N, v.block), tl.float32)
    masked: tl.constexpr = sees.is_cut or bias.hooks.masks_all
    collected = bias.hooks.open(bias, M, N, KEYS)
    for n in range(sees.group):
        h = kv * sees.group + n
        sequence = b * sees.heads + h
        lse_at = lse + sequence * sees.queries
        delta_at = delta + sequence * sees.queries
        head = bias.hooks.head(bias, b, h)
        columns = bias.hooks.columns(bias, head, sees, b, h, j0, key)
        first = begin
        last = end
        if ranges is not None:
            first, last = blocks_of_ranges(ranges, sequence, sees, j0, begin, end, M, N)
        state = dx, dy, collected
        # Blocks from this one on see all of these keys.
        full = first
        if sees.is_causal and not bias.hooks.masks_all:
            full = clip((j0 + N - 1 - start + M - 1) // M, first, last)
            state = visit_queries(
                state, key, value, q, g, lse_at, delta_at, bias, head, columns, b, h, start,
                j0, sees, scale, first, full, M, NEAR, True, PRECISION,
            )  # fmt: skip
        far = last
        if bias.hooks.has_far_queries:
            near, far = bias.hooks.query_spans(bias, columns, start, j0, first, last, M, N)
            far = clip(far, full, last)
            if not sees.is_causal:
                full = clip(near, first, far)
                state = visit_queries(
                    state, key, value, q, g, lse_at, delta_at, bias, head, columns, b, h, start,
                    j0, sees, scale, first, full, M, AFTER, masked, PRECISION,
                )  # fmt: skip
        state = visit_queries(
            state, key, value, q, g, lse_at, delta_at, bias, head, columns, b, h, start,
            j0, sees, scale, full, far, M, NEAR, masked, PRECISION,
        )  # fmt: skip
        if bias.hooks.has_far_queries:
            state = visit_queries(
                state, key, value, q, g, lse_at, delta_at, bias, head, columns, b, h, start,
                j0, sees, scale, far, last, M, BEFORE, masked, PRECISION,
            )  # fmt: skip
        dx, dy, collected = state
        at = Tile(b, h, start, j0, j, j, j < sees.keys)
        collected, dx = bias.hooks.close(collected, dx, columns, bias, sees, at, KEYS)
    store_tile(dk, b, kv, j, j < sees.keys, dx * natural_scale)
    store_tile(dv, b, kv, j, j < sees.keys, dy)


@triton.jit
def blocks_of(sees, b, start, j0, M: tl.constexpr, N: tl.constexpr):
    """The blocks of queries that may see some of a tile's keys."""
    least = start
    most = start + sees.queries - 1
    if sees.is_causal:
        least = tl.maximum(least, j0)
    if sees.left is not None:
        least = tl.maximum(least, j0 - sees.right)
        most = tl.minimum(most, j0 + N - 1 + sees.left)
    if sees.is_narrow:
        at = b * sees.ends_b + tl.minimum(j0 + tl.arange(0, N), sees.keys - 1)
        least = tl.maximum(least, tl.min(tl.load(sees.first + at).to(tl.int32)))
        most = tl.minimum(most, tl.max(tl.load(sees.last + at).to(tl.int32)))
    begin = (least - start) // M
    end = tl.where(most < least, begin, (most - start + M) // M)
    return begin, tl.minimum(end, (sees.queries + M - 1) // M)


@triton.jit
def blocks_of_ranges(ranges, sequence, sees, j0, begin, end, M: tl.constexpr, N: tl.constexpr):
    """The blocks of ``begin .. end - 1`` from the first to the last whose range has these keys."""
    count = (sees.queries + RANGE - 1) // RANGE
    saved = ranges + sequence * count * 2
    first = end
    last = begin
    for m in range(0, count, 64):
        part = m + tl.arange(0, 64)
        inside = part < count
        low = tl.load(saved + 2 * part, mask=inside, other=sees.keys)
        high = tl.load(saved + 2 * part + 1, mask=inside, other=0)
        needs = inside & (low < j0 + N) & (high > j0)
        rows = part * (RANGE // M)
        first = tl.minimum(first, tl.min(tl.where(needs, rows, end)))
        last = tl.maximum(last, tl.max(tl.where(needs, rows + RANGE // M, begin)))
    return tl.maximum(first, begin), tl.minimum(last, end)


@triton.jit
def visit_diagonal(
    collected, carried, q, k, v, g, lse, delta, bias, head, b, h, kv, start, distance, sees, scale,
    begin, end, gap, gap_size, M: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Collect from a diagonal's tiles; from block ``gap`` on, leave out ``gap_size`` blocks."""
    for n in tl.range(begin, end):
        m = n
        if MASKED:
            m = tl.where(n < gap, n, n + gap_size)
        block = block_at(sees, b, h, start, m * M, M)
        j0 = block.i0 - distance
        query = load_tile(q, b, h, m * M, sees.queries, M, MASKED)
        key = load_tile(k, b, kv, j0, sees.keys, M, MASKED)
        scores = product(query, key, False, PRECISION)
        tile = tile_at(block, sees, j0, M, MASKED)
        rows = bias.hooks.rows(bias, head, sees, block, query)
        columns = bias.hooks.columns(bias, head, sees, b, h, j0, key)
        scores, carried, _ = bias.hooks.add(
            scores, carried, rows, columns, bias, tile, scale, NEAR, DIAGONAL
        )
        sums = load_lse(lse, block.rows, block.present)
        sums -= bias.hooks.row_part(bias, rows, block)
        minus = tl.load(delta + block.rows, mask=block.present, other=0.0)
        grad = load_tile(g, b, h, m * M, sees.queries, M, MASKED)
        value = load_tile(v, b, kv, j0, sees.keys, M, MASKED)
        dp = product(grad, value, False, PRECISION)
        _, ds = score_gradient(scores, tile.seen, sums, dp, minus, MASKED)
        collected, _ = bias.hooks.collect(
            collected, ds, (), rows, columns, bias, tile, NEAR, DIAGONAL
        )
    return collected


@triton.jit
def to_bias(
    q, k, v, g, lse, delta, bias, sees, scale, nearest, batch,
    M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a bias collects from a part of a diagonal of square tiles, of all sequences.

    A tile's keys begin ``distance`` before its queries, so that all tiles of a diagonal have the
    same distances.
    """
    number = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    distance = nearest + number * M
    collected = bias.hooks.open(bias, M, M, DIAGONAL)
    for n in range(batch):
        b = tl.zeros((), tl.int64) + n
        start = start_of(sees, b)
        head = bias.hooks.head(bias, b, h)
        carried = bias.hooks.begin(bias, head, (), distance, 0, M, M, NEAR, DIAGONAL)
        # Blocks of queries with a key at this distance, and those that see all keys of their tile.
        begin = tl.maximum(distance - M + 1 - start, 0) // M
        end = tl.minimum(sees.keys - 1 + distance - start + M, sees.queries + M - 1) // M
        share = tl.cdiv(tl.maximum(end - begin, 0), tl.num_programs(2))
        begin += tl.program_id(2) * share
        end = tl.maximum(begin, tl.minimum(begin + share, end))
        inner = begin
        outer = begin
        if not (sees.is_cut or bias.hooks.masks_all):
            inner = clip(tl.maximum(distance - start + M - 1, 0) // M, begin, end)
            outer = tl.minimum(tl.maximum(sees.keys + distance - start, 0), sees.queries) // M
            outer = clip(outer, inner, end)
            if sees.is_causal:
                # The first diagonal has the tiles that the causal mask cuts.
                outer = tl.where(distance >= M - 1, outer, inner)
        of_head = (b * sees.heads + h) * sees.queries
        if not bias.hooks.masks_all:
            collected = visit_diagonal(
                collected, carried, q, k, v, g, lse + of_head, delta + of_head, bias, head, b, h,
                h // sees.group, start, distance, sees, scale, inner, outer, 0, 0, M, False,
                PRECISION,
            )  # fmt: skip
        # The others, at both ends.
        collected = visit_diagonal(
            collected, carried, q, k, v, g, lse + of_head, delta + of_head, bias, head, b, h,
            h // sees.group, start, distance, sees, scale, begin, end - (outer - inner), inner,
            outer - inner, M, True, PRECISION,
        )  # fmt: skip
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + h
    at = Diagonal(h, part * tl.num_programs(0) + number)
    bias.hooks.close(collected, 0.0, (), bias, sees, at, DIAGONAL)
