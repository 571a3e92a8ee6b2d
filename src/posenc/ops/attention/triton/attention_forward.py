"""Attention with a bias: the kernels of the forward pass.

For few queries and many keys, `split` gives parts of the keys to programs, and `combine` adds them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.ops.attention.triton.attention_parts import (
    COLUMN,
    FLAT,
    LN2,
    LOG2E,
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
    load_rows,
    query_block,
    query_start,
    row_bias,
    softmax_begin,
    softmax_end,
    softmax_step,
    store_rows,
    visible_rows,
)


@triton.jit
def visit(
    state, q, source, numbers, flat, own0, ends, scale, begin, end,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HOW: tl.constexpr, READ: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles of keys ``begin .. end - 1``."""
    keys_at, values_at, k_t, v_t, keys = source
    low, high = ends
    for tile in tl.range(begin, end):
        first = tile * BLOCK_N
        k = load_keys(keys_at, first, keys, k_t, K_WIDTH, BLOCK_N, MASKED)
        scores = tl.dot(q, k.T, input_precision=HOW[2])
        scores = add_bias(
            scores, numbers, flat, own0, first, keys, scale, BLOCK_M, BLOCK_N, HOW, READ, True
        )
        if MASKED:
            scores = hide(scores, low, high, first, BLOCK_N)
        v = load_keys(values_at, first, keys, v_t, V_WIDTH, BLOCK_N, MASKED)
        state = softmax_step(state, scores, v, MASKED, HOW[2])
    return state


