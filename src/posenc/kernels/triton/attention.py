"""Attention with a bias: the forward pass."""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.kernels.triton.attention_bias import (
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
    load_keys,
    load_rows,
    query_start,
    row_bias,
    visible,
)


@triton.jit
def visit(
    state, q, source, numbers, flat, own0, ends, scale, begin, end,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HOW: tl.constexpr, READ: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles of keys ``begin .. end - 1``."""
    total, most, acc = state
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
            columns = first + tl.arange(0, BLOCK_N)
            seen = (columns[None, :] >= low[:, None]) & (columns[None, :] <= high[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(most, tl.max(scores, 1))
        base = peak
        if MASKED:
            # A query that has seen no key yet must not subtract infinities.
            base = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        v = load_keys(values_at, first, keys, v_t, V_WIDTH, BLOCK_N, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=HOW[2])
        most = peak
    return total, most, acc


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
    # One axis of programs, because CUDA's other axes have at most 65,535.
    blocks = (queries + BLOCK_M - 1) // BLOCK_M
    sequence = tl.program_id(0) // blocks
    # The last queries see the most keys: begin with them.
    block = blocks - 1 - tl.program_id(0) % blocks
    b = (sequence // HEADS).to(tl.int64)
    h = sequence % HEADS
    k_width: tl.constexpr = (D, BLOCK_D)
    v_width: tl.constexpr = (DV, BLOCK_DV)
    own0 = query_start(starts, start, b, starts_b, HAS_STARTS) + block * BLOCK_M
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    own = own0 + tl.arange(0, BLOCK_M)
    present = rows < queries
    query = load_rows(
        q + b * q_b + h.to(tl.int64) * q_h, block * BLOCK_M, queries, q_t, k_width, BLOCK_M
    )
    kv = (h // GROUP).to(tl.int64)
    keys_at = k + b * k_b + kv * k_h
    values_at = v + b * v_b + kv * v_h
    of_sequence = first + b * ends_b, last + b * ends_b, left, right
    low, high = visible(own, of_sequence, keys, CAUSAL, DOCUMENTS, WINDOW)
    low = tl.where(present, low, keys)
    high = tl.where(present, high, -1)
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
    state = (
        tl.zeros((BLOCK_M,), tl.float32),
        tl.full((BLOCK_M,), float("-inf"), tl.float32),
        tl.zeros((BLOCK_M, BLOCK_DV), tl.float32),
    )
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
        part = block * (BLOCK_M // RANGE) + tl.arange(0, BLOCK_M // RANGE)
        count = (queries + RANGE - 1) // RANGE
        saved = ranges + (sequence.to(tl.int64) * count + part) * 2
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
    total, most, acc = state
    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    sums = tl.where(nothing, float("-inf"), most + tl.log2(tl.where(nothing, 1.0, total)))
    if not exact:
        sums += row_bias(numbers, own0, own, KIND)
    tl.store(lse + sequence.to(tl.int64) * queries + rows, sums * LN2, mask=present)
    channels = tl.arange(0, BLOCK_DV)
    to = out + b * o_b + h.to(tl.int64) * o_h + rows.to(tl.int64)[:, None] * o_t + channels[None, :]
    store = present[:, None] & (channels < DV)[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=store)
