"""What all walks over tiles of scores share, and what they ask of a bias.

A tile of scores is ``[queries, keys]`` in units of log2, for exp2. The walks know tiles, softmax
and which keys a query sees; a bias adds to the scores of a tile, and collects its gradient from
them, by the `Hooks` that its aggregate begins with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# What the program of a walk owns: a block of queries, a tile of keys, or a diagonal of tiles.
QUERIES, KEYS, DIAGONAL = (tl.constexpr(n) for n in range(3))
# Where a tile is: near, or with only one bias for all keys before, or after, all of a query's.
NEAR, BEFORE, AFTER = (tl.constexpr(n) for n in range(3))
# Keys that share a bound of their norms, and queries that share a pruned range of keys.
NORMS = tl.constexpr(128)
RANGE = tl.constexpr(64)
# Norms, products and scores are rounded; the three together by less than this factor.
SLACK = tl.constexpr(1.00390625)


class Rows(NamedTuple):
    """A tensor ``(B, H, T, D)``: its address and strides, D, and the power of two that holds it."""

    at: Any
    b: Any
    h: Any
    t: Any
    width: Any
    block: Any


class Sees(NamedTuple):
    """How many queries and keys there are, and which keys each query sees.

    A query counts as the key of its index; `start` is that of the first query, unless each sequence
    has one of its own in `starts`. What a call does not have is None.
    """

    heads: Any
    group: Any  # of heads that share a head of keys
    queries: Any
    keys: Any
    start: Any
    starts: Any
    starts_b: Any
    first: Any  # key of each key's document, and the last one
    last: Any
    ends_b: Any
    left: Any  # keys before a query's own that it sees, and keys after it
    right: Any
    padding: Any  # a byte for each key that is not hidden
    padding_b: Any
    is_causal: Any
    is_cut: Any  # whether any tile may have keys that are not seen
    is_narrow: Any  # whether only queries of a key's document see it


class Prune(NamedTuple):
    """The norms of the longest keys, the ranges of keys that are needed, and a margin in log2."""

    norms: Any
    ranges: Any
    spare: Any


class Block(NamedTuple):
    """A block of queries: where it is, and the first and the last key that each query sees."""

    b: Any
    h: Any
    row0: Any
    rows: Any
    present: Any
    i0: Any
    i: Any
    low: Any
    high: Any


class Tile(NamedTuple):
    """Queries `i` and keys `j` of a tile, and which scores are seen, if it is masked."""

    b: Any
    h: Any
    i0: Any
    j0: Any
    i: Any
    j: Any
    seen: Any


class Hooks(NamedTuple):
    """What a bias does in the walks. Each has a default here, of the name ``no_`` and its own.

    `add` returns the scores, the state that `begin` makes, and `kept`, which `to_scores` gets of
    the same tile; `open` makes the state of `to_scores` and `collect`, which return it first. What
    a walk owns, `own`, are the rows of its queries or the columns of its keys; a diagonal owns
    neither. `at` is a Block, a Tile of keys or a Diagonal.
    """

    head: Any  # (bias, b, h): what is read once for a head
    rows: Any  # (bias, head, sees, block, q): once for a block of queries
    columns: Any  # (bias, head, sees, b, h, j0, k): once for a tile of keys
    spans: Any  # (bias, rows, i0, begin, end, M, N): the tiles of keys that are NEAR
    query_spans: Any  # (bias, columns, start, j0, begin, end, M, N): such blocks of queries
    begin: Any  # (bias, head, own, i0, j0, M, N, PLACE, WALK): before tiles, from this one on
    add: Any  # (products, state, rows, columns, bias, tile, scale, PLACE, WALK)
    row_part: Any  # (bias, rows, block): what is the same for all keys, if `add` leaves it out
    narrow: Any  # (bias, rows, bound, sees, block, begin, edge, after, end, M, N): needed tiles
    open: Any  # (bias, M, N, WALK)
    to_scores: Any  # (state, ds, rows, kept, bias, tile, PLACE, WALK): and the gradient of scores
    collect: Any  # (state, ds, dx, rows, columns, bias, tile, PLACE, WALK): and that of q or k
    # (state, dx, own, bias, sees, at, WALK): state and dx, for the next head of a group
    close: Any
    few_rows: Any  # (bias, sees, b, h, i): as rows, with a head for each row
    few: Any  # (products, rows, bias, sees, b, h, i, j, k, seen, scale): the scores
    has_far_keys: Any  # whether tiles of keys far away have one bias for each query or key
    has_far_queries: Any  # whether blocks of queries have
    masks_all: Any  # whether tiles that are seen whole are masked too, for fewer loops
    keys_first: Any  # whether `to_keys` computes tiles transposed: not if a hook moves them in rows


@triton.jit
def no_head(bias, b, h):
    return ()


@triton.jit
def no_rows(bias, head, sees, block, q):
    return ()


@triton.jit
def no_columns(bias, head, sees, b, h, j0, k):
    return ()


@triton.jit
def no_spans(bias, rows, i0, begin, end, M: tl.constexpr, N: tl.constexpr):
    return begin, end


@triton.jit
def no_query_spans(bias, columns, start, j0, begin, end, M: tl.constexpr, N: tl.constexpr):
    return begin, end


@triton.jit
def no_begin(
    bias, head, own, i0, j0,
    M: tl.constexpr, N: tl.constexpr, PLACE: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    return ()


@triton.jit
def no_add(
    scores, state, rows, columns, bias, tile, scale, PLACE: tl.constexpr, WALK: tl.constexpr
):
    return scores * scale, state, ()


@triton.jit
def no_row_part(bias, rows, block):
    return block.i.to(tl.float32) * 0.0


@triton.jit
def no_narrow(
    bias, rows, bound, sees, block, begin, edge, after, end, M: tl.constexpr, N: tl.constexpr
):
    return begin, end


@triton.jit
def no_open(bias, M: tl.constexpr, N: tl.constexpr, WALK: tl.constexpr):
    return ()


@triton.jit
def no_to_scores(state, ds, rows, kept, bias, tile, PLACE: tl.constexpr, WALK: tl.constexpr):
    return state, ds


@triton.jit
def no_collect(state, ds, dx, rows, columns, bias, tile, PLACE: tl.constexpr, WALK: tl.constexpr):
    return state, dx


@triton.jit
def no_close(state, dx, own, bias, sees, at, WALK: tl.constexpr):
    return state, dx


@triton.jit
def no_few_rows(bias, sees, b, h, i):
    return ()


@triton.jit
def no_few(products, rows, bias, sees, b, h, i, j, k, seen, scale):
    return products * scale


NO_HOOKS = Hooks(
    no_head,
    no_rows,
    no_columns,
    no_spans,
    no_query_spans,
    no_begin,
    no_add,
    no_row_part,
    no_narrow,
    no_open,
    no_to_scores,
    no_collect,
    no_close,
    no_few_rows,
    no_few,
    False,
    False,
    False,
    True,
)


@triton.jit
def load_tile(x, b, h, first, count, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Rows from ``first`` on; those outside ``0 .. count - 1`` are 0, and need ``MASKED``."""
    rows = first + tl.arange(0, BLOCK)
    channels = tl.arange(0, x.block)
    at = x.at + b * x.b + h * x.h + rows.to(tl.int64)[:, None] * x.t + channels[None, :]
    inside = ((rows >= 0) & (rows < count))[:, None]
    narrow = (channels < x.width)[None, :]
    if MASKED and x.width != x.block:
        tile = tl.load(at, mask=inside & narrow, other=0.0)
    elif MASKED:
        tile = tl.load(at, mask=inside, other=0.0)
    elif x.width != x.block:
        tile = tl.load(at, mask=narrow, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def store_tile(x, b, h, rows, present, tile):
    """Write rows, in the dtype of their tensor."""
    channels = tl.arange(0, x.block)
    at = x.at + b * x.b + h * x.h + rows.to(tl.int64)[:, None] * x.t + channels[None, :]
    inside = present[:, None] & (channels < x.width)[None, :]
    tl.store(at, tile.to(x.at.dtype.element_ty), mask=inside)


@triton.jit
def store_dense(to, rows, present, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write rows of a tensor without gaps."""
    channels = tl.arange(0, BLOCK)
    at = to + rows.to(tl.int64)[:, None] * WIDTH + channels[None, :]
    inside = present[:, None] & (channels < WIDTH)[None, :]
    tl.store(at, tile.to(to.dtype.element_ty), mask=inside)


@triton.jit
def start_of(sees, b):
    """The key index of a sequence's first query."""
    if sees.starts is not None:
        start = tl.load(sees.starts + b * sees.starts_b).to(tl.int32)
    else:
        start = sees.start.to(tl.int32)
    return start


@triton.jit
def range_of(sees, b, i):
    """The first and the last key that each query sees."""
    low = i * 0
    high = i * 0 + sees.keys - 1
    if sees.is_causal:
        high = tl.minimum(high, i)
    if sees.first is not None:
        at = b * sees.ends_b + tl.minimum(tl.maximum(i, 0), sees.keys - 1)
        low = tl.load(sees.first + at).to(tl.int32)
        high = tl.minimum(high, tl.load(sees.last + at).to(tl.int32))
    if sees.left is not None:
        low = tl.maximum(low, i - sees.left)
        high = tl.minimum(high, i + sees.right)
    return low, high


@triton.jit
def block_at(sees, b, h, start, row0, M: tl.constexpr):
    """The block of queries from ``row0`` on; rows that are not there see no key."""
    rows = row0 + tl.arange(0, M)
    i = start + rows
    present = (rows >= 0) & (rows < sees.queries)
    low, high = range_of(sees, b, i)
    low = tl.where(present, low, sees.keys)
    high = tl.where(present, high, -1)
    return Block(b, h, row0, rows, present, start + row0, i, low, high)


@triton.jit
def program_of(sees, M: tl.constexpr):
    """The sequence and the head of this program's queries, and the first of them.

    There is one axis of programs, because CUDA's other axes have at most 65,535. The last queries
    see the most keys, so the first programs have them.
    """
    blocks = (sees.queries + M - 1) // M
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    row0 = (blocks - 1 - tl.program_id(0) % blocks) * M
    return sequence // sees.heads, sequence % sees.heads, row0


@triton.jit
def number_of(block, sees):
    """The number of a block of queries, of all blocks, heads and sequences."""
    M: tl.constexpr = block.rows.shape[0]
    blocks = (sees.queries + M - 1) // M
    return (block.b * sees.heads + block.h) * blocks + block.row0 // M


@triton.jit
def sum_blocks(by_block, batch, blocks):
    """The sum of the numbers ``(batch, owners, blocks)`` of this program's owner."""
    sums = tl.zeros((1024,), tl.float32)
    for chunk in range(0, batch * blocks, 1024):
        n = chunk + tl.arange(0, 1024)
        sequence = (n // blocks).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        at = by_block + sequence * blocks + n % blocks
        sums += tl.load(at, mask=n < batch * blocks, other=0.0)
    return tl.sum(sums)


@triton.jit
def tile_at(block, sees, j0, N: tl.constexpr, MASKED: tl.constexpr):
    """The tile of a block of queries and of the keys from ``j0`` on."""
    j = j0 + tl.arange(0, N)
    seen = (j[None, :] >= block.low[:, None]) & (j[None, :] <= block.high[:, None])
    if MASKED and sees.padding is not None:
        inside = (j >= 0) & (j < sees.keys)
        there = tl.load(sees.padding + block.b * sees.padding_b + j, mask=inside, other=0)
        seen = seen & (there != 0)[None, :]
    return Tile(block.b, block.h, block.i0, j0, block.i, j, seen)


@triton.jit
def product(x, y, KEYS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """Products of the rows of two tiles, ``[queries, keys]``; as a transpose for ``KEYS_FIRST``."""
    if KEYS_FIRST:
        made = tl.dot(y, x.T, input_precision=PRECISION).T
    else:
        made = tl.dot(x, y.T, input_precision=PRECISION)
    return made


@triton.jit
def softmax_begin(M: tl.constexpr, BLOCK: tl.constexpr):
    """The state of a softmax: for each query the sum of weights, the greatest score, the output."""
    return (
        tl.zeros((M,), tl.float32),
        tl.full((M,), float("-inf"), tl.float32),
        tl.zeros((M, BLOCK), tl.float32),
    )


@triton.jit
def softmax_step(state, scores, v, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """The state after a tile of keys."""
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
def load_lse(lse, rows, present):
    """The log-sum-exps; infinity where a query sees nothing, so that its weights are zero."""
    sums = tl.load(lse + rows, mask=present, other=float("-inf")) * LOG2E
    return tl.where(sums == float("-inf"), float("inf"), sums)


@triton.jit
def clip(x, least, most):
    """A number in a range; the lower end, if the range is empty."""
    return tl.maximum(tl.minimum(x, most), least)


@triton.jit
def tiles_of(block, N: tl.constexpr):
    """The tiles of keys that some query of a block sees: the first one, and the one after them."""
    begin = tl.maximum(tl.min(block.low), 0) // N
    return begin, tl.maximum((tl.max(block.high) + N) // N, begin)
