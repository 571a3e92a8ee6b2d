"""Attention with products of queries and keys with a vector for each distance: the kernels.

A score is ``q_i k_j + p_i E_r + m_j F_r``, where ``r`` is the distance ``i - j`` plus ``zero``,
clipped to the rows of E and F. A tile has as many queries as keys. A row of it has that many
distances, so `along` computes the products in the order of distances modulo this number, and `roll`
shifts each row cyclically, by one place more than the row before. Where all distances of a tile are
past an end, one vector serves the tile, and `at_ends` has made the products with it.

To that, a network of distance and position may be added, see `curve`.

As in `attention_backward`, each program owns what it writes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from posenc.ops.attention.triton.attention import (
    LOG2E,
    OPTIONS,
    STARTS,
    block_of,
    constants_of,
    places_of,
    whole,
    with_whole_places,
)
from posenc.ops.attention.triton.attention_parts import (
    LN2,
    hide,
    load_lse,
    load_rows,
    queries_of_keys,
    query_block,
    query_start,
    softmax_begin,
    softmax_end,
    softmax_step,
    store_delta,
    store_rows,
    visible_rows,
)
from posenc.ops.attention.triton.curve import (
    Curve,
    curve_scores,
    curve_sums,
    positions_of,
    rates_of,
    store_sums,
)
from posenc.ops.plan import Operand, Plan, strides

# Lengths, offsets, windows and rows, which would compile a kernel again.
UNSPECIALIZED = ["start", "left", "right", "keys", "queries", "rows", "zero", "reach"]
# What a call has, by its place in ``HAS``: vectors for queries and for keys, the knots of a curve
# and the block that holds them, and whether p is q, and m is k.
FOR_QUERIES, FOR_KEYS, KNOTS, KNOT_BLOCK, SAME_AS_Q, SAME_AS_K = (tl.constexpr(n) for n in range(6))


@triton.jit
def load_vectors(
    vectors, distance, rows, zero, step,
    SIGN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The vectors of ``distance`` and the distances after it, or before it if ``SIGN`` is -1."""
    row = distance + SIGN * tl.arange(0, BLOCK) + zero
    row = tl.minimum(tl.maximum(row, 0), rows - 1)
    channels = tl.arange(0, WIDTH[1])
    at = vectors + row.to(tl.int64)[:, None] * step + channels[None, :]
    return tl.load(at, mask=(channels < WIDTH[0])[None, :], other=0.0)


@triton.jit
def load_vector(vectors, row, step, WIDTH: tl.constexpr):
    """The vector of a row."""
    channels = tl.arange(0, WIDTH[1])
    at = vectors + row.to(tl.int64) * step + channels
    return tl.load(at, mask=channels < WIDTH[0], other=0.0).to(tl.float32)


@triton.jit
def roll(x, BLOCK: tl.constexpr):
    """Column ``(m - n) % BLOCK`` of row ``m`` as column ``n``; twice, it changes nothing."""
    place = tl.arange(0, BLOCK)[:, None] - tl.arange(0, BLOCK)[None, :]
    return tl.gather(x, place & (BLOCK - 1), 1)


@triton.jit
def is_near(BLOCK: tl.constexpr):
    """Which columns ``n`` of a rolled row have the distance ``distance + n``: those up to its own.

    That of the others is one block less.
    """
    return tl.arange(0, BLOCK)[None, :] <= tl.arange(0, BLOCK)[:, None]


