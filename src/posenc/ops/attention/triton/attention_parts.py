"""Parts of the attention kernels: loads and stores, the keys that queries see, softmax, bias.

Scores are in units of log2, for exp2. A term of the bias that is the same for all keys of a query
changes no weight. For halves, `column_bias` leaves it out, and `row_bias` adds it to the
log-sum-exp: a causal line, and a running sum, then cost one number for each key, not one for each
score. For float32, where its rounding would show, `tile_bias` has the whole bias.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kinds of bias.
NONE, SLOPES, TABLE, SUMS = (tl.constexpr(n) for n in range(4))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# How a loop over tiles of keys reads its bias.
COLUMN, TILE, FLAT = (tl.constexpr(n) for n in range(3))
# Copies of a table's ends on each side of it, as many as a tile has distances.
PAD = tl.constexpr(256)


@triton.jit
def load_rows(x, first, count, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows ``first .. first + BLOCK - 1`` of ``x``; rows outside ``0 .. count - 1`` are zero.

    ``WIDTH`` is the number of channels, and the power of two that holds them.
    """
    return load_keys(x, first, count, stride, WIDTH, BLOCK, True)


@triton.jit
def load_keys(
    x, first, count, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """As `load_rows`, without the check of rows unless ``MASKED``."""
    rows = first + tl.arange(0, BLOCK)
    channels = tl.arange(0, WIDTH[1])
    at = x + rows.to(tl.int64)[:, None] * stride + channels[None, :]
    inside = ((rows >= 0) & (rows < count))[:, None]
    narrow = (channels < WIDTH[0])[None, :]
    if MASKED and WIDTH[0] != WIDTH[1]:
        tile = tl.load(at, mask=inside & narrow, other=0.0)
    elif MASKED:
        tile = tl.load(at, mask=inside, other=0.0)
    elif WIDTH[0] != WIDTH[1]:
        tile = tl.load(at, mask=narrow, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def store_rows(to, x, at, present, stride, WIDTH: tl.constexpr):
    """Write rows, in the dtype of their tensor."""
    channels = tl.arange(0, WIDTH[1])
    places = to + at.to(tl.int64)[:, None] * stride + channels[None, :]
    inside = present[:, None] & (channels < WIDTH[0])[None, :]
    tl.store(places, x.to(to.dtype.element_ty), mask=inside)


@triton.jit
def query_block(queries, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """The sequence of this program's queries, its batch entry and head, and the first query.

    There is one axis of programs, because CUDA's other axes have at most 65,535. The last queries
    see the most keys, so the first programs have them.
    """
    blocks = (queries + BLOCK - 1) // BLOCK
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    row0 = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK
    return sequence, sequence // HEADS, sequence % HEADS, row0


@triton.jit
def query_start(starts, start, b, starts_b, HAS_STARTS: tl.constexpr):
    """The key index of a sequence's first query."""
    if HAS_STARTS:
        return tl.load(starts + b * starts_b).to(tl.int32)
    return start.to(tl.int32)


@triton.jit
def visible(own, ends, keys, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr):
    """The first and the last key that each query sees.

    ``ends`` are those of documents in a sequence, and then the window's keys before the own one and
    after it.
    """
    first, last, left, right = ends
    low = own * 0
    high = own * 0 + keys - 1
    if CAUSAL:
        high = tl.minimum(high, own)
    if DOCUMENTS:
        at = tl.minimum(tl.maximum(own, 0), keys - 1)
        low = tl.load(first + at).to(tl.int32)
        high = tl.minimum(high, tl.load(last + at).to(tl.int32))
    if WINDOW:
        low = tl.maximum(low, own - left)
        high = tl.minimum(high, own + right)
    return low, high


@triton.jit
def visible_rows(
    own, present, ends, keys, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr
):
    """As `visible`; rows that are not ``present`` see no key."""
    low, high = visible(own, ends, keys, CAUSAL, DOCUMENTS, WINDOW)
    return tl.where(present, low, keys), tl.where(present, high, -1)


@triton.jit
def hide(scores, low, high, column0, BLOCK: tl.constexpr):
    """``-inf`` for keys that are not seen."""
    columns = column0 + tl.arange(0, BLOCK)
    seen = (columns[None, :] >= low[:, None]) & (columns[None, :] <= high[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def softmax_begin(BLOCK: tl.constexpr, BLOCK_DV: tl.constexpr):
    """The state of a softmax: for each query the sum of weights, the greatest score, the output."""
    return (
        tl.zeros((BLOCK,), tl.float32),
        tl.full((BLOCK,), float("-inf"), tl.float32),
        tl.zeros((BLOCK, BLOCK_DV), tl.float32),
    )


@triton.jit
def softmax_step(state, scores, v, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """The state after a tile of keys; ``scores`` are in units of log2."""
    total, most, acc = state
    peak = tl.maximum(most, tl.max(scores, 1))
    base = peak
    if MASKED:
        # A query that has seen no key yet must not subtract infinities.
        base = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return total, peak, acc


@triton.jit
def softmax_end(state):
    """The output, and the log-sum-exp in units of log2; zeros and ``-inf`` where no key is seen."""
    total, most, acc = state
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    return acc / total[:, None], tl.where(nothing, float("-inf"), most + tl.log2(total))


@triton.jit
def load_lse(lse, rows, queries):
    """The log-sum-exps; infinity where a query sees nothing, so that its weights are zero."""
    sums = tl.load(lse + rows, mask=(rows >= 0) & (rows < queries), other=float("-inf")) * LOG2E
    return tl.where(sums == float("-inf"), float("inf"), sums)


@triton.jit
def store_delta(delta, g_lse, grad, made, at, present, LSE_TOO: tl.constexpr):
    """``delta`` of a block of queries: the row sums of ``dO * O``, less the lse's gradient."""
    minus = tl.sum(grad.to(tl.float32) * made.to(tl.float32), 1)
    if LSE_TOO:
        minus -= tl.load(g_lse + at, mask=present, other=0.0)
    tl.store(delta + at, minus, mask=present)
    return minus


@triton.jit
def queries_of_keys(
    own_start, column0, queries, left, right,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first and the last query, counted as keys, that may see some of a tile's keys."""
    least = own_start
    most = own_start + queries - 1
    if CAUSAL:
        least = tl.maximum(least, column0)
    if WINDOW:
        least = tl.maximum(least, column0 - right)
        most = tl.minimum(most, column0 + BLOCK - 1 + left)
    return least, most


@triton.jit
def head_bias(values, b, h, own0, width, zero, values_b, values_h, KIND: tl.constexpr):
    """The numbers of a head: where they begin, its slope, its sum at the block's first query.

    They go to the functions below together with the table's columns.
    """
    at = values + b.to(tl.int64) * values_b + h.to(tl.int64) * values_h
    slope = 0.0
    origin = tl.zeros((), tl.float64)
    if KIND == SLOPES:
        slope = tl.load(at).to(tl.float32) * LOG2E
    if KIND == SUMS:
        origin = tl.load(at + tl.minimum(tl.maximum(own0, 0), width - 1)).to(tl.float64)
    return at, slope, origin, width, zero


@triton.jit
def column_bias(numbers, own0, columns, keys, KIND: tl.constexpr):
    """The bias of each key to the block's first query, without what all keys share."""
    at, slope, origin, _, _ = numbers
    if KIND == SLOPES:
        bias = (columns - own0).to(tl.float32) * slope
    elif KIND == SUMS:
        sums = tl.load(at + columns, mask=(columns >= 0) & (columns < keys), other=0.0)
        bias = ((origin - sums.to(tl.float64)) * LOG2E).to(tl.float32)
    else:
        bias = columns.to(tl.float32) * 0.0
    return bias


@triton.jit
def row_bias(numbers, own0, own, KIND: tl.constexpr):
    """What `column_bias` leaves out of each query's scores."""
    at, slope, origin, width, _ = numbers
    if KIND == SLOPES:
        bias = (own0 - own).to(tl.float32) * slope
    elif KIND == SUMS:
        near = tl.minimum(tl.maximum(own, 0), width - 1)
        bias = ((tl.load(at + near).to(tl.float64) - origin) * LOG2E).to(tl.float32)
    else:
        bias = own.to(tl.float32) * 0.0
    return bias


@triton.jit
def tile_bias(
    numbers, own0, column0, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HOW: tl.constexpr, ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """The bias of each score, ``[queries, keys]``, or the transpose; less `row_bias` for halves.

    ``HOW`` is the kind of the bias, whether it is exact, tl.dot's precision, and whether the GPU
    takes PTX.
    """
    at, slope, origin, width, zero = numbers
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    distance = own0 - column0
    if HOW[0] == TABLE:
        # The table begins with its largest distance, and is padded with its ends: further
        # distances are alike. Keys are the inner axis of a tile, so that a thread needs few
        # addresses.
        distance = tl.minimum(tl.maximum(distance, -zero - BLOCK_M), width - zero + BLOCK_N)
        queries = at + (width - 1 - zero - distance + PAD) - row
        if ROWS_FIRST:
            places = queries[:, None] + column[None, :]
        else:
            places = queries[None, :] + column[:, None]
        if HOW[3]:
            # In the layout of the scores: Triton's own load would use another one and convert it.
            bias = tl.inline_asm_elementwise(
                "ld.global.nc.f32 $0, [$1];", "=f,l", [places], tl.float32, is_pure=True, pack=1
            )
        else:
            bias = tl.load(places)
    elif HOW[0] == SUMS:
        # Two floats hold a sum, and the difference of the greater ones of near keys is exact.
        own = tl.minimum(tl.maximum(own0 + row, 0), width - 1)
        high, low = split_sums(tl.load(at + own).to(tl.float64) - origin)
        inside = (column0 + column >= 0) & (column0 + column < keys)
        of_keys = tl.load(at + column0 + column, mask=inside, other=0.0)
        key_high, key_low = split_sums(of_keys.to(tl.float64) - origin)
        if ROWS_FIRST:
            bias = (high[:, None] - key_high[None, :]) + (low[:, None] - key_low[None, :])
        else:
            bias = (high[None, :] - key_high[:, None]) + (low[None, :] - key_low[:, None])
        bias *= LOG2E
    else:
        if ROWS_FIRST:
            near = row[:, None]
            far = tl.abs(distance + near - column[None, :])
        else:
            near = row[None, :]
            far = tl.abs(distance + near - column[:, None])
        if HOW[1]:
            near = 0
        bias = (near - far).to(tl.float32) * slope
    return bias


@triton.jit
def split_sums(sums):
    """Running sums as a float32 and the rest."""
    high = sums.to(tl.float32)
    return high, (sums - high.to(tl.float64)).to(tl.float32)


@triton.jit
def add_bias(
    scores, numbers, flat, own0, column0, keys, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HOW: tl.constexpr, READ: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """Products of queries and keys as scores."""
    if READ == FLAT:
        bias = flat
    elif READ == TILE:
        bias = tile_bias(numbers, own0, column0, keys, BLOCK_M, BLOCK_N, HOW, ROWS_FIRST)
    elif ROWS_FIRST:
        columns = column0 + tl.arange(0, BLOCK_N)
        bias = column_bias(numbers, own0, columns, keys, HOW[0])[None, :]
    else:
        columns = column0 + tl.arange(0, BLOCK_N)
        bias = column_bias(numbers, own0, columns, keys, HOW[0])[:, None]
    return scores * scale + bias
