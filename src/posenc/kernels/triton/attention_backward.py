"""Attention with a bias: the gradients.

With weights ``P`` and ``dP = dO V^T``, the gradient of a score is ``dS = P (dP - delta)``, where
``delta`` is the row sum of ``dO * O`` less the gradient of the log-sum-exp. Each program owns what
it writes, so that sums have one order: `to_queries` owns queries, `to_keys` keys, and `to_table`
distances (`attention_table`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.kernels.triton.attention_bias import (
    COLUMN,
    FLAT,
    LOG2E,
    NONE,
    PAD,
    SLOPES,
    SUMS,
    TABLE,
    TILE,
    add_bias,
    head_bias,
    load_keys,
    load_rows,
    query_start,
    row_bias,
    visible,
)

# Lengths, offsets and windows, which would compile a kernel again.
UNSPECIALIZED = ["start", "left", "right", "keys", "queries", "width", "zero", "range_size"]


@triton.jit
def load_lse(lse, rows, queries):
    """The log-sum-exps; infinity where a query sees nothing, so that its weights are zero."""
    sums = tl.load(lse + rows, mask=(rows >= 0) & (rows < queries), other=float("-inf")) * LOG2E
    return tl.where(sums == float("-inf"), float("inf"), sums)


@triton.jit
def visit_keys(
    state, q, g, lse, delta, source, numbers, flat, own0, ends, scale, begin, end,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HOW: tl.constexpr, READ: tl.constexpr, MASKED: tl.constexpr,
    TO_ROWS: tl.constexpr,
):  # fmt: skip
    """Add the gradients from the tiles of keys ``begin .. end - 1``.

    ``TO_ROWS`` sums, for each query, ``dS`` times the distance for slopes, and ``dS`` where the
    distance is at or past the table's first column.
    """
    dq, by_row = state
    keys_at, values_at, k_t, v_t, keys = source
    low, high = ends
    for tile in tl.range(begin, end):
        first = tile * BLOCK_N
        columns = first + tl.arange(0, BLOCK_N)
        k = load_keys(keys_at, first, keys, k_t, K_WIDTH, BLOCK_N, MASKED)
        v = load_keys(values_at, first, keys, v_t, V_WIDTH, BLOCK_N, MASKED)
        scores = tl.dot(q, k.T, input_precision=HOW[2])
        scores = add_bias(
            scores, numbers, flat, own0, first, keys, scale, BLOCK_M, BLOCK_N, HOW, READ, True
        )
        if MASKED:
            seen = (columns[None, :] >= low[:, None]) & (columns[None, :] <= high[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        weights = tl.exp2(scores - lse[:, None])
        dp = tl.dot(g, v.T, input_precision=HOW[2])
        ds = weights * (dp - delta[:, None])
        if TO_ROWS:
            distance = own0 + tl.arange(0, BLOCK_M)[:, None] - columns[None, :]
            if HOW[0] == SLOPES:
                by_row += tl.sum(ds * tl.abs(distance).to(tl.float32), 1)
            if HOW[0] == TABLE:
                by_row += tl.sum(tl.where(distance + numbers[4] <= 0, ds, 0.0), 1)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=HOW[2])
    return dq, by_row


@triton.jit(do_not_specialize=UNSPECIALIZED)
def to_queries(
    q, k, v, g, out, lse, g_lse, values, starts, first, last, ranges, dq, delta, by_row, start,
    scale, natural_scale, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    g_b, g_h, g_t, o_b, o_h, o_t, dq_b, dq_h, dq_t,
    values_b, values_h, starts_b, ends_b, left, right, queries, keys, width, zero, range_size,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, HAS_STARTS: tl.constexpr, DOCUMENTS: tl.constexpr,
    WINDOW: tl.constexpr, PRUNE: tl.constexpr, TO_ROWS: tl.constexpr, LSE_TOO: tl.constexpr,
    PRECISION: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries, and ``delta``, which the other kernels read."""
    blocks = (queries + BLOCK_M - 1) // BLOCK_M
    sequence = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks
    b = (sequence // HEADS).to(tl.int64)
    h = sequence % HEADS
    h64 = h.to(tl.int64)
    k_width: tl.constexpr = (D, BLOCK_D)
    v_width: tl.constexpr = (DV, BLOCK_DV)
    own0 = query_start(starts, start, b, starts_b, HAS_STARTS) + block * BLOCK_M
    row0 = block * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    own = own0 + tl.arange(0, BLOCK_M)
    present = rows < queries
    query = load_rows(q + b * q_b + h64 * q_h, row0, queries, q_t, k_width, BLOCK_M)
    grad = load_rows(g + b * g_b + h64 * g_h, row0, queries, g_t, v_width, BLOCK_M)
    made = load_rows(out + b * o_b + h64 * o_h, row0, queries, o_t, v_width, BLOCK_M)
    of_head = sequence.to(tl.int64) * queries
    minus = tl.sum(grad.to(tl.float32) * made.to(tl.float32), 1)
    if LSE_TOO:
        minus -= tl.load(g_lse + of_head + rows, mask=present, other=0.0)
    tl.store(delta + of_head + rows, minus, mask=present)
    numbers = head_bias(values, b, h, own0, width, zero, values_b, values_h, KIND)
    exact: tl.constexpr = q.dtype.element_ty == tl.float32
    how: tl.constexpr = (KIND, exact, PRECISION, PTX)
    masks: tl.constexpr = DOCUMENTS or WINDOW
    sums = load_lse(lse + of_head, rows, queries)
    if not exact:
        sums -= row_bias(numbers, own0, own, KIND)
    kv = (h // GROUP).to(tl.int64)
    keys_at = k + b * k_b + kv * k_h
    values_at = v + b * v_b + kv * v_h
    of_sequence = first + b * ends_b, last + b * ends_b, left, right
    low, high = visible(own, of_sequence, keys, CAUSAL, DOCUMENTS, WINDOW)
    low = tl.where(present, low, keys)
    high = tl.where(present, high, -1)
    ends = low, high
    source = keys_at, values_at, k_t, v_t, keys
    whole: tl.constexpr = KIND == TABLE or (exact and KIND != NONE)
    read: tl.constexpr = TILE if whole or (KIND == SLOPES and not CAUSAL) else COLUMN
    begin = tl.maximum(tl.min(low), 0) // BLOCK_N
    end = (tl.max(high) + BLOCK_N) // BLOCK_N
    if PRUNE:
        of_block = (sequence.to(tl.int64) * range_size + row0 // PRUNE) * 2
        begin = tl.maximum(begin, tl.load(ranges + of_block) // BLOCK_N)
        stop = tl.load(ranges + of_block + 1)
        end = tl.minimum(end, (stop + BLOCK_N - 1) // BLOCK_N)
    middle = end
    if CAUSAL:
        middle = tl.minimum(tl.maximum((tl.minimum(own0, keys - 1) + 1) // BLOCK_N, begin), end)
    elif not masks:
        # Only the last tile may be cut short.
        middle = tl.minimum(keys // BLOCK_N, end)
    state = tl.zeros((BLOCK_M, BLOCK_D), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    near = begin
    far = middle
    if KIND == TABLE:
        flat = tl.load(numbers[0])
        near = tl.minimum(tl.maximum((own0 + zero - width + 2) // BLOCK_N, begin), middle)
        state = visit_keys(
            state, query, grad, sums, minus, source, numbers, flat, own0, ends, scale, begin,
            near, k_width, v_width, BLOCK_M, BLOCK_N, how, FLAT, masks, False,
        )  # fmt: skip
        if not CAUSAL:
            far = tl.minimum(tl.maximum((own0 + BLOCK_M + zero + BLOCK_N) // BLOCK_N, near), middle)
            flat = tl.load(numbers[0] + PAD + width - 1)
            state = visit_keys(
                state, query, grad, sums, minus, source, numbers, flat, own0, ends, scale, far,
                middle, k_width, v_width, BLOCK_M, BLOCK_N, how, FLAT, masks, TO_ROWS,
            )  # fmt: skip
    state = visit_keys(
        state, query, grad, sums, minus, source, numbers, 0.0, own0, ends, scale, near, far,
        k_width, v_width, BLOCK_M, BLOCK_N, how, read, masks, TO_ROWS,
    )  # fmt: skip
    state = visit_keys(
        state, query, grad, sums, minus, source, numbers, 0.0, own0, ends, scale, middle, end,
        k_width, v_width, BLOCK_M, BLOCK_N, how, read, True, TO_ROWS,
    )  # fmt: skip
    gradient, sums_by_row = state
    if TO_ROWS:
        tl.store(by_row + of_head + rows, sums_by_row, mask=present)
    channels = tl.arange(0, BLOCK_D)
    to = dq + b * dq_b + h64 * dq_h + rows.to(tl.int64)[:, None] * dq_t + channels[None, :]
    gradient = gradient * natural_scale
    store = present[:, None] & (channels < D)[None, :]
    tl.store(to, gradient.to(dq.dtype.element_ty), mask=store)


@triton.jit
def visit_queries(
    state, k, v, source, of_head, flat, column0, own_start, ends, scale, begin, end,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HOW: tl.constexpr, READ: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Add the gradients from the blocks of queries ``begin .. end - 1``."""
    dk, dv, by_key = state
    queries_at, grads_at, q_t, g_t, lse, delta, queries, keys = source
    columns = column0 + tl.arange(0, BLOCK_N)
    for block in tl.range(begin, end):
        row0 = block * BLOCK_M
        own0 = own_start + row0
        own = own0 + tl.arange(0, BLOCK_M)
        rows = row0 + tl.arange(0, BLOCK_M)
        q = load_rows(queries_at, row0, queries, q_t, K_WIDTH, BLOCK_M)
        g = load_rows(grads_at, row0, queries, g_t, V_WIDTH, BLOCK_M)
        scores = tl.dot(k, q.T, input_precision=HOW[2])
        origin = of_head[2]
        if HOW[0] == SUMS:
            origin = tl.load(of_head[0] + tl.minimum(tl.maximum(own0, 0), of_head[3] - 1))
        numbers = of_head[0], of_head[1], origin, of_head[3], of_head[4]
        scores = add_bias(
            scores, numbers, flat, own0, column0, keys, scale, BLOCK_M, BLOCK_N, HOW, READ, False
        )
        sums = load_lse(lse, rows, queries)
        if HOW[0] != TABLE and not HOW[1]:
            sums -= row_bias(numbers, own0, own, HOW[0])
        if MASKED:
            low, high = visible(own, ends, keys, CAUSAL, DOCUMENTS, WINDOW)
            seen = (columns[:, None] >= low[None, :]) & (columns[:, None] <= high[None, :])
            scores = tl.where(seen, scores, float("-inf"))
        weights = tl.exp2(scores - sums[None, :])
        dv = tl.dot(weights.to(g.dtype), g, dv, input_precision=HOW[2])
        minus = tl.load(delta + rows, mask=rows < queries, other=0.0)
        dp = tl.dot(v, g.T, input_precision=HOW[2])
        ds = weights * (dp - minus[None, :])
        if HOW[0] == SUMS:
            by_key += tl.sum(ds, 1)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=HOW[2])
    return dk, dv, by_key


@triton.jit(do_not_specialize=UNSPECIALIZED)
def to_keys(
    q, k, v, g, lse, delta, values, starts, first, last, ranges, dk, dv, by_key, start,
    scale, natural_scale, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    values_b, values_h, starts_b, ends_b, left, right, queries, keys, width, zero, range_size,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, HAS_STARTS: tl.constexpr, DOCUMENTS: tl.constexpr,
    WINDOW: tl.constexpr, NARROW: tl.constexpr, PRUNE: tl.constexpr,
    PRECISION: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values."""
    kv_heads: tl.constexpr = HEADS // GROUP
    tiles = (keys + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) % tiles
    b = (tl.program_id(0) // tiles // kv_heads).to(tl.int64)
    kv = tl.program_id(0) // tiles % kv_heads
    kv64 = kv.to(tl.int64)
    k_width: tl.constexpr = (D, BLOCK_D)
    v_width: tl.constexpr = (DV, BLOCK_DV)
    own_start = query_start(starts, start, b, starts_b, HAS_STARTS)
    column0 = tile * BLOCK_N
    columns = column0 + tl.arange(0, BLOCK_N)
    k_tile = load_rows(k + b * k_b + kv64 * k_h, column0, keys, k_t, k_width, BLOCK_N)
    v_tile = load_rows(v + b * v_b + kv64 * v_h, column0, keys, v_t, v_width, BLOCK_N)
    exact: tl.constexpr = q.dtype.element_ty == tl.float32
    how: tl.constexpr = (KIND, exact, PRECISION, PTX)
    masks: tl.constexpr = DOCUMENTS or WINDOW
    ends = first + b * ends_b, last + b * ends_b, left, right
    whole: tl.constexpr = KIND == TABLE or (exact and KIND != NONE)
    read: tl.constexpr = TILE if whole or (KIND == SLOPES and not CAUSAL) else COLUMN
    blocks = (queries + BLOCK_M - 1) // BLOCK_M
    # Blocks of queries that see some of these keys.
    least_own = own_start
    most_own = own_start + queries - 1
    if CAUSAL:
        least_own = tl.maximum(least_own, column0)
    if WINDOW:
        least_own = tl.maximum(least_own, column0 - right)
        most_own = tl.minimum(most_own, column0 + BLOCK_N - 1 + left)
    if NARROW:
        # A document's queries see its keys, and no others do.
        near = tl.minimum(columns, keys - 1)
        of_first = tl.load(first + b * ends_b + near).to(tl.int32)
        of_last = tl.load(last + b * ends_b + near).to(tl.int32)
        least_own = tl.maximum(least_own, tl.min(of_first))
        most_own = tl.minimum(most_own, tl.max(of_last))
    begin = (least_own - own_start) // BLOCK_M
    end = (most_own - own_start + BLOCK_M) // BLOCK_M
    end = tl.minimum(tl.where(most_own < least_own, begin, end), blocks)
    dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv_tile = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    for n in range(GROUP):
        h = kv * GROUP + n
        h64 = h.to(tl.int64)
        of_head = (b * HEADS + h) * queries
        numbers = head_bias(values, b, h, own_start, width, zero, values_b, values_h, KIND)
        start_block = begin
        stop_block = end
        if PRUNE:
            # From the first to the last block of queries whose pruned range has some of these keys.
            saved = ranges + (b * HEADS + h) * range_size * 2
            start_block = end
            stop_block = begin
            for m in range(0, range_size, 64):
                part = m + tl.arange(0, 64)
                inside = part < range_size
                low = tl.load(saved + 2 * part, mask=inside, other=keys)
                high = tl.load(saved + 2 * part + 1, mask=inside, other=0)
                needs = inside & (low < column0 + BLOCK_N) & (high > column0)
                rows = part * (PRUNE // BLOCK_M)
                start_block = tl.minimum(start_block, tl.min(tl.where(needs, rows, end)))
                after = tl.max(tl.where(needs, rows + PRUNE // BLOCK_M, begin))
                stop_block = tl.maximum(stop_block, after)
            start_block = tl.maximum(start_block, begin)
            stop_block = tl.minimum(stop_block, end)
        queries_at = q + b * q_b + h64 * q_h
        grads_at = g + b * g_b + h64 * g_h
        source = queries_at, grads_at, q_t, g_t, lse + of_head, delta + of_head, queries, keys
        state = dk_tile, dv_tile, tl.zeros((BLOCK_N,), tl.float32)
        full = start_block
        if CAUSAL:
            # Blocks whose first query is past these keys need no mask.
            full = (column0 + BLOCK_N - 1 - own_start + BLOCK_M - 1) // BLOCK_M
            full = tl.minimum(tl.maximum(full, start_block), stop_block)
            state = visit_queries(
                state, k_tile, v_tile, source, numbers, 0.0, column0, own_start, ends, scale,
                start_block, full, k_width, v_width, BLOCK_M, BLOCK_N, how, read, True, CAUSAL,
                DOCUMENTS, WINDOW,
            )  # fmt: skip
        far = stop_block
        if KIND == TABLE:
            # From this block on, every distance is past the table's end.
            far = (column0 + BLOCK_N - 1 + width - 1 - zero - own_start + BLOCK_M - 1) // BLOCK_M
            far = tl.minimum(tl.maximum(far, full), stop_block)
            if not CAUSAL:
                # Up to this block, every distance is past the table's beginning.
                early = (column0 - zero - own_start + 1) // BLOCK_M
                early = tl.minimum(tl.maximum(early, start_block), far)
                flat = tl.load(numbers[0] + PAD + width - 1)
                state = visit_queries(
                    state, k_tile, v_tile, source, numbers, flat, column0, own_start, ends, scale,
                    start_block, early, k_width, v_width, BLOCK_M, BLOCK_N, how, FLAT, masks,
                    CAUSAL, DOCUMENTS, WINDOW,
                )  # fmt: skip
                full = early
        state = visit_queries(
            state, k_tile, v_tile, source, numbers, 0.0, column0, own_start, ends, scale, full,
            far, k_width, v_width, BLOCK_M, BLOCK_N, how, read, masks, CAUSAL, DOCUMENTS,
            WINDOW,
        )  # fmt: skip
        if KIND == TABLE:
            flat = tl.load(numbers[0])
            state = visit_queries(
                state, k_tile, v_tile, source, numbers, flat, column0, own_start, ends, scale,
                far, stop_block, k_width, v_width, BLOCK_M, BLOCK_N, how, FLAT, masks, CAUSAL,
                DOCUMENTS, WINDOW,
            )  # fmt: skip
        dk_tile, dv_tile, sums = state
        if KIND == SUMS:
            tl.store(by_key + (b * HEADS + h) * keys + columns, sums, mask=columns < keys)
    present = columns < keys
    channels = tl.arange(0, BLOCK_D)
    to = dk + b * dk_b + kv64 * dk_h + columns.to(tl.int64)[:, None] * dk_t + channels[None, :]
    store = present[:, None] & (channels < D)[None, :]
    tl.store(to, (dk_tile * natural_scale).to(dk.dtype.element_ty), mask=store)
    channels = tl.arange(0, BLOCK_DV)
    to = dv + b * dv_b + kv64 * dv_h + columns.to(tl.int64)[:, None] * dv_t + channels[None, :]
    store = present[:, None] & (channels < DV)[None, :]
    tl.store(to, dv_tile.to(dv.dtype.element_ty), mask=store)