@triton.jit
def prune(
    bound, numbers, lows, own0, own, sees, begin, middle, after, end, keys, chunks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The tiles of keys that are needed, of ``begin .. end - 1``.

    ``bound`` is how far any score of a query, without its bias, can be above the greatest with
    its bias, plus what makes all keys below that weigh less than the rounding. Queries for which
    it is not finite keep every key.
    """
    _, slope, origin, _, _ = numbers
    if KIND == SLOPES:
        count = -tl.log2(tl.maximum(1.0 - tl.exp2(-slope), 1.0 / keys))
        reach = (bound + count) / slope * 1.000001
        reach = tl.where(slope > 0, reach, float("inf"))
        if not CAUSAL:
            reach += (own - own0).to(tl.float32)
        reach = tl.where(reach < 2.0 * keys, reach, 2.0 * keys)
        furthest = tl.max(tl.ceil(tl.where(sees, reach, -1.0 * BLOCK_M))).to(tl.int32)
        begin = tl.maximum(begin, tl.minimum((own0 - furthest) // BLOCK_N, middle))
        if not CAUSAL:
            last = tl.maximum(own0 + BLOCK_M + furthest, 0)
            end = tl.minimum(end, tl.maximum(last // BLOCK_N + 1, after))
    if KIND == SUMS:
        reach = tl.where(sees, bound + tl.log2(keys.to(tl.float32)), float("-inf"))
        furthest = tl.max(tl.where(reach == reach, reach, float("inf")))
        # A chunk of keys is needed if the bias of one of them is above minus this.
        needed = middle
        for chunk in range(0, chunks, 64):
            part = chunk + tl.arange(0, 64)
            sums = tl.load(lows + part, mask=part < chunks, other=float("inf"))
            bias = ((origin - sums) * LOG2E).to(tl.float32)
            tiles = part * (CHUNK // BLOCK_N)
            needed = tl.minimum(needed, tl.min(tl.where(bias > -furthest, tiles, middle)))
        begin = tl.maximum(begin, needed)
    return begin, end


@triton.jit(
    do_not_specialize=["start", "left", "right", "keys", "queries", "width", "zero", "chunks"]
)
def forward(
    q, k, v, out, lse, values, starts, first, last, norms, lows, ranges, start,
    scale, spare, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    values_b, values_h, starts_b, ends_b, left, right, queries, keys, width, zero, chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, HAS_STARTS: tl.constexpr, DOCUMENTS: tl.constexpr,
    WINDOW: tl.constexpr, PRUNE: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, RANGE: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Attention of a block of queries, and its log-sum-exp."""
    sequence, b, h, row0 = query_block(queries, HEADS, BLOCK_M)
    k_width: tl.constexpr = (D, BLOCK_D)
    v_width: tl.constexpr = (DV, BLOCK_DV)
    own0 = query_start(starts, start, b, starts_b, HAS_STARTS) + row0
    rows = row0 + tl.arange(0, BLOCK_M)
    own = own0 + tl.arange(0, BLOCK_M)
    present = rows < queries
    query = load_rows(q + b * q_b + h * q_h, row0, queries, q_t, k_width, BLOCK_M)
    kv = h // GROUP
    keys_at = k + b * k_b + kv * k_h
    values_at = v + b * v_b + kv * v_h
    of_sequence = first + b * ends_b, last + b * ends_b, left, right
    low, high = visible_rows(own, present, of_sequence, keys, CAUSAL, DOCUMENTS, WINDOW)
    ends = low, high
    source = keys_at, values_at, k_t, v_t, keys
    numbers = head_bias(values, b, h, own0, width, zero, values_b, values_h, KIND)
    exact: tl.constexpr = q.dtype.element_ty == tl.float32
    how: tl.constexpr = (KIND, exact, PRECISION, PTX)
    masks: tl.constexpr = DOCUMENTS or WINDOW
    whole: tl.constexpr = KIND == TABLE or (exact and KIND != NONE)
    read: tl.constexpr = TILE if whole or (KIND == SLOPES and not CAUSAL) else COLUMN
    # Tiles of keys that some query sees, and those in the middle that hold the queries' own.
    begin = tl.maximum(tl.min(low), 0) // BLOCK_N
    end = (tl.max(high) + BLOCK_N) // BLOCK_N
    middle = tl.minimum(own0, keys) // BLOCK_N
    if CAUSAL:
        middle = tl.maximum((tl.minimum(own0, keys - 1) + 1) // BLOCK_N, begin)
    middle = tl.minimum(tl.maximum(middle, begin), end)
    after = end
    if not CAUSAL:
        after = tl.minimum(tl.maximum((own0 + BLOCK_M + BLOCK_N - 1) // BLOCK_N, middle), end)
    state = softmax_begin(BLOCK_M, BLOCK_DV)
    state = visit(
        state, query, source, numbers, 0.0, own0, ends, scale, middle, after, k_width, v_width,
        BLOCK_M, BLOCK_N, how, read, True,
    )  # fmt: skip
    if PRUNE:
        # No score of a query is above the product of the norms.
        longest = 0.0
        parts = (keys + NORMS - 1) // NORMS
        for chunk in range(0, parts, 64):
            part = chunk + tl.arange(0, 64)
            norm = norms + (b * (HEADS // GROUP) + kv) * parts + part
            longest = tl.maximum(longest, tl.max(tl.load(norm, mask=part < parts, other=0.0)))
        wide = query.to(tl.float32)
        bound = tl.sqrt(tl.sum(wide * wide, 1)) * longest * (scale * 1.00390625) + spare - state[1]
        if exact:
            bound += row_bias(numbers, own0, own, KIND)
        least = lows + (b * HEADS + h) * chunks
        begin, end = prune(
            bound, numbers, least, own0, own, present & (low <= high), begin, middle, after, end,
            keys, chunks, BLOCK_M, BLOCK_N, KIND, CAUSAL, CHUNK,
        )  # fmt: skip
        # A program may have several of the blocks that share a range.
        part = row0 // RANGE + tl.arange(0, BLOCK_M // RANGE)
        count = (queries + RANGE - 1) // RANGE
        saved = ranges + (sequence * count + part) * 2
        tl.store(saved, begin * BLOCK_N, mask=part < count)
        tl.store(saved + 1, end * BLOCK_N, mask=part < count)
    near = begin
    flat_after = end
    if KIND == TABLE:
        # Past the table's ends the bias is one number.
        flat = tl.load(numbers[0])
        near = tl.minimum(tl.maximum((own0 + zero - width + 2) // BLOCK_N, begin), middle)
        state = visit(
            state, query, source, numbers, flat, own0, ends, scale, begin, near, k_width, v_width,
            BLOCK_M, BLOCK_N, how, FLAT, masks,
        )  # fmt: skip
    state = visit(
        state, query, source, numbers, 0.0, own0, ends, scale, near, middle, k_width, v_width,
        BLOCK_M, BLOCK_N, how, read, masks,
    )  # fmt: skip
    if not CAUSAL:
        if KIND == TABLE:
            flat = tl.load(numbers[0] + PAD + width - 1)
            flat_after = tl.minimum(
                tl.maximum((own0 + BLOCK_M + zero + BLOCK_N) // BLOCK_N, after), end
            )
        state = visit(
            state, query, source, numbers, 0.0, own0, ends, scale, after, flat_after, k_width,
            v_width, BLOCK_M, BLOCK_N, how, read, True,
        )  # fmt: skip
        if KIND == TABLE:
            state = visit(
                state, query, source, numbers, flat, own0, ends, scale, flat_after, end, k_width,
                v_width, BLOCK_M, BLOCK_N, how, FLAT, True,
            )  # fmt: skip
    acc, sums = softmax_end(state)
    if not exact:
        sums += row_bias(numbers, own0, own, KIND)
    tl.store(lse + sequence * queries + rows, sums * LN2, mask=present)
    store_rows(out + b * o_b + h * o_h, acc, rows, present, o_t, v_width)


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
    """Attention of all queries that share a head of keys to one part of the keys.

    Its log-sum-exp is in units of log2.
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
    low, high = visible_rows(own, present, ends, keys, CAUSAL, DOCUMENTS, WINDOW)
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
    state = softmax_begin(BLOCK_M, BLOCK_DV)
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
        scores = hide(scores, low, high, tile * BLOCK_N, BLOCK_N)
        value = load_rows(values_at, tile * BLOCK_N, keys, v_t, (DV, BLOCK_DV), BLOCK_N)
        state = softmax_step(state, scores, value, True, PRECISION)
    acc, sums = softmax_end(state)
    if WHOLE:
        sums *= LN2
    # Rows of heads and queries, as in the output.
    to = (b * HEADS + h) * queries + t
    to += part.to(tl.int64) * (tl.num_programs(0) * GROUP) * queries
    tl.store(part_lse + to, sums, mask=present)
    store_rows(part_out, acc, to, present, DV, (DV, BLOCK_DV))


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


@triton.jit(do_not_specialize=["start", "width"])
def pad_table(values, padded, start, values_h, values_t, width, BLOCK: tl.constexpr):
    """A head's table as `tile_bias` reads it: from its largest distance on, in units of log2."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.program_id(1).to(tl.int64)
    column = tl.minimum(tl.maximum(width - 1 + PAD - at, 0), width - 1)
    numbers = tl.load(values + h * values_h + column.to(tl.int64) * values_t).to(tl.float32)
    size = width + 2 * PAD
    tl.store(padded + h * size + at, numbers * LOG2E, mask=at < size)


@triton.jit(do_not_specialize=["start", "keys"])
def longest_keys(
    k, norms, start, k_b, k_h, k_t, keys,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """The norm of the longest of ``NORMS`` keys; infinity for NaN, which must prune nothing."""
    b = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    at = k + b * k_b + kv * k_h
    width: tl.constexpr = (D, BLOCK_D)
    rows = load_rows(at, tl.program_id(1) * NORMS, keys, k_t, width, NORMS).to(tl.float32)
    squares = tl.sum(rows * rows, 1)
    longest = tl.max(tl.where(squares == squares, squares, float("inf")))
    to = norms + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(to, tl.sqrt(longest))


@triton.jit
def least_sums(sums, lows, sums_b, sums_h, keys, CHUNK: tl.constexpr):
    """The least of ``CHUNK`` running sums; minus infinity for NaN, which must prune nothing."""
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    found = tl.load(sums + b * sums_b + h * sums_h + at, mask=at < keys, other=float("inf"))
    least = tl.min(tl.where(found == found, found, float("-inf")))
    to = (b * tl.num_programs(1) + h) * tl.num_programs(0) + tl.program_id(0)
    tl.store(lows + to, least)
