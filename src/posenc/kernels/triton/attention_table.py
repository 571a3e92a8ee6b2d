"""Attention with a bias: the gradient of a table of distances."""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.kernels.triton.attention_backward import UNSPECIALIZED, load_lse
from posenc.kernels.triton.attention_bias import PAD, load_keys, query_start, visible


@triton.jit
def visit_diagonal(
    sums, bias, at_head, at_keys, lse, delta, ends, steps, where, scale, begin, end,
    gap, gap_size,
    D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add ``dS`` of a diagonal's tiles; from block ``gap`` on, leave out ``gap_size`` blocks."""
    own_start, distance, queries, keys = where
    q_t, g_t, k_t, v_t = steps
    row = tl.arange(0, BLOCK)
    for n in tl.range(begin, end):
        block = n
        if MASKED:
            block = tl.where(n < gap, n, n + gap_size)
        row0 = block * BLOCK
        own0 = own_start + row0
        rows = row0 + row
        key0 = own0 - distance
        query = load_keys(at_head[0], row0, queries, q_t, (D, BLOCK_D), BLOCK, MASKED)
        grad = load_keys(at_head[1], row0, queries, g_t, (DV, BLOCK_DV), BLOCK, MASKED)
        key = load_keys(at_keys[0], key0, keys, k_t, (D, BLOCK_D), BLOCK, MASKED)
        value = load_keys(at_keys[1], key0, keys, v_t, (DV, BLOCK_DV), BLOCK, MASKED)
        scores = tl.dot(query, key.T, input_precision=PRECISION) * scale + bias
        total = load_lse(lse, rows, queries)
        if MASKED:
            low, high = visible(own0 + row, ends, keys, CAUSAL, DOCUMENTS, WINDOW)
            columns = (key0 + row)[None, :]
            seen = (columns >= low[:, None]) & (columns <= high[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        weights = tl.exp2(scores - total[:, None])
        minus = tl.load(delta + rows, mask=rows < queries, other=0.0)
        dp = tl.dot(grad, value.T, input_precision=PRECISION)
        sums += weights * (dp - minus[:, None])
    return sums


@triton.jit(do_not_specialize=[*UNSPECIALIZED[:-1], "nearest", "batch"])
def to_table(
    q, k, v, g, lse, delta, values, starts, first, last, by_distance, start,
    scale, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    values_h, starts_b, ends_b, left, right, queries, keys, width, zero, nearest, batch,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_STARTS: tl.constexpr, DOCUMENTS: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Sums of ``dS`` for the distances of one diagonal of tiles, ``[H, diagonals, 2 * BLOCK]``.

    A tile's keys begin ``distance`` before its queries, so that all tiles of a diagonal have the
    same distances, and one tile of sums serves them all.
    """
    diagonal = tl.program_id(0)
    h = tl.program_id(1)
    h64 = h.to(tl.int64)
    kv = (h // GROUP).to(tl.int64)
    distance = nearest + diagonal * BLOCK
    at = values + h64 * values_h
    row = tl.arange(0, BLOCK)
    offset = row[:, None] - row[None, :]
    column = tl.minimum(tl.maximum(distance + offset + zero, 0), width - 1)
    bias = tl.load(at + PAD + width - 1 - column)
    sums = tl.zeros((BLOCK, BLOCK), tl.float32)
    for n in range(batch):
        b = tl.zeros((), tl.int64) + n
        own_start = query_start(starts, start, b, starts_b, HAS_STARTS)
        of_head = (b * HEADS + h) * queries
        at_head = q + b * q_b + h64 * q_h, g + b * g_b + h64 * g_h
        at_keys = k + b * k_b + kv * k_h, v + b * v_b + kv * v_h
        # Blocks of queries with a key at this distance, and those that see all keys of their tile.
        begin = tl.maximum(distance - BLOCK + 1 - own_start, 0) // BLOCK
        end = tl.minimum(keys - 1 + distance - own_start + BLOCK, queries + BLOCK - 1) // BLOCK
        end = tl.maximum(begin, end)
        inner = begin
        outer = begin
        if not (DOCUMENTS or WINDOW):
            inner = tl.maximum(distance - own_start + BLOCK - 1, 0) // BLOCK
            inner = tl.minimum(tl.maximum(inner, begin), end)
            outer = tl.minimum(tl.maximum(keys + distance - own_start, 0), queries) // BLOCK
            outer = tl.maximum(tl.minimum(outer, end), inner)
            if CAUSAL:
                # The first diagonal has the tiles that the causal mask cuts.
                outer = tl.where(distance >= BLOCK - 1, outer, inner)
        where = own_start, distance, queries, keys
        steps = q_t, g_t, k_t, v_t
        ends = first + b * ends_b, last + b * ends_b, left, right
        sums = visit_diagonal(
            sums, bias, at_head, at_keys, lse + of_head, delta + of_head, ends, steps, where,
            scale, inner, outer, 0, 0,
            D, DV, BLOCK, BLOCK_D, BLOCK_DV, CAUSAL, DOCUMENTS, WINDOW, False, PRECISION,
        )  # fmt: skip
        # The others, at both ends.
        sums = visit_diagonal(
            sums, bias, at_head, at_keys, lse + of_head, delta + of_head, ends, steps, where,
            scale, begin, end - (outer - inner), inner, outer - inner,
            D, DV, BLOCK, BLOCK_D, BLOCK_DV, CAUSAL, DOCUMENTS, WINDOW, True, PRECISION,
        )  # fmt: skip
    # Skew the tile so that its diagonals become columns.
    place = tl.arange(0, 2 * BLOCK)
    source = row[:, None] - place[None, :] + BLOCK
    inside = (source >= 0) & (source < BLOCK)
    skewed = tl.gather(sums, tl.where(inside, source, 0), 1)
    made = tl.sum(tl.where(inside, skewed, 0.0), 0)
    to = by_distance + (h64 * tl.num_programs(0) + diagonal) * (2 * BLOCK) + place
    tl.store(to, made)


@triton.jit(do_not_specialize=["start", "width", "zero", "nearest", "furthest", "diagonals"])
def fold_table(
    by_distance, first_column, totals, to, start, width, zero, nearest, furthest, diagonals,
    BLOCK: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_TOTAL: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """The gradient of a head's table from the sums of `to_table`.

    The first column also has the distances below it. The last has what is left of all ``dS`` of
    the head, whose sum is known: zero, or the gradient of the log-sum-exp.
    """
    h = tl.program_id(0).to(tl.int64)
    sums = by_distance + h * diagonals * (2 * BLOCK)
    total = tl.zeros((), tl.float32)
    if HAS_TOTAL:
        total = tl.load(totals + h)
    for chunk in range(0, width, 1024):
        column = chunk + tl.arange(0, 1024)
        distance = column - zero
        here = distance - nearest
        inside = (distance >= nearest) & (distance <= furthest)
        diagonal = here // BLOCK
        at = sums + diagonal * (2 * BLOCK) + here % BLOCK
        # The second half of a diagonal's distances are the first half of the next one's.
        made = tl.load(at + BLOCK, mask=inside, other=0.0)
        made += tl.load(at + 2 * BLOCK, mask=inside & (diagonal + 1 < diagonals), other=0.0)
        if HAS_FIRST:
            made = tl.where(column == 0, tl.load(first_column + h), made)
        if HAS_LAST:
            made = tl.where(column == width - 1, 0.0, made)
        total -= tl.sum(made)
        tl.store(to + h * width + column, made, mask=column < width)
    if HAS_LAST:
        tl.store(to + h * width + width - 1, total)
