"""Attention with a bias: the kernels of the gradients.

With weights ``P`` and ``dP = dO V^T``, the gradient of a score is ``dS = P (dP - delta)``, where
``delta`` is the row sum of ``dO * O`` less the gradient of the log-sum-exp. Each program owns what
it writes, so that sums have one order: `to_queries` owns queries, `to_keys` keys, and `to_table`
distances.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.ops.attention.triton.attention_parts import (
    COLUMN,
    FLAT,
    NONE,
    PAD,
    SLOPES,
    SUMS,
    TABLE,
    TILE,
    add_bias,
    head_bias,
    hide,
    load_keys,
    load_lse,
    load_rows,
    queries_of_keys,
    query_block,
    query_start,
    row_bias,
    store_delta,
    store_rows,
    visible,
    visible_rows,
)

# Lengths, offsets and windows, which would compile a kernel again.
UNSPECIALIZED = ["start", "left", "right", "keys", "queries", "width", "zero", "range_size"]


@triton.jit
def visit_keys(
    state, q, g, lse, delta, source, numbers, flat, own0, ends, scale, begin, end,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HOW: tl.constexpr, READ: tl.constexpr, MASKED: tl.constexpr,
    TO_ROWS: tl.constexpr, TO_FIRST: tl.constexpr,
):  # fmt: skip
    """Add the gradients from the tiles of keys ``begin .. end - 1``.

    ``TO_ROWS`` sums, for each query, the gradient of slopes, ``dS`` for running sums, and ``dS`` of
    the distances beyond the last column for tables; ``TO_FIRST`` sums ``dS`` of those before the
    first.
    """
    dq, by_row, before_first = state
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
            scores = hide(scores, low, high, first, BLOCK_N)
        weights = tl.exp2(scores - lse[:, None])
        dp = tl.dot(g, v.T, input_precision=HOW[2])
        ds = weights * (dp - delta[:, None])
        distance = own0 + tl.arange(0, BLOCK_M)[:, None] - columns[None, :]
        if TO_ROWS:
            counted = ds
            if HOW[0] == SLOPES:
                counted = -ds * tl.abs(distance).to(tl.float32)
            elif HOW[0] == TABLE and READ != FLAT:
                counted = tl.where(distance + numbers[4] >= numbers[3], ds, 0.0)
            by_row += tl.sum(counted, 1)
        if TO_FIRST:
            before_first += tl.sum(tl.where(distance + numbers[4] < 0, ds, 0.0), 1)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=HOW[2])
    return dq, by_row, before_first


@triton.jit(do_not_specialize=UNSPECIALIZED)
def to_queries(
    q, k, v, g, out, lse, g_lse, values, starts, first, last, ranges, dq, delta, by_row,
    before_first, start, scale, natural_scale, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    g_b, g_h, g_t, o_b, o_h, o_t, dq_b, dq_h, dq_t,
    values_b, values_h, starts_b, ends_b, left, right, queries, keys, width, zero, range_size,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, HAS_STARTS: tl.constexpr, DOCUMENTS: tl.constexpr,
    WINDOW: tl.constexpr, PRUNE: tl.constexpr, TO_ROWS: tl.constexpr, TO_FIRST: tl.constexpr,
    LSE_TOO: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries, and ``delta``, which the other kernels read."""
    sequence, b, h, row0 = query_block(queries, HEADS, BLOCK_M)
    k_width: tl.constexpr = (D, BLOCK_D)
    v_width: tl.constexpr = (DV, BLOCK_DV)
    own0 = query_start(starts, start, b, starts_b, HAS_STARTS) + row0
    rows = row0 + tl.arange(0, BLOCK_M)
    own = own0 + tl.arange(0, BLOCK_M)
    present = rows < queries
    query = load_rows(q + b * q_b + h * q_h, row0, queries, q_t, k_width, BLOCK_M)
    grad = load_rows(g + b * g_b + h * g_h, row0, queries, g_t, v_width, BLOCK_M)
    made = load_rows(out + b * o_b + h * o_h, row0, queries, o_t, v_width, BLOCK_M)
    of_head = sequence * queries
    minus = store_delta(delta + of_head, g_lse + of_head, grad, made, rows, present, LSE_TOO)
    numbers = head_bias(values, b, h, own0, width, zero, values_b, values_h, KIND)
    exact: tl.constexpr = q.dtype.element_ty == tl.float32
    how: tl.constexpr = (KIND, exact, PRECISION, PTX)
    masks: tl.constexpr = DOCUMENTS or WINDOW
    sums = load_lse(lse + of_head, rows, queries)
    if not exact:
        sums -= row_bias(numbers, own0, own, KIND)
    kv = h // GROUP
    keys_at = k + b * k_b + kv * k_h
    values_at = v + b * v_b + kv * v_h
    of_sequence = first + b * ends_b, last + b * ends_b, left, right
    low, high = visible_rows(own, present, of_sequence, keys, CAUSAL, DOCUMENTS, WINDOW)
    ends = low, high
    source = keys_at, values_at, k_t, v_t, keys
    whole: tl.constexpr = KIND == TABLE or (exact and KIND != NONE)
    read: tl.constexpr = TILE if whole or (KIND == SLOPES and not CAUSAL) else COLUMN
    begin = tl.maximum(tl.min(low), 0) // BLOCK_N
    end = (tl.max(high) + BLOCK_N) // BLOCK_N
    if PRUNE:
        of_block = (sequence * range_size + row0 // PRUNE) * 2
        begin = tl.maximum(begin, tl.load(ranges + of_block) // BLOCK_N)
        stop = tl.load(ranges + of_block + 1)
        end = tl.minimum(end, (stop + BLOCK_N - 1) // BLOCK_N)
    middle = end
    if CAUSAL:
        middle = tl.minimum(tl.maximum((tl.minimum(own0, keys - 1) + 1) // BLOCK_N, begin), end)
    elif not masks:
        # Only the last tile may be cut short.
        middle = tl.minimum(keys // BLOCK_N, end)
    nothing = tl.zeros((BLOCK_M,), tl.float32)
    state = tl.zeros((BLOCK_M, BLOCK_D), tl.float32), nothing, nothing
    near = begin
    far = middle
    if KIND == TABLE:
        # Keys of distances beyond the last column.
        flat = tl.load(numbers[0])
        near = tl.minimum(tl.maximum((own0 + zero - width + 1) // BLOCK_N, begin), middle)
        state = visit_keys(
            state, query, grad, sums, minus, source, numbers, flat, own0, ends, scale, begin,
            near, k_width, v_width, BLOCK_M, BLOCK_N, how, FLAT, masks, TO_ROWS, False,
        )  # fmt: skip
        if not CAUSAL:
            far = tl.minimum(tl.maximum((own0 + BLOCK_M + zero + BLOCK_N) // BLOCK_N, near), middle)
            flat = tl.load(numbers[0] + PAD + width - 1)
            state = visit_keys(
                state, query, grad, sums, minus, source, numbers, flat, own0, ends, scale, far,
                middle, k_width, v_width, BLOCK_M, BLOCK_N, how, FLAT, masks, False, TO_FIRST,
            )  # fmt: skip
    state = visit_keys(
        state, query, grad, sums, minus, source, numbers, 0.0, own0, ends, scale, near, far,
        k_width, v_width, BLOCK_M, BLOCK_N, how, read, masks, TO_ROWS, TO_FIRST,
    )  # fmt: skip
    state = visit_keys(
        state, query, grad, sums, minus, source, numbers, 0.0, own0, ends, scale, middle, end,
        k_width, v_width, BLOCK_M, BLOCK_N, how, read, True, TO_ROWS, TO_FIRST,
    )  # fmt: skip
    gradient, sums_by_row, sums_before_first = state
    # Running sums have gradients of rows; of slopes and tables there is one number for the block.
    block = sequence * tl.cdiv(queries, BLOCK_M) + row0 // BLOCK_M
    if TO_ROWS and KIND == SUMS:
        tl.store(by_row + of_head + rows, sums_by_row, mask=present)
    elif TO_ROWS:
        tl.store(by_row + block, tl.sum(tl.where(present, sums_by_row, 0.0)))
    if TO_FIRST:
        tl.store(before_first + block, tl.sum(tl.where(present, sums_before_first, 0.0)))
    store_rows(dq + b * dq_b + h * dq_h, gradient * natural_scale, rows, present, dq_t, k_width)


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
    kv = (tl.program_id(0) // tiles % kv_heads).to(tl.int64)
    k_width: tl.constexpr = (D, BLOCK_D)
    v_width: tl.constexpr = (DV, BLOCK_DV)
    own_start = query_start(starts, start, b, starts_b, HAS_STARTS)
    column0 = tile * BLOCK_N
    columns = column0 + tl.arange(0, BLOCK_N)
    k_tile = load_rows(k + b * k_b + kv * k_h, column0, keys, k_t, k_width, BLOCK_N)
    v_tile = load_rows(v + b * v_b + kv * v_h, column0, keys, v_t, v_width, BLOCK_N)
    exact: tl.constexpr = q.dtype.element_ty == tl.float32
    how: tl.constexpr = (KIND, exact, PRECISION, PTX)
    masks: tl.constexpr = DOCUMENTS or WINDOW
    ends = first + b * ends_b, last + b * ends_b, left, right
    whole: tl.constexpr = KIND == TABLE or (exact and KIND != NONE)
    read: tl.constexpr = TILE if whole or (KIND == SLOPES and not CAUSAL) else COLUMN
    blocks = (queries + BLOCK_M - 1) // BLOCK_M
    # Blocks of queries that see some of these keys.
    least_own, most_own = queries_of_keys(
        own_start, column0, queries, left, right, CAUSAL, WINDOW, BLOCK_N
    )
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
        queries_at = q + b * q_b + h * q_h
        grads_at = g + b * g_b + h * g_h
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
    store_rows(dk + b * dk_b + kv * dk_h, dk_tile * natural_scale, columns, present, dk_t, k_width)
    store_rows(dv + b * dv_b + kv * dv_h, dv_tile, columns, present, dv_t, v_width)


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
            scores = hide(scores, low, high, key0, BLOCK)
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
    h = tl.program_id(1).to(tl.int64)
    kv = h // GROUP
    distance = nearest + diagonal * BLOCK
    at = values + h * values_h
    row = tl.arange(0, BLOCK)
    offset = row[:, None] - row[None, :]
    column = tl.minimum(tl.maximum(distance + offset + zero, 0), width - 1)
    bias = tl.load(at + PAD + width - 1 - column)
    sums = tl.zeros((BLOCK, BLOCK), tl.float32)
    for n in range(batch):
        b = tl.zeros((), tl.int64) + n
        own_start = query_start(starts, start, b, starts_b, HAS_STARTS)
        of_head = (b * HEADS + h) * queries
        at_head = q + b * q_b + h * q_h, g + b * g_b + h * g_h
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
    to = by_distance + (h * tl.num_programs(0) + diagonal) * (2 * BLOCK) + place
    tl.store(to, made)


@triton.jit
def sum_blocks(by_block, batch, blocks):
    """The sum of a head's numbers in ``by_block``, ``[B, H, blocks]``."""
    sums = tl.zeros((1024,), tl.float32)
    for chunk in range(0, batch * blocks, 1024):
        n = chunk + tl.arange(0, 1024)
        sequence = (n // blocks).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        at = by_block + sequence * blocks + n % blocks
        sums += tl.load(at, mask=n < batch * blocks, other=0.0)
    return tl.sum(sums)


@triton.jit(
    do_not_specialize=[
        "start", "width", "zero", "nearest", "furthest", "diagonals", "batch", "blocks"
    ]
)  # fmt: skip
def fold_table(
    by_distance, before_first, beyond_last, to, start, width, zero, nearest, furthest, diagonals,
    batch, blocks,
    BLOCK: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """The gradient of a head's table from the sums of `to_table`; a slope is a table of one column.

    The first column also has the distances before it, and the last those beyond it. No column is
    computed as what the others leave of the sum of all ``dS`` of the head, although that sum is
    known: the rounding of the output in ``delta`` would all be in that column.
    """
    h = tl.program_id(0).to(tl.int64)
    sums = by_distance + h * diagonals * (2 * BLOCK)
    before = 0.0
    beyond = 0.0
    if HAS_FIRST:
        before = sum_blocks(before_first, batch, blocks)
    if HAS_LAST:
        beyond = sum_blocks(beyond_last, batch, blocks)
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
            made += tl.where(column == 0, before, 0.0)
        if HAS_LAST:
            made += tl.where(column == width - 1, beyond, 0.0)
        tl.store(to + h * width + column, made, mask=column < width)


@triton.jit
def fold_sums(
    by_key, by_row, starts, to, start, starts_b, heads, keys, queries, columns, together,
    HAS_STARTS: tl.constexpr, BLOCK: tl.constexpr,
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
        if HAS_STARTS:
            own = tl.load(starts + b * starts_b).to(tl.int32)
        head = b * heads + h
        total -= tl.load(by_key + head * keys + at, mask=at < keys, other=0.0)
        row = at - own
        here = (row >= 0) & (row < queries)
        total += tl.load(by_row + head * queries + row, mask=here, other=0.0)
    out = (tl.program_id(2).to(tl.int64) * heads + h) * columns + at
    tl.store(to + out, total.to(to.dtype.element_ty), mask=at < columns)
