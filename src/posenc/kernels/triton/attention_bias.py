"""What the attention kernels share: loads, the keys that queries see, and the bias.

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
