"""Attention of a block of queries, and its log-sum-exp; few queries go by parts of the keys."""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.ops.attention.triton.parts import (
    AFTER,
    BEFORE,
    LN2,
    NEAR,
    NORMS,
    QUERIES,
    RANGE,
    SLACK,
    block_at,
    clip,
    load_tile,
    program_of,
    range_of,
    softmax_begin,
    softmax_end,
    softmax_step,
    start_of,
    store_dense,
    store_tile,
    tile_at,
    tiles_of,
)


@triton.jit
def visit(
    state, q, k, v, bias, head, rows, block, sees, kv, scale, begin, end,
    N: tl.constexpr, PLACE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles of keys ``begin .. end - 1``."""
    M: tl.constexpr = q.shape[0]
    carried = bias.hooks.begin(bias, head, rows, block.i0, begin * N, M, N, PLACE, QUERIES)
    for n in tl.range(begin, end):
        keys = load_tile(k, block.b, kv, n * N, sees.keys, N, MASKED)
        scores = tl.dot(q, keys.T, input_precision=PRECISION)
        tile = tile_at(block, sees, n * N, N, MASKED)
        columns = bias.hooks.columns(bias, head, sees, block.b, block.h, n * N, keys)
        scores, carried, _ = bias.hooks.add(
            scores, carried, rows, columns, bias, tile, scale, PLACE, QUERIES
        )
        values = load_tile(v, block.b, kv, n * N, sees.keys, N, MASKED)
        if MASKED:
            scores = tl.where(tile.seen, scores, float("-inf"))
        state = softmax_step(state, scores, values, MASKED, PRECISION)
    return state


@triton.jit
def forward(
    q, k, v, out, lse, bias, sees, prune, scale,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a block of queries, and its log-sum-exp."""
    b, h, row0 = program_of(sees, M)
    kv = h // sees.group
    block = block_at(sees, b, h, start_of(sees, b), row0, M)
    query = load_tile(q, b, h, row0, sees.queries, M, True)
    head = bias.hooks.head(bias, b, h)
    rows = bias.hooks.rows(bias, head, sees, block, query)
    begin, end = tiles_of(block, N)
    state = softmax_begin(M, v.block)
    if bias.hooks.masks_all:
        near = begin
        far = end
        if bias.hooks.has_far_keys:
            near, far = bias.hooks.spans(bias, rows, block.i0, begin, end, M, N)
            near = clip(near, begin, end)
            far = end if sees.is_causal else clip(far, near, end)
        state = visit(
            state, query, k, v, bias, head, rows, block, sees, kv, scale, near, far,
            N, NEAR, True, PRECISION,
        )  # fmt: skip
        if bias.hooks.has_far_keys:
            state = visit(
                state, query, k, v, bias, head, rows, block, sees, kv, scale, begin, near,
                N, BEFORE, True, PRECISION,
            )  # fmt: skip
        if bias.hooks.has_far_keys and not sees.is_causal:
            state = visit(
                state, query, k, v, bias, head, rows, block, sees, kv, scale, far, end,
                N, AFTER, True, PRECISION,
            )  # fmt: skip
    else:
        # The tiles that hold the queries' own keys: the others before them are seen whole.
        edge = clip(tl.minimum(block.i0, sees.keys) // N, begin, end)
        after = end
        if sees.is_causal:
            edge = clip((tl.minimum(block.i0, sees.keys - 1) + 1) // N, begin, end)
        else:
            after = clip((block.i0 + M + N - 1) // N, edge, end)
        state = visit(
            state, query, k, v, bias, head, rows, block, sees, kv, scale, edge, after,
            N, NEAR, True, PRECISION,
        )  # fmt: skip
        if prune.norms is not None:
            # No score of a query is above the product of the norms.
            longest = 0.0
            parts = (sees.keys + NORMS - 1) // NORMS
            for chunk in range(0, parts, 64):
                part = chunk + tl.arange(0, 64)
                norm = prune.norms + (b * (sees.heads // sees.group) + kv) * parts + part
                longest = tl.maximum(longest, tl.max(tl.load(norm, mask=part < parts, other=0.0)))
            wide = query.to(tl.float32)
            bound = tl.sqrt(tl.sum(wide * wide, 1)) * longest * (scale * SLACK)
            # How far a score without its bias can be above the greatest with its bias, and what
            # makes all keys below that weigh less than the rounding.
            bound += prune.spare - state[1]
            begin, end = bias.hooks.narrow(
                bias, rows, bound, sees, block, begin, edge, after, end, M, N
            )
            # A program may have several of the blocks that share a range.
            part = row0 // RANGE + tl.arange(0, M // RANGE)
            count = (sees.queries + RANGE - 1) // RANGE
            saved = prune.ranges + ((b * sees.heads + h) * count + part) * 2
            tl.store(saved, begin * N, mask=part < count)
            tl.store(saved + 1, end * N, mask=part < count)
        near = begin
        far = end
        if bias.hooks.has_far_keys:
            near, far = bias.hooks.spans(bias, rows, block.i0, begin, end, M, N)
            near = clip(near, begin, edge)
            state = visit(
                state, query, k, v, bias, head, rows, block, sees, kv, scale, begin, near,
                N, BEFORE, sees.is_cut, PRECISION,
            )  # fmt: skip
        state = visit(
            state, query, k, v, bias, head, rows, block, sees, kv, scale, near, edge,
            N, NEAR, sees.is_cut, PRECISION,
        )  # fmt: skip
        if not sees.is_causal:
            far = clip(far, after, end)
            state = visit(
                state, query, k, v, bias, head, rows, block, sees, kv, scale, after, far,
                N, NEAR, True, PRECISION,
            )  # fmt: skip
            if bias.hooks.has_far_keys:
                state = visit(
                    state, query, k, v, bias, head, rows, block, sees, kv, scale, far, end,
                    N, AFTER, True, PRECISION,
                )  # fmt: skip
    acc, sums = softmax_end(state)
    sums += bias.hooks.row_part(bias, rows, block)
    at = lse + (b * sees.heads + h) * sees.queries + block.rows
    tl.store(at, sums * LN2, mask=block.present)
    store_tile(out, b, h, block.rows, block.present, acc)


@triton.jit
def split(
    q, k, v, part_out, part_lse, bias, sees, scale,
    M: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of all queries that share a head of keys to one part of the keys.

    Its log-sum-exp is in units of log2. If the part is the ``WHOLE``, these are the results, and
    the log-sum-exp is the natural one.
    """
    b = (tl.program_id(0) // (sees.heads // sees.group)).to(tl.int64)
    kv = (tl.program_id(0) % (sees.heads // sees.group)).to(tl.int64)
    part = tl.program_id(1)
    row = tl.arange(0, M)
    present = row < sees.queries * sees.group
    t = row % sees.queries
    h = kv * sees.group + tl.where(present, row // sees.queries, 0)
    i = start_of(sees, b) + t
    channels = tl.arange(0, q.block)
    at = q.at + b * q.b + h[:, None] * q.h + t.to(tl.int64)[:, None] * q.t
    inside = present[:, None] & (channels < q.width)[None, :]
    query = tl.load(at + channels[None, :], mask=inside, other=0.0)
    low, high = range_of(sees, b, i)
    low = tl.where(present, low, sees.keys)
    high = tl.where(present, high, -1)
    rows = bias.hooks.few_rows(bias, sees, b, h, i)
    # The tiles of keys that are seen, in equal parts.
    first = tl.maximum(tl.min(low), 0) // N
    last = (tl.max(high) + N) // N
    share = tl.cdiv(tl.maximum(last - first, 0), tl.num_programs(1))
    begin = first + part * share
    state = softmax_begin(M, v.block)
    for n in tl.range(begin, tl.minimum(begin + share, last)):
        j = n * N + tl.arange(0, N)
        keys = load_tile(k, b, kv, n * N, sees.keys, N, True)
        scores = tl.dot(query, keys.T, input_precision=PRECISION)
        seen = (j[None, :] >= low[:, None]) & (j[None, :] <= high[:, None])
        if sees.padding is not None:
            there = tl.load(sees.padding + b * sees.padding_b + j, mask=j < sees.keys, other=0)
            seen = seen & (there != 0)[None, :]
        scores = bias.hooks.few(scores, rows, bias, sees, b, h, i, j, keys, seen, scale)
        values = load_tile(v, b, kv, n * N, sees.keys, N, True)
        scores = tl.where(seen, scores, float("-inf"))
        state = softmax_step(state, scores, values, True, PRECISION)
    acc, sums = softmax_end(state)
    if WHOLE:
        sums *= LN2
    # Rows of heads and queries, as in the output.
    to = (b * sees.heads + h) * sees.queries + t
    to += part.to(tl.int64) * (tl.num_programs(0) * sees.group) * sees.queries
    tl.store(part_lse + to, sums, mask=present)
    store_dense(part_out, to, present, acc, v.width, v.block)


@triton.jit
def combine(
    part_out, part_lse, out, lse, rows,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put the parts of a row together, weighted by their log-sum-exps."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_S)
    channels = tl.arange(0, BLOCK)
    at = part.to(tl.int64) * rows + row
    sums = tl.load(part_lse + at, mask=part < PARTS, other=float("-inf"))
    peak = tl.max(sums, 0)
    nothing = peak == float("-inf")
    weights = tl.exp2(sums - tl.where(nothing, 0.0, peak))
    total = tl.sum(weights, 0)
    inside = (part < PARTS)[:, None] & (channels < WIDTH)[None, :]
    parts = tl.load(part_out + at[:, None] * WIDTH + channels[None, :], mask=inside, other=0.0)
    made = tl.sum(parts * weights[:, None], 0) / tl.where(nothing, 1.0, total)
    tl.store(out + row * WIDTH + channels, made.to(out.dtype.element_ty), mask=channels < WIDTH)
    whole = peak + tl.log2(tl.where(nothing, 1.0, total))
    tl.store(lse + row, tl.where(nothing, float("-inf"), whole) * LN2)


@triton.jit
def longest_keys(k, norms, keys, KV_HEADS: tl.constexpr):
    """The norm of the longest of `NORMS` keys; infinity for NaN, which must prune nothing."""
    b = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    rows = load_tile(k, b, kv, tl.program_id(1) * NORMS, keys, NORMS, True).to(tl.float32)
    squares = tl.sum(rows * rows, 1)
    longest = tl.max(tl.where(squares == squares, squares, float("inf")))
    to = norms + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(to, tl.sqrt(longest))