@triton.jit
def along(
    x, vectors, distance, rows, zero, step,
    SIGN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products of a tile's rows with the vectors of their distances.

    For queries, ``SIGN`` is 1. For keys it is -1, and the result has a row for each key.
    """
    near = load_vectors(vectors, distance, rows, zero, step, SIGN, WIDTH, BLOCK)
    products = tl.dot(x, near.T, input_precision=PRECISION)
    other = load_vectors(vectors, distance - SIGN * BLOCK, rows, zero, step, SIGN, WIDTH, BLOCK)
    others = tl.dot(x, other.T, input_precision=PRECISION)
    return roll(tl.where(is_near(BLOCK), products, others), BLOCK)


@triton.jit
def add_along(
    dx, ds, vectors, distance, rows, zero, step,
    SIGN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients of rows that `along` took, from those of the scores."""
    near = load_vectors(vectors, distance, rows, zero, step, SIGN, WIDTH, BLOCK)
    rolled = roll(ds.to(near.dtype), BLOCK)
    nothing = tl.zeros_like(rolled)
    dx = tl.dot(tl.where(is_near(BLOCK), rolled, nothing), near, dx, input_precision=PRECISION)
    other = load_vectors(vectors, distance - SIGN * BLOCK, rows, zero, step, SIGN, WIDTH, BLOCK)
    return tl.dot(tl.where(is_near(BLOCK), nothing, rolled), other, dx, input_precision=PRECISION)


@triton.jit
def add_to_vectors(to, ds, x, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Add the gradients of the vectors that `along` took."""
    of_near, of_others = to
    rolled = roll(ds.to(x.dtype), BLOCK)
    nothing = tl.zeros_like(rolled)
    near = tl.where(is_near(BLOCK), rolled, nothing)
    of_near = tl.dot(near.T, x, of_near, input_precision=PRECISION)
    others = tl.where(is_near(BLOCK), nothing, rolled)
    return of_near, tl.dot(others.T, x, of_others, input_precision=PRECISION)


@triton.jit(do_not_specialize=["start", "count", "rows"])
def at_ends(
    x, vectors, to, start, x_b, x_h, x_t, step, vectors_h, count, rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The products of tokens with the first vector, and with the last, ``[2, B, H, n]``."""
    blocks = (count + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BLOCK
    b = (sequence // HEADS).to(tl.int64)
    h = (sequence % HEADS).to(tl.int64)
    width: tl.constexpr = (D, BLOCK_D)
    tokens = load_rows(x + b * x_b + h // GROUP * x_h, first, count, x_t, width, BLOCK)
    tokens = tokens.to(tl.float32)
    at = first + tl.arange(0, BLOCK)
    to += sequence.to(tl.int64) * count + at
    size = tl.num_programs(0).to(tl.int64) // blocks * count
    vectors += h * vectors_h
    vector = load_vector(vectors, rows * 0, step, width)
    tl.store(to, tl.sum(tokens * vector[None, :], 1), mask=at < count)
    vector = load_vector(vectors, rows - 1, step, width)
    tl.store(to + size, tl.sum(tokens * vector[None, :], 1), mask=at < count)


@triton.jit
def scores_of(
    q, k, p, m, terms, rates, end, row0, own0, column0, low, high, scale,
    WIDTH: tl.constexpr, HAS: tl.constexpr, FLAT: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The scores of a tile, in units of log2; ``-inf`` for keys that are not seen.

    ``FLAT`` says that all distances have row ``end``.
    """
    vectors, ends, curves, rows, zero = terms
    for_queries, for_keys, e_r, f_r = vectors
    of_queries, of_keys, queries, keys, sequences = ends
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    columns = column0 + tl.arange(0, BLOCK)
    distance = own0 - column0
    is_last = (end == rows - 1).to(tl.int64)
    if HAS[FOR_QUERIES] and FLAT:
        at = row0 + tl.arange(0, BLOCK)
        inside = (at >= 0) & (at < queries)
        of_queries += is_last * sequences * queries
        scores += tl.load(of_queries + at, mask=inside, other=0.0)[:, None]
    elif HAS[FOR_QUERIES]:
        scores += along(p, for_queries, distance, rows, zero, e_r, 1, WIDTH, BLOCK, PRECISION)
    if HAS[FOR_KEYS] and FLAT:
        inside = (columns >= 0) & (columns < keys)
        of_keys += is_last * sequences * keys
        scores += tl.load(of_keys + columns, mask=inside, other=0.0)[None, :]
    elif HAS[FOR_KEYS]:
        scores += along(m, for_keys, distance, rows, zero, f_r, -1, WIDTH, BLOCK, PRECISION).T
    scores *= scale
    if HAS[KNOTS]:
        curve, logs, reach = curves
        scores += curve_scores(
            curve, logs, reach, rates, own0, column0, (HAS[KNOTS], HAS[KNOT_BLOCK]), BLOCK
        )
    return hide(scores, low, high, column0, BLOCK)


@triton.jit
def visit(
    state, q, p, source, terms, rates, row0, own0, low, high, scale, tiles,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, HAS: tl.constexpr, FLAT: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to tiles of keys, see `span`."""
    keys_at, values_at, others_at, k_t, v_t, m_t, keys = source
    begin, end = span(tiles, FLAT)
    for n in tl.range(begin, end):
        tile, row = place_of(n, tiles, terms[3] - 1, 0, FLAT)
        first = tile * BLOCK
        k = load_rows(keys_at, first, keys, k_t, WIDTH, BLOCK)
        m = k
        if HAS[FOR_KEYS] and not HAS[SAME_AS_K]:
            m = load_rows(others_at, first, keys, m_t, WIDTH, BLOCK)
        scores = scores_of(
            q, k, p, m, terms, rates, row, row0, own0, first, low, high, scale,
            WIDTH, HAS, FLAT, BLOCK, PRECISION,
        )  # fmt: skip
        v = load_rows(values_at, first, keys, v_t, V_WIDTH, BLOCK)
        state = softmax_step(state, scores, v, True, PRECISION)
    return state


@triton.jit
def tiles_of(
    own0, low, high, rows, zero, HAS: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Tiles of keys that some query sees: the first, the first with a distance before the last
    row, the first from which on all have the first row, and the one after the last."""
    begin = tl.maximum(tl.min(low), 0) // BLOCK
    end = tl.maximum((tl.max(high) + BLOCK) // BLOCK, begin)
    near = begin
    after = end
    if HAS[FOR_QUERIES] or HAS[FOR_KEYS]:
        near = (own0 - (rows - 1 - zero) + 1) // BLOCK
        near = tl.minimum(tl.maximum(near, begin), end)
    if (HAS[FOR_QUERIES] or HAS[FOR_KEYS]) and not CAUSAL:
        after = (own0 + BLOCK - 1 + zero + BLOCK - 1) // BLOCK
        after = tl.minimum(tl.maximum(after, near), end)
    return begin, near, after, end


@triton.jit
def span(tiles, FLAT: tl.constexpr):
    """The numbers of a loop over tiles: those between the second and the third, or the others."""
    begin, near, after, end = tiles
    if FLAT:
        return begin, end - (after - near)
    return near, after


@triton.jit
def place_of(n, tiles, row_before, row_after, FLAT: tl.constexpr):
    """The tile of a number of `span`, and its row if all of its distances have the same."""
    _, near, after, _ = tiles
    if FLAT:
        return tl.where(n < near, n, n + (after - near)), tl.where(n < near, row_before, row_after)
    return n, row_before


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward(
    q, k, v, p, m, for_queries, for_keys, of_p, of_m, curve, logs,
    out, lse, starts, first, last, start, scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, p_b, p_h, p_t, m_b, m_h, m_t,
    e_r, e_h, f_r, f_h, curve_h, o_b, o_h, o_t,
    starts_b, ends_b, left, right, queries, keys, rows, zero, reach,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HAS_QUERIES: tl.constexpr, HAS_KEYS: tl.constexpr, P_IS_Q: tl.constexpr, M_IS_K: tl.constexpr,
    UNITS: tl.constexpr, BLOCK_U: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_STARTS: tl.constexpr, DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Attention of a block of queries, and its log-sum-exp."""
    sequence, b, h, row0 = query_block(queries, HEADS, BLOCK)
    kv = h // GROUP
    width: tl.constexpr = (D, BLOCK_D)
    v_width: tl.constexpr = (DV, BLOCK_DV)
    has: tl.constexpr = (HAS_QUERIES, HAS_KEYS, UNITS, BLOCK_U, P_IS_Q, M_IS_K)
    own0 = query_start(starts, start, b, starts_b, HAS_STARTS) + row0
    at = row0 + tl.arange(0, BLOCK)
    own = own0 + tl.arange(0, BLOCK)
    present = at < queries
    of_head = sequence * queries
    query = load_rows(q + b * q_b + h * q_h, row0, queries, q_t, width, BLOCK)
    other = query
    if HAS_QUERIES and not P_IS_Q:
        other = load_rows(p + b * p_b + h * p_h, row0, queries, p_t, width, BLOCK)
    ends = first + b * ends_b, last + b * ends_b, left, right
    low, high = visible_rows(own, present, ends, keys, CAUSAL, DOCUMENTS, WINDOW)
    vectors = for_queries + h * e_h, for_keys + h * f_h, e_r, f_r
    blocks = (queries + BLOCK - 1) // BLOCK
    sequences = tl.num_programs(0).to(tl.int64) // blocks
    of_ends = of_p + of_head, of_m + sequence * keys, queries, keys, sequences
    terms = vectors, of_ends, (curve + h * curve_h, logs, reach), rows, zero
    rates = own.to(tl.float32)
    if UNITS:
        rates = rates_of(curve + h * curve_h, own, ends, keys, DOCUMENTS)
    keys_at = k + b * k_b + kv * k_h
    values_at = v + b * v_b + kv * v_h
    source = keys_at, values_at, m + b * m_b + kv * m_h, k_t, v_t, m_t, keys
    state = softmax_begin(BLOCK, BLOCK_DV)
    tiles = tiles_of(own0, low, high, rows, zero, has, CAUSAL, BLOCK)
    state = visit(
        state, query, other, source, terms, rates, row0, own0, low, high, scale, tiles,
        width, v_width, has, False, BLOCK, PRECISION,
    )  # fmt: skip
    if HAS_QUERIES or HAS_KEYS:
        state = visit(
            state, query, other, source, terms, rates, row0, own0, low, high, scale, tiles,
            width, v_width, has, True, BLOCK, PRECISION,
        )  # fmt: skip
    acc, sums = softmax_end(state)
    tl.store(lse + of_head + at, sums * LN2, mask=present)
    store_rows(out + b * o_b + h * o_h, acc, at, present, o_t, v_width)


@triton.jit
def store_total(to, weights, x, WIDTH: tl.constexpr):
    """Write the sum of rows, each times its weight."""
    channels = tl.arange(0, WIDTH[1])
    total = tl.sum(weights[:, None] * x.to(tl.float32), 0)
    tl.store(to + channels, total, mask=channels < WIDTH[0])


@triton.jit
def ends_of(ds, own0, column0, rows, zero, BLOCK: tl.constexpr):
    """The gradients of scores whose distance has the first row, and the last."""
    row = tl.arange(0, BLOCK)
    at = own0 - column0 + zero + row[:, None] - row[None, :]
    last = at >= rows - 1
    return tl.where((at <= 0) & (last == 0), ds, 0.0), tl.where(last, ds, 0.0)


@triton.jit
def visit_keys(
    state, q, p, g, sums, minus, source, terms, rates, row0, own0, low, high, scale, tiles,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, HAS: tl.constexpr, FLAT: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients from tiles of keys, see `span`."""
    dq, dp, to_first, to_last, of_curve = state
    keys_at, values_at, others_at, k_t, v_t, m_t, keys = source
    begin, end = span(tiles, FLAT)
    for n in tl.range(begin, end):
        tile, row = place_of(n, tiles, terms[3] - 1, 0, FLAT)
        first = tile * BLOCK
        k = load_rows(keys_at, first, keys, k_t, WIDTH, BLOCK)
        m = k
        if HAS[FOR_KEYS] and not HAS[SAME_AS_K]:
            m = load_rows(others_at, first, keys, m_t, WIDTH, BLOCK)
        scores = scores_of(
            q, k, p, m, terms, rates, row, row0, own0, first, low, high, scale,
            WIDTH, HAS, FLAT, BLOCK, PRECISION,
        )  # fmt: skip
        v = load_rows(values_at, first, keys, v_t, V_WIDTH, BLOCK)
        weights = tl.exp2(scores - sums[:, None])
        ds = weights * (tl.dot(g, v.T, input_precision=PRECISION) - minus[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        if HAS[FOR_QUERIES] and FLAT:
            all_keys = tl.sum(ds, 1)
            # If there is but one row, it is the last.
            to_last += tl.where(row == terms[3] - 1, all_keys, 0.0)
            to_first += tl.where(row == terms[3] - 1, 0.0, all_keys)
        elif HAS[FOR_QUERIES]:
            vectors, _, _, rows, zero = terms
            dx = dq if HAS[SAME_AS_Q] else dp
            dx = add_along(
                dx, ds, vectors[0], own0 - first, rows, zero, vectors[2], 1, WIDTH, BLOCK, PRECISION
            )
            if HAS[SAME_AS_Q]:
                dq = dx
            else:
                dp = dx
            at_first, at_last = ends_of(ds, own0, first, rows, zero, BLOCK)
            to_first += tl.sum(at_first, 1)
            to_last += tl.sum(at_last, 1)
        if HAS[KNOTS]:
            curve, logs, reach = terms[2]
            units: tl.constexpr = (HAS[KNOTS], HAS[KNOT_BLOCK])
            of_curve = curve_sums(
                of_curve, ds, curve, logs, reach, rates, own0, first, units, BLOCK
            )
    return dq, dp, to_first, to_last, of_curve


@triton.jit(do_not_specialize=UNSPECIALIZED)
def to_queries(
    q, k, v, p, m, for_queries, for_keys, of_p, of_m, curve, logs,
    g, out, lse, g_lse, starts, first, last,
    dq, dp, delta, by_row, to_curve, start, scale, natural_scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, p_b, p_h, p_t, m_b, m_h, m_t,
    e_r, e_h, f_r, f_h, curve_h, g_b, g_h, g_t, o_b, o_h, o_t, dq_b, dq_h, dq_t, dp_b, dp_h, dp_t,
    starts_b, ends_b, left, right, queries, keys, rows, zero, reach,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HAS_QUERIES: tl.constexpr, HAS_KEYS: tl.constexpr, P_IS_Q: tl.constexpr, M_IS_K: tl.constexpr,
    UNITS: tl.constexpr, BLOCK_U: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_STARTS: tl.constexpr, DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr,
    LSE_TOO: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of q and p, ``delta``, and sums for others.

    Those are the gradients of E's ends, and of a curve.
    """
    sequence, b, h, row0 = query_block(queries, HEADS, BLOCK)
    kv = h // GROUP
    width: tl.constexpr = (D, BLOCK_D)
    v_width: tl.constexpr = (DV, BLOCK_DV)
    has: tl.constexpr = (HAS_QUERIES, HAS_KEYS, UNITS, BLOCK_U, P_IS_Q, M_IS_K)
    own0 = query_start(starts, start, b, starts_b, HAS_STARTS) + row0
    at = row0 + tl.arange(0, BLOCK)
    own = own0 + tl.arange(0, BLOCK)
    present = at < queries
    of_head = sequence * queries
    query = load_rows(q + b * q_b + h * q_h, row0, queries, q_t, width, BLOCK)
    other = query
    if HAS_QUERIES and not P_IS_Q:
        other = load_rows(p + b * p_b + h * p_h, row0, queries, p_t, width, BLOCK)
    grad = load_rows(g + b * g_b + h * g_h, row0, queries, g_t, v_width, BLOCK)
    made = load_rows(out + b * o_b + h * o_h, row0, queries, o_t, v_width, BLOCK)
    minus = store_delta(delta + of_head, g_lse + of_head, grad, made, at, present, LSE_TOO)
    sums = load_lse(lse + of_head, at, queries)
    ends = first + b * ends_b, last + b * ends_b, left, right
    low, high = visible_rows(own, present, ends, keys, CAUSAL, DOCUMENTS, WINDOW)
    vectors = for_queries + h * e_h, for_keys + h * f_h, e_r, f_r
    blocks = (queries + BLOCK - 1) // BLOCK
    sequences = tl.num_programs(0).to(tl.int64) // blocks
    of_ends = of_p + of_head, of_m + sequence * keys, queries, keys, sequences
    terms = vectors, of_ends, (curve + h * curve_h, logs, reach), rows, zero
    rates = own.to(tl.float32)
    if UNITS:
        rates = rates_of(curve + h * curve_h, own, ends, keys, DOCUMENTS)
    keys_at = k + b * k_b + kv * k_h
    values_at = v + b * v_b + kv * v_h
    source = keys_at, values_at, m + b * m_b + kv * m_h, k_t, v_t, m_t, keys
    none = tl.zeros((BLOCK,), tl.float32)
    empty = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    by_knot = tl.zeros((BLOCK_U,), tl.float32)
    of_curve = none, none, tl.zeros((), tl.float32), by_knot, by_knot
    state = empty, empty, none, none, of_curve
    tiles = tiles_of(own0, low, high, rows, zero, has, CAUSAL, BLOCK)
    if HAS_QUERIES or HAS_KEYS:
        state = visit_keys(
            state, query, other, grad, sums, minus, source, terms, rates, row0, own0, low, high,
            scale, tiles, width, v_width, has, True, BLOCK, PRECISION,
        )  # fmt: skip
    if HAS_QUERIES:
        # What the tiles have given so far is past the ends.
        dq_tile, dp_tile, to_first, to_last, of_curve = state
        flat = to_first[:, None] * load_vector(vectors[0], rows * 0, e_r, width)[None, :]
        flat += to_last[:, None] * load_vector(vectors[0], rows - 1, e_r, width)[None, :]
        if P_IS_Q:
            dq_tile += flat
        else:
            dp_tile = flat
        state = dq_tile, dp_tile, to_first, to_last, of_curve
    state = visit_keys(
        state, query, other, grad, sums, minus, source, terms, rates, row0, own0, low, high,
        scale, tiles, width, v_width, has, False, BLOCK, PRECISION,
    )  # fmt: skip
    dq_tile, dp_tile, to_first, to_last, of_curve = state
    store_rows(dq + b * dq_b + h * dq_h, dq_tile * natural_scale, at, present, dq_t, width)
    if HAS_QUERIES and not P_IS_Q:
        store_rows(dp + b * dp_b + h * dp_h, dp_tile * natural_scale, at, present, dp_t, width)
    if HAS_QUERIES:
        to = by_row + (sequence * blocks + row0 // BLOCK) * D
        store_total(to, to_first, other, width)
        store_total(to + sequences * blocks * D, to_last, other, width)
    if UNITS:
        total = 0.0
        if LSE_TOO:
            seen = present & (sums < float("inf"))
            total = tl.sum(tl.load(g_lse + of_head + at, mask=seen, other=0.0))
        to = to_curve + (sequence * blocks + row0 // BLOCK) * 3 * BLOCK_U
        position = positions_of(own, ends, keys, DOCUMENTS)
        store_sums(to, of_curve, terms[2][0], rates, position, total, (UNITS, BLOCK_U))


@triton.jit
def load_query_tile(
    source, curve, row0, own_start, ends, keys, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    SEES: tl.constexpr, HAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the gradients of scores need of a block of queries."""
    queries_at, others_at, grads_at, of_rows, q_t, p_t, g_t, queries = source
    lse, delta = of_rows
    at = row0 + tl.arange(0, BLOCK)
    inside = (at >= 0) & (at < queries)
    q = load_rows(queries_at, row0, queries, q_t, WIDTH, BLOCK)
    p = q
    if HAS[FOR_QUERIES] and not HAS[SAME_AS_Q]:
        p = load_rows(others_at, row0, queries, p_t, WIDTH, BLOCK)
    g = load_rows(grads_at, row0, queries, g_t, V_WIDTH, BLOCK)
    low, high = visible_rows(own_start + at, inside, ends, keys, SEES[0], SEES[1], SEES[2])
    minus = tl.load(delta + at, mask=inside, other=0.0)
    rates = minus
    if HAS[KNOTS]:
        rates = rates_of(curve, own_start + at, ends, keys, SEES[1])
    return q, p, g, load_lse(lse, at, queries), minus, low, high, rates


@triton.jit
def visit_queries(
    state, k, v, m, source, terms, column0, own_start, ends, keys, scale, tiles,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, SEES: tl.constexpr, HAS: tl.constexpr,
    FLAT: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients from blocks of queries, see `span`."""
    dk, dv, dm, to_first, to_last = state
    begin, end = span(tiles, FLAT)
    for n in tl.range(begin, end):
        block, row = place_of(n, tiles, 0, terms[3] - 1, FLAT)
        row0 = block * BLOCK
        own0 = own_start + row0
        q, p, g, sums, minus, low, high, rates = load_query_tile(
            source, terms[2][0], row0, own_start, ends, keys, WIDTH, V_WIDTH, SEES, HAS, BLOCK
        )
        scores = scores_of(
            q, k, p, m, terms, rates, row, row0, own0, column0, low, high, scale,
            WIDTH, HAS, FLAT, BLOCK, PRECISION,
        )  # fmt: skip
        weights = tl.exp2(scores - sums[:, None])
        dv = tl.dot(weights.to(g.dtype).T, g, dv, input_precision=PRECISION)
        ds = weights * (tl.dot(g, v.T, input_precision=PRECISION) - minus[:, None])
        dk = tl.dot(ds.to(q.dtype).T, q, dk, input_precision=PRECISION)
        if HAS[FOR_KEYS] and FLAT:
            all_queries = tl.sum(ds, 0)
            to_last += tl.where(row == terms[3] - 1, all_queries, 0.0)
            to_first += tl.where(row == terms[3] - 1, 0.0, all_queries)
        elif HAS[FOR_KEYS]:
            vectors, _, _, rows, zero = terms
            distance = own0 - column0
            dx = dk if HAS[SAME_AS_K] else dm
            dx = add_along(
                dx, ds.T, vectors[1], distance, rows, zero, vectors[3], -1, WIDTH, BLOCK, PRECISION
            )
            if HAS[SAME_AS_K]:
                dk = dx
            else:
                dm = dx
            at_first, at_last = ends_of(ds, own0, column0, rows, zero, BLOCK)
            to_first += tl.sum(at_first, 0)
            to_last += tl.sum(at_last, 0)
    return dk, dv, dm, to_first, to_last


@triton.jit(do_not_specialize=UNSPECIALIZED)
def to_keys(
    q, k, v, p, m, for_queries, for_keys, of_p, of_m, curve, logs,
    g, lse, delta, starts, first, last,
    dk, dv, dm, by_key, start, scale, natural_scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, p_b, p_h, p_t, m_b, m_h, m_t,
    e_r, e_h, f_r, f_h, curve_h, g_b, g_h, g_t,
    dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, dm_b, dm_h, dm_t,
    starts_b, ends_b, left, right, queries, keys, rows, zero, reach,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HAS_QUERIES: tl.constexpr, HAS_KEYS: tl.constexpr, P_IS_Q: tl.constexpr, M_IS_K: tl.constexpr,
    UNITS: tl.constexpr, BLOCK_U: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_STARTS: tl.constexpr, DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of k, v and m, and sums for the gradients of F's ends."""
    kv_heads: tl.constexpr = HEADS // GROUP
    tiles = (keys + BLOCK - 1) // BLOCK
    column0 = tl.program_id(0) % tiles * BLOCK
    b = (tl.program_id(0) // tiles // kv_heads).to(tl.int64)
    kv = (tl.program_id(0) // tiles % kv_heads).to(tl.int64)
    width: tl.constexpr = (D, BLOCK_D)
    v_width: tl.constexpr = (DV, BLOCK_DV)
    has: tl.constexpr = (HAS_QUERIES, HAS_KEYS, UNITS, BLOCK_U, P_IS_Q, M_IS_K)
    sees: tl.constexpr = (CAUSAL, DOCUMENTS, WINDOW)
    own_start = query_start(starts, start, b, starts_b, HAS_STARTS)
    at = column0 + tl.arange(0, BLOCK)
    present = at < keys
    k_tile = load_rows(k + b * k_b + kv * k_h, column0, keys, k_t, width, BLOCK)
    v_tile = load_rows(v + b * v_b + kv * v_h, column0, keys, v_t, v_width, BLOCK)
    m_tile = k_tile
    if HAS_KEYS and not M_IS_K:
        m_tile = load_rows(m + b * m_b + kv * m_h, column0, keys, m_t, width, BLOCK)
    ends = first + b * ends_b, last + b * ends_b, left, right
    # Blocks of queries that see some of these keys.
    least, most = queries_of_keys(own_start, column0, queries, left, right, CAUSAL, WINDOW, BLOCK)
    begin = (least - own_start) // BLOCK
    end = tl.where(most < least, begin, (most - own_start + BLOCK) // BLOCK)
    # Up to the block `near` all distances are past the first row, from `far` on past the last.
    near = begin
    far = end
    if (HAS_QUERIES or HAS_KEYS) and not CAUSAL:
        near = (column0 - zero - own_start + 1) // BLOCK
        near = tl.minimum(tl.maximum(near, begin), end)
    if HAS_QUERIES or HAS_KEYS:
        far = (column0 + BLOCK - 1 + rows - 1 - zero - own_start + BLOCK - 1) // BLOCK
        far = tl.minimum(tl.maximum(far, near), end)
    blocks = begin, near, far, end
    sequences = tl.num_programs(0).to(tl.int64) // tiles * GROUP
    empty = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dk_tile = empty
    dm_tile = empty
    dv_tile = tl.zeros((BLOCK, BLOCK_DV), tl.float32)
    none = tl.zeros((BLOCK,), tl.float32)
    for n in range(GROUP):
        h = kv * GROUP + n
        of_head = (b * HEADS + h) * queries
        vectors = for_queries + h * e_h, for_keys + h * f_h, e_r, f_r
        of_ends = of_p + of_head, of_m + (b * HEADS + h) * keys, queries, keys, sequences
        terms = vectors, of_ends, (curve + h * curve_h, logs, reach), rows, zero
        queries_at = q + b * q_b + h * q_h
        others_at = p + b * p_b + h * p_h
        grads_at = g + b * g_b + h * g_h
        of_rows = lse + of_head, delta + of_head
        source = queries_at, others_at, grads_at, of_rows, q_t, p_t, g_t, queries
        state = dk_tile, dv_tile, dm_tile, none, none
        if HAS_QUERIES or HAS_KEYS:
            state = visit_queries(
                state, k_tile, v_tile, m_tile, source, terms, column0, own_start, ends, keys, scale,
                blocks, width, v_width, sees, has, True, BLOCK, PRECISION,
            )  # fmt: skip
        if HAS_KEYS:
            # What the blocks have given so far is past the ends.
            dk_tile, dv_tile, dm_tile, to_first, to_last = state
            flat = to_first[:, None] * load_vector(vectors[1], rows * 0, f_r, width)[None, :]
            flat += to_last[:, None] * load_vector(vectors[1], rows - 1, f_r, width)[None, :]
            if M_IS_K:
                dk_tile += flat
            else:
                dm_tile += flat
            state = dk_tile, dv_tile, dm_tile, to_first, to_last
        state = visit_queries(
            state, k_tile, v_tile, m_tile, source, terms, column0, own_start, ends, keys, scale,
            blocks, width, v_width, sees, has, False, BLOCK, PRECISION,
        )  # fmt: skip
        dk_tile, dv_tile, dm_tile, to_first, to_last = state
        if HAS_KEYS:
            to = by_key + ((b * HEADS + h) * tiles + column0 // BLOCK) * D
            store_total(to, to_first, m_tile, width)
            store_total(to + sequences * tiles * D, to_last, m_tile, width)
    store_rows(dk + b * dk_b + kv * dk_h, dk_tile * natural_scale, at, present, dk_t, width)
    store_rows(dv + b * dv_b + kv * dv_h, dv_tile, at, present, dv_t, v_width)
    if HAS_KEYS and not M_IS_K:
        store_rows(dm + b * dm_b + kv * dm_h, dm_tile * natural_scale, at, present, dm_t, width)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "nearest", "batch"])
def to_vectors(
    q, k, v, p, m, for_queries, for_keys, of_p, of_m, curve, logs,
    g, lse, delta, starts, first, last,
    to_e, to_f, start, scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, p_b, p_h, p_t, m_b, m_h, m_t,
    e_r, e_h, f_r, f_h, curve_h, g_b, g_h, g_t,
    starts_b, ends_b, left, right, queries, keys, rows, zero, reach, nearest, batch,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HAS_QUERIES: tl.constexpr, HAS_KEYS: tl.constexpr, P_IS_Q: tl.constexpr, M_IS_K: tl.constexpr,
    UNITS: tl.constexpr, BLOCK_U: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_STARTS: tl.constexpr, DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The gradients of the vectors from a part of a diagonal of tiles.

    A tile's keys begin ``distance`` before its queries, so that all tiles of a diagonal have the
    same distances. The results are ``[parts, H, diagonals, 2 BLOCK, D]``, from the distance one
    block before on.
    """
    diagonal = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    kv = h // GROUP
    width: tl.constexpr = (D, BLOCK_D)
    v_width: tl.constexpr = (DV, BLOCK_DV)
    has: tl.constexpr = (HAS_QUERIES, HAS_KEYS, UNITS, BLOCK_U, P_IS_Q, M_IS_K)
    sees: tl.constexpr = (CAUSAL, DOCUMENTS, WINDOW)
    distance = nearest + diagonal * BLOCK
    vectors = for_queries + h * e_h, for_keys + h * f_h, e_r, f_r
    of_curve = curve + h * curve_h, logs, reach
    # No tile is past the ends.
    terms = vectors, (of_p, of_m, queries, keys, h), of_curve, rows, zero
    empty = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    of_queries = empty, empty
    of_keys = empty, empty
    for n in range(batch):
        b = tl.zeros((), tl.int64) + n
        own_start = query_start(starts, start, b, starts_b, HAS_STARTS)
        of_head = (b * HEADS + h) * queries
        queries_at = q + b * q_b + h * q_h
        others_at = p + b * p_b + h * p_h
        grads_at = g + b * g_b + h * g_h
        of_rows = lse + of_head, delta + of_head
        source = queries_at, others_at, grads_at, of_rows, q_t, p_t, g_t, queries
        ends = first + b * ends_b, last + b * ends_b, left, right
        # Blocks of queries with a key at one of these distances, and this part of them.
        begin = tl.maximum(distance - BLOCK + 1 - own_start, 0) // BLOCK
        end = tl.minimum(keys - 1 + distance - own_start + BLOCK, queries + BLOCK - 1) // BLOCK
        size = (tl.maximum(end - begin, 0) + tl.num_programs(2) - 1) // tl.num_programs(2)
        begin += tl.program_id(2) * size
        for block in tl.range(begin, tl.maximum(begin, tl.minimum(begin + size, end))):
            row0 = block * BLOCK
            key0 = own_start + row0 - distance
            query, other, grad, sums, minus, low, high, rates = load_query_tile(
                source, of_curve[0], row0, own_start, ends, keys, width, v_width, sees, has, BLOCK
            )
            key = load_rows(k + b * k_b + kv * k_h, key0, keys, k_t, width, BLOCK)
            m_tile = key
            if HAS_KEYS and not M_IS_K:
                m_tile = load_rows(m + b * m_b + kv * m_h, key0, keys, m_t, width, BLOCK)
            value = load_rows(v + b * v_b + kv * v_h, key0, keys, v_t, v_width, BLOCK)
            scores = scores_of(
                query, key, other, m_tile, terms, rates, 0, row0, own_start + row0, key0, low, high,
                scale, width, has, False, BLOCK, PRECISION,
            )  # fmt: skip
            weights = tl.exp2(scores - sums[:, None])
            ds = weights * (tl.dot(grad, value.T, input_precision=PRECISION) - minus[:, None])
            if HAS_QUERIES:
                of_queries = add_to_vectors(of_queries, ds, other, BLOCK, PRECISION)
            if HAS_KEYS:
                of_keys = add_to_vectors(of_keys, ds.T, m_tile, BLOCK, PRECISION)
    at = tl.arange(0, BLOCK)
    everywhere = at >= 0
    place = (tl.program_id(2) * HEADS + h) * tl.num_programs(0) + diagonal
    place *= 2 * BLOCK * D
    if HAS_QUERIES:
        store_rows(to_e + place, of_queries[0], at + BLOCK, everywhere, D, width)
        store_rows(to_e + place, of_queries[1], at, everywhere, D, width)
    if HAS_KEYS:
        # Distances are in reverse order; no key is a whole block from the diagonal.
        store_rows(to_f + place, of_keys[0], BLOCK - at, everywhere, D, width)
        store_rows(
            to_f + place, of_keys[1], (2 * BLOCK - at) & (2 * BLOCK - 1), everywhere, D, width
        )


@triton.jit(
    do_not_specialize=["start", "rows", "zero", "low", "high", "count", "parts", "blocks", "batch"]
)
def fold(
    sums, ends, to, start, scale, rows, zero, low, high, count, parts, blocks, batch,
    HEADS: tl.constexpr, TOGETHER: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of vectors, from those of diagonals, and from the sums at the ends.

    ``TOGETHER`` is the number of heads that share their vectors.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channels = tl.arange(0, BLOCK_D)
    narrow = (channels < D)[None, :]
    place = row - zero - low
    between = (place >= 0) & (row - zero <= high)
    place = tl.where(between, place, 0)
    diagonal = place // SIZE
    # The second half of a diagonal's distances are the first half of the next one's.
    after = between & (diagonal + 1 < count)
    place = (diagonal.to(tl.int64) * 2 * SIZE + place % SIZE) * D
    total = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    has_end = (tl.program_id(0) == 0) | (tl.program_id(0) == tl.num_programs(0) - 1)
    for n in range(TOGETHER):
        h = (tl.program_id(1) * TOGETHER + n).to(tl.int64)
        for part in range(parts):
            at = sums + (part * HEADS + h) * count * 2 * SIZE * D
            at = at + place[:, None] + channels[None, :]
            total += tl.load(at + SIZE * D, mask=between[:, None] & narrow, other=0.0)
            total += tl.load(at + 2 * SIZE * D, mask=after[:, None] & narrow, other=0.0)
        for b in range(tl.where(has_end, batch, 0)):
            for first in range(0, blocks, BLOCK):
                block = first + tl.arange(0, BLOCK)
                at = ends + ((b * HEADS + h) * blocks + block[:, None]) * D + channels[None, :]
                present = (block < blocks)[:, None] & narrow
                of_first = tl.load(at, mask=present, other=0.0)
                at += tl.cast(batch, tl.int64) * HEADS * blocks * D
                of_last = tl.load(at, mask=present, other=0.0)
                total += tl.where((row == 0)[:, None], tl.sum(of_first, 0)[None, :], 0.0)
                total += tl.where((row == rows - 1)[:, None], tl.sum(of_last, 0)[None, :], 0.0)
    shared: tl.constexpr = HEADS // TOGETHER
    at = to + (row.to(tl.int64)[:, None] * shared + tl.program_id(1)) * D + channels[None, :]
    made = (total * scale).to(to.dtype.element_ty)
    tl.store(at, made, mask=(row < rows)[:, None] & narrow)


# Queries and keys of a tile, warps and stages of each kernel. The first two are for calls with
# vectors for queries and for keys, of halves in heads up to 64 and up to 128. For other calls, the
# next are for halves in heads up to 64, up to 128 and wider, and the last for float32 in the same
# heads.
_FLOATS = (32, 4, 1), (32, 4, 1), (16, 4, 1)
TILES = {
    "forward": ((64, 4, 1), (64, 4, 1), (64, 4, 2), (64, 4, 1), (32, 4, 1), *_FLOATS),
    "to_queries": ((64, 4, 1), (32, 4, 2), (64, 4, 2), (64, 4, 1), (32, 4, 1), *_FLOATS),
    "to_keys": ((32, 2, 2), (32, 4, 2), (64, 4, 2), (64, 4, 1), (32, 4, 1), *_FLOATS),
    "to_vectors": ((32, 4, 2), (32, 4, 1), (64, 4, 1), (64, 4, 1), (32, 4, 1), *_FLOATS),
}


class Prepared:
    """A call with terms: its tensors as kernels read them, and the launches that they need.

    ``for_queries`` are vectors ``[R, 1 or H, D]`` for ``p``, which has the shape of ``q``;
    ``for_keys`` are for ``m``, which has that of ``k``. If they are None, ``p`` is ``q`` and ``m``
    is ``k``. A network is that of `curve`.
    """

    def __init__(self, given: Any, call: Any, plan: Plan) -> None:
        self.plan, self.call = plan, with_whole_places(plan, call)
        self.q, self.k, self.v = (plan.with_dense_rows(x) for x in (given.q, given.k, given.v))
        bias = call.bias
        p, m, for_queries, for_keys = (
            getattr(bias, name, None) for name in ("p", "m", "for_queries", "for_keys")
        )
        self.zero = getattr(bias, "zero", 0)
        self.has = for_queries is not None, for_keys is not None
        self.rows = next((len(x) for x in (for_queries, for_keys) if x is not None), 1)
        # Distances that there can be.
        self.reach = self.q.shape[2] + self.k.shape[2]
        self.curve = None
        if call.kind == "network":
            self.curve = Curve(bias.network, self.q.shape[1], self.reach, plan)
        self.own = p is None, m is None
        self.p = self.q if p is None else plan.with_dense_rows(p)
        self.m = self.k if m is None else plan.with_dense_rows(m)
        self.e, self.f = (
            self.q if x is None else plan.with_dense_rows(x) for x in (for_queries, for_keys)
        )
        places = self.call.starts, self.call.first, self.call.last
        self.places = [self.q if x is None else x for x in places]
        pairs = (self.p, self.e, self.has[0]), (self.m, self.f, self.has[1])
        ends = [self._at_ends(x, of) if has else self.q for x, of, has in pairs]
        self.given = (self.q, self.k, self.v, self.p, self.m)
        curve = (self.q, self.q) if self.curve is None else (self.curve.lines, self.curve.logs)
        self.inputs = (*self.given, self.e, self.f, *ends, *curve)

    def _at_ends(self, x: Operand, vectors: Operand) -> Operand:
        batch, heads, count = x.shape[0], self.q.shape[1], x.shape[2]
        to = self.plan.empty((2, batch, heads, count), torch.float32)
        width = block_of(x)
        constants = {"HEADS": heads, "GROUP": heads // x.shape[1], "D": x.shape[3]}
        constants |= {"BLOCK_D": width, "BLOCK": max(4096 // width, 16)}
        grid = (triton.cdiv(count, constants["BLOCK"]) * batch * heads,)
        steps = strides(vectors)[:2]
        arguments = x, vectors, to, 0, *strides(x), *steps, count, len(vectors)
        self.plan.launch(at_ends, grid, arguments, constants, **OPTIONS, num_warps=4)
        return to

    def block(self, kernel: Any) -> int:
        """Queries and keys of a tile."""
        return self._tile(kernel)[0]

    def _tile(self, kernel: Any) -> tuple[int, int, int]:
        wide = max(self.q.shape[3], self.v.shape[3])
        at = (wide > 64) + (wide > 128) + (3 if self.q.dtype == torch.float32 else 0)
        return TILES[kernel.__name__][at if at < 2 and all(self.has) else 2 + at]

    def _strides(self, *others: Operand) -> list[Any]:
        found: list[Any] = [*strides(*self.given)]
        for x, has in zip((self.e, self.f), self.has, strict=True):
            found += strides(x)[:2] if has else (0, 0)
        found.append(0 if self.curve is None else self.curve.lines.stride(0))
        return [*found, *strides(*others)]

    def launch(
        self,
        kernel: Any,
        scales: Any,
        strided: Any,
        grid: Any,
        tensors: Any,
        more: Any = (),
        **how: Any,
    ) -> None:
        """Launch a kernel on the tensors of the call and others."""
        call, q, k = self.call, self.q, self.k
        sizes = (q.shape[2], k.shape[2], self.rows, self.zero, self.reach, *more)
        block, warps, stages = self._tile(kernel)
        units, block_u = (0, 1) if self.curve is None else (self.curve.units, self.curve.block)
        constants = constants_of(q, k, self.v, call) | {"CAUSAL": call.causal, "BLOCK": block}
        constants |= {"HAS_QUERIES": self.has[0], "HAS_KEYS": self.has[1], **how}
        constants |= {"P_IS_Q": self.own[0], "M_IS_K": self.own[1]}
        constants |= {"UNITS": units, "BLOCK_U": block_u}
        options = {**OPTIONS, "num_warps": warps, "num_stages": stages}
        numbers = *scales, *self._strides(*strided), *places_of(call), *sizes
        self.plan.launch(kernel, grid, (*tensors, call.start, *numbers), constants, **options)


def plan_forward(given: Any, call: Any, plan: Plan) -> None:
    """Make the output and the log-sum-exp."""
    plan.least, plan.most = STARTS
    out, lse = plan.results
    made = Prepared(given, call, plan)
    batch, heads, queries, _ = made.q.shape
    grid = (triton.cdiv(queries, made.block(forward)) * batch * heads,)
    scales = (call.scale * LOG2E,)
    made.launch(forward, scales, (out,), grid, (*made.inputs, out, lse, *made.places))


def plan_backward(given: Any, call: Any, plan: Plan) -> None:
    """Make the gradients of q, k, v, p, m, ``for_queries``, ``for_keys`` and the network."""
    dq, dk, dv, *to_bias = plan.results
    to = dict(zip(call.bias._fields, to_bias, strict=False))
    made, g = Prepared(given, call, plan), plan.with_dense_rows(given.g)
    out, lse = whole(plan, given.out), whole(plan, given.lse)
    of_lse = lse if given.g_lse is None else whole(plan, given.g_lse)
    q, k = made.q, made.k
    (batch, heads, queries, width), keys = q.shape, k.shape[2]
    delta = plan.empty(lse.shape, lse.dtype)
    scales = call.scale * LOG2E, call.scale
    blocks = triton.cdiv(queries, made.block(to_queries))
    by_row, to_curve = lse, lse
    if made.has[0]:
        by_row = plan.empty((2, batch * heads, blocks, width), lse.dtype)
    if made.curve is not None:
        to_curve = plan.empty((batch * heads, blocks, 3, made.curve.block), lse.dtype)
    to_q = dq, q if made.own[0] else to["p"]
    tensors = (*made.inputs, g, out, lse, of_lse, *made.places, *to_q, delta, by_row, to_curve)
    grid = (blocks * batch * heads,)
    how = {"LSE_TOO": given.g_lse is not None}
    made.launch(to_queries, scales, (g, out, *to_q), grid, tensors, **how)
    tiles = triton.cdiv(keys, made.block(to_keys))
    by_key = plan.empty((2, batch * heads, tiles, width), lse.dtype) if made.has[1] else lse
    to_k = dk, dv, k if made.own[1] else to["m"]
    tensors = (*made.inputs, g, lse, delta, *made.places, *to_k, by_key)
    made.launch(to_keys, scales, (g, *to_k), (tiles * batch * k.shape[1],), tensors)
    if any(made.has):
        _plan_vectors(made, (g, lse, delta), (by_row, by_key), (to["for_queries"], to["for_keys"]))
    if made.curve is not None:
        made.curve.plan_gradient(to_curve, batch, to["network"])


def _plan_vectors(made: Prepared, above: Any, ends: Any, results: Any) -> None:
    """Make the gradients of the vectors."""
    plan, call, q, k = made.plan, made.call, made.q, made.k
    # Distances that are seen, and have a row between the first and the last.
    low = max(1 - made.zero, 0 if call.causal else -q.shape[2] - k.shape[2])
    high = min(made.rows - 2 - made.zero, q.shape[2] + k.shape[2])
    if call.starts is None:
        high = min(high, call.start + q.shape[2] - 1)
        low = max(low, call.start - k.shape[2] + 1)
    if call.window is not None:
        low, high = max(low, -call.window[1]), min(high, call.window[0])
    block = made.block(to_vectors)
    count = 0 if high < low else -(-(high - low) // block) + 1
    # Short diagonals have parts, so that all processors have work.
    parts = min(256 // max(count * q.shape[1], 1), q.shape[2] // (4 * block))
    parts = max(parts, 1)
    shape = (parts * q.shape[1], count, 2 * block, q.shape[3])
    sums = [plan.empty(shape if has else (0,), torch.float32) for has in made.has]
    tensors = (*made.inputs, *above, *made.places, *sums)
    scales = (call.scale * LOG2E,)
    grid = count, q.shape[1], parts
    made.launch(to_vectors, scales, above[:1], grid, tensors, (low, q.shape[0]))
    for has, total, of_ends, to in zip(made.has, sums, ends, results, strict=True):
        if has:
            _plan_fold(made, total, of_ends, to, low, high)


def _plan_fold(
    made: Prepared, sums: Operand, ends: Operand, to: Operand, low: int, high: int
) -> None:
    """Make the gradient of vectors from those of diagonals, and from the sums at the ends."""
    (batch, heads), (_, count, size, width) = made.q.shape[:2], sums.shape
    parts = len(sums) // heads
    numbers = (made.call.scale, made.rows, made.zero, low, high, count, parts)
    constants = {"HEADS": heads, "TOGETHER": heads // to.shape[1], "D": width}
    constants |= {"BLOCK_D": triton.next_power_of_2(width), "SIZE": size // 2, "BLOCK": 16}
    grid = triton.cdiv(made.rows, 16), to.shape[1]
    arguments = sums, ends, to, 0, *numbers, ends.shape[2], batch
    made.plan.launch(fold, grid, arguments, constants)
