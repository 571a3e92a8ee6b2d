"""Attention of few queries to many keys: the keys are split over programs.

A program takes all queries that share a head of keys, so that it reads the keys once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.kernels.triton.attention_bias import (
    LN2,
    LOG2E,
    SLOPES,
    SUMS,
    TABLE,
    load_rows,
    query_start,
    visible,
)


@triton.jit(do_not_specialize=["start", "left", "right", "keys", "queries", "width", "zero"])
def split(
    q, k, v, values, starts, first, last, part_out, part_lse, start,
    scale, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    values_b, values_h, values_t, starts_b, ends_b, left, right, queries, keys, width, zero,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, HAS_STARTS: tl.constexpr, DOCUMENTS: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Attention to one part of the keys, and its log-sum-exp in units of log2.

    If the part is the ``WHOLE``, these are the results, and the log-sum-exp is the natural one.
    """
    b = (tl.program_id(0) // (HEADS // GROUP)).to(tl.int64)
    kv = tl.program_id(0) % (HEADS // GROUP)
    part = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    present = row < GROUP * queries
    t = row % queries
    h = kv * GROUP + tl.where(present, row // queries, 0)
    own = query_start(starts, start, b, starts_b, HAS_STARTS) + t
    channels = tl.arange(0, BLOCK_D)
    at = q + b * q_b + h.to(tl.int64)[:, None] * q_h + t.to(tl.int64)[:, None] * q_t
    query = tl.load(
        at + channels[None, :], mask=present[:, None] & (channels < D)[None, :], other=0.0
    )
    ends = first + b * ends_b, last + b * ends_b, left, right
    low, high = visible(own, ends, keys, CAUSAL, DOCUMENTS, WINDOW)
    low = tl.where(present, low, keys)
    high = tl.where(present, high, -1)
    # The tiles of keys that are seen, in equal parts.
    first_tile = tl.maximum(tl.min(low), 0) // BLOCK_N
    tiles_end = (tl.max(high) + BLOCK_N) // BLOCK_N
    tiles = tl.maximum(tiles_end - first_tile, 0)
    share = (tiles + tl.num_programs(1) - 1) // tl.num_programs(1)
    begin = first_tile + part * share
    end = tl.minimum(begin + share, tiles_end)
    numbers = values + b * values_b + h.to(tl.int64) * values_h
    slope = tl.zeros((BLOCK_M,), tl.float32)
    of_query = tl.zeros((BLOCK_M,), tl.float64)
    if KIND == SLOPES:
        slope = tl.load(numbers).to(tl.float32) * LOG2E
    if KIND == SUMS:
        near = tl.minimum(tl.maximum(own, 0), width - 1)
        of_query = tl.load(numbers + near * values_t).to(tl.float64)
    total = tl.zeros((BLOCK_M,), tl.float32)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    keys_at = k + b * k_b + kv.to(tl.int64) * k_h
    values_at = v + b * v_b + kv.to(tl.int64) * v_h
    for tile in tl.range(begin, end):
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        key = load_rows(keys_at, tile * BLOCK_N, keys, k_t, (D, BLOCK_D), BLOCK_N)
        scores = tl.dot(query, key.T, input_precision=PRECISION) * scale
        distance = own[:, None] - columns[None, :]
        if KIND == SLOPES:
            scores -= tl.abs(distance).to(tl.float32) * slope[:, None]
        if KIND == TABLE:
            column = tl.minimum(tl.maximum(distance + zero, 0), width - 1)
            scores += tl.load(numbers[:, None] + column * values_t).to(tl.float32) * LOG2E
        if KIND == SUMS:
            sums_at = numbers[:, None] + columns[None, :] * values_t
            sums = tl.load(sums_at, mask=columns[None, :] < keys).to(tl.float64)
            scores += ((of_query[:, None] - sums) * LOG2E).to(tl.float32)
        seen = (columns[None, :] >= low[:, None]) & (columns[None, :] <= high[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, 1)
        value = load_rows(values_at, tile * BLOCK_N, keys, v_t, (DV, BLOCK_DV), BLOCK_N)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
        most = peak
    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    sums = tl.where(nothing, float("-inf"), most + tl.log2(tl.where(nothing, 1.0, total)))
    if WHOLE:
        sums *= LN2
    # Rows of heads and queries, as in the output.
    to = (b * HEADS + h) * queries + t
    to += part.to(tl.int64) * (tl.num_programs(0) * GROUP) * queries
    tl.store(part_lse + to, sums, mask=present)
    channels = tl.arange(0, BLOCK_DV)
    store = present[:, None] & (channels < DV)[None, :]
    tl.store(part_out + to[:, None] * DV + channels[None, :], acc, mask=store)


@triton.jit(do_not_specialize=["start", "rows"])
def combine(
    part_out, part_lse, out, lse, start, rows,
    PARTS: tl.constexpr, DV: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Put the parts of a row together, weighted by their log-sum-exps."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_S)
    channels = tl.arange(0, BLOCK_DV)
    at = part.to(tl.int64) * rows + row
    sums = tl.load(part_lse + at, mask=part < PARTS, other=float("-inf"))
    peak = tl.max(sums, 0)
    nothing = peak == float("-inf")
    weights = tl.exp2(sums - tl.where(nothing, 0.0, peak))
    total = tl.sum(weights, 0)
    inside = (part < PARTS)[:, None] & (channels < DV)[None, :]
    parts = tl.load(part_out + at[:, None] * DV + channels[None, :], mask=inside, other=0.0)
    made = tl.sum(parts * weights[:, None], 0) / tl.where(nothing, 1.0, total)
    tl.store(out + row * DV + channels, made.to(out.dtype.element_ty), mask=channels < DV)
    whole = peak + tl.log2(tl.where(nothing, 1.0, total))
    tl.store(lse + row, tl.where(nothing, float("-inf"), whole) * LN2)
