"""Products of queries and keys with a vector for each distance: Shaw, Transformer-XL, DeBERTa.

To a score is added ``p_i E_r + m_j F_r``, where ``r`` is the distance ``i - j`` plus ``zero``,
clipped to the rows of E and F. A tile has as many queries as keys. A row of it has that many
distances, so the products are computed in the order of distances modulo this number, and `roll`
shifts each row cyclically, by one place more than the row before. `near` are then the columns
whose distance is that of the tile plus the column; the distances of the others are one block less,
and near in the next tile, to which `forward` carries their products, if it has registers for them.

Where all distances of a tile are past an end, one vector serves the tile, and `at_ends` has
computed the products with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from posenc.ops.attention.triton.parts import (
    AFTER,
    BEFORE,
    DIAGONAL,
    KEYS,
    NEAR,
    QUERIES,
    clip,
    load_tile,
    number_of,
    start_of,
    store_dense,
    store_tile,
)
from posenc.ops.attention.triton.walks import (
    NOTHING,
    OPTIONS,
    Above,
    Gradient,
    Prepared,
    Tiles,
    Walks,
    block_of,
    hooks,
    rows_of,
)
from posenc.ops.plan import Constant, Operand, cdiv, power_of_two, strides


class Side(NamedTuple):
    """The vectors of queries, or of keys: ``(R, 1 or H, D)``, and what is multiplied with them.

    A side that a call does not have is None.
    """

    vectors: Any
    step: Any
    vectors_h: Any
    x: Any  # Rows of p or m, or None if these are q or k
    ends: Any  # products with the first and the last vector, (2, B, H, T)
    to_x: Any  # Rows of the gradient of p or m
    to_ends: Any  # sums for the first and the last vector, (2, B, H, blocks, D)
    to_vectors: Any  # sums of diagonals, (parts, H, diagonals, 2 * block, D)
    few: Any  # products of few queries with all vectors, (B, H, Q, R)
    count: Any  # of tokens of a sequence


class Vectors(NamedTuple):
    """Vectors for queries and for keys, of `rows` distances; `zero` is the row of distance zero."""

    hooks: Any
    has_queries: Any
    has_keys: Any
    queries: Any
    keys: Any
    rows: Any
    zero: Any
    scale: Any  # of scores, in natural units
    size: Any  # sequences times heads
    width: Any
    block: Any
    precision: Any
    carries: Any  # whether a block of queries keeps products for its next tile


class Head(NamedTuple):
    """Where the vectors of a head begin; nothing for a side that a call does not have."""

    queries: Any
    keys: Any


class Own(NamedTuple):
    """A tile of p, or of m, with where its products with the ends are."""

    head: Any
    x: Any
    ends: Any
    inside: Any


class Collected(NamedTuple):
    """What a walk collects for the rows that it owns: the gradient of p or m, and sums of ``ds``
    of the first and the last vector, of near tiles, and of tiles past the ends.
    """

    dx: Any
    first: Any
    last: Any
    far_first: Any
    far_last: Any


class Both(NamedTuple):
    """The gradients of vectors of near distances, and of the others."""

    near: Any
    others: Any


@triton.jit
def is_near(BLOCK: tl.constexpr):
    return tl.arange(0, BLOCK)[None, :] <= tl.arange(0, BLOCK)[:, None]


@triton.jit
def roll(x, BLOCK: tl.constexpr):
    """Column ``(m - n) % BLOCK`` of row ``m`` as column ``n``; twice, it changes nothing."""
    place = tl.arange(0, BLOCK)[:, None] - tl.arange(0, BLOCK)[None, :]
    return tl.gather(x, place & (BLOCK - 1), 1)


@triton.jit
def load_vectors(at, side, bias, distance, SIGN: tl.constexpr, BLOCK: tl.constexpr):
    """The vectors of ``distance`` and the distances after it, or before it if ``SIGN`` is -1."""
    row = distance + SIGN * tl.arange(0, BLOCK) + bias.zero
    row = tl.minimum(tl.maximum(row, 0), bias.rows - 1)
    channels = tl.arange(0, bias.block)
    places = at + row.to(tl.int64)[:, None] * side.step + channels[None, :]
    return tl.load(places, mask=(channels < bias.width)[None, :], other=0.0)


@triton.jit
def load_vector(at, side, bias, row):
    channels = tl.arange(0, bias.block)
    places = at + row.to(tl.int64) * side.step + channels
    return tl.load(places, mask=channels < bias.width, other=0.0).to(tl.float32)


@triton.jit
def products_of(x, at, side, bias, distance, SIGN: tl.constexpr, BLOCK: tl.constexpr):
    vectors = load_vectors(at, side, bias, distance, SIGN, BLOCK)
    return tl.dot(x, vectors.T, input_precision=bias.precision)


@triton.jit
def head_vectors(bias, b, h):
    queries = ()
    keys = ()
    if bias.has_queries:
        queries = bias.queries.vectors + h * bias.queries.vectors_h
    if bias.has_keys:
        keys = bias.keys.vectors + h * bias.keys.vectors_h
    return Head(queries, keys)


@triton.jit
def vector_rows(bias, head, sees, block, q):
    own = ()
    if bias.has_queries:
        x = q
        if bias.queries.x is not None:
            x = load_tile(
                bias.queries.x, block.b, block.h, block.row0, sees.queries, q.shape[0], True
            )
        at = (block.b * sees.heads + block.h) * sees.queries + block.rows
        own = Own(head.queries, x, bias.queries.ends + at, block.present)
    return own


@triton.jit
def vector_columns(bias, head, sees, b, h, j0, k):
    own = ()
    if bias.has_keys:
        x = k
        if bias.keys.x is not None:
            x = load_tile(bias.keys.x, b, h // sees.group, j0, sees.keys, k.shape[0], True)
        j = j0 + tl.arange(0, k.shape[0])
        at = (b * sees.heads + h) * sees.keys + j
        own = Own(head.keys, x, bias.keys.ends + at, (j >= 0) & (j < sees.keys))
    return own


@triton.jit
def near_tiles(bias, rows, i0, begin, end, M: tl.constexpr, N: tl.constexpr):
    near = tl.maximum(i0 - (bias.rows - 1 - bias.zero) + 1, 0) // N
    return near, tl.maximum(i0 + M - 1 + bias.zero + N - 1, 0) // N


@triton.jit
def near_blocks(bias, columns, start, j0, begin, end, M: tl.constexpr, N: tl.constexpr):
    near = tl.maximum(j0 - bias.zero - start + 1, 0) // M
    return near, tl.maximum(j0 + N - 1 + bias.rows - 1 - bias.zero - start + M - 1, 0) // M


@triton.jit
def begin_vectors(
    bias, head, own, i0, j0,
    M: tl.constexpr, N: tl.constexpr, PLACE: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """Products with the vectors that the first tile has near, ``[queries, distances]``."""
    state = ()
    if PLACE == NEAR and WALK == QUERIES and bias.has_queries and bias.carries:
        state = products_of(own.x, own.head, bias.queries, bias, i0 - j0, 1, N)
    return state


@triton.jit
def add_vectors(
    scores, state, rows, columns, bias, tile, scale, PLACE: tl.constexpr, WALK: tl.constexpr
):
    N: tl.constexpr = tile.j.shape[0]
    distance = tile.i0 - tile.j0
    if PLACE != NEAR:
        of_last = bias.size.to(tl.int64)
        if PLACE == AFTER:
            of_last *= 0
        if bias.has_queries:
            at = rows.ends + of_last * bias.queries.count
            scores += tl.load(at, mask=rows.inside, other=0.0)[:, None]
        if bias.has_keys:
            at = columns.ends + of_last * bias.keys.count
            scores += tl.load(at, mask=columns.inside, other=0.0)[None, :]
    else:
        if bias.has_queries:
            if WALK == QUERIES and bias.carries:
                near = state
            else:
                near = products_of(rows.x, rows.head, bias.queries, bias, distance, 1, N)
            others = products_of(rows.x, rows.head, bias.queries, bias, distance - N, 1, N)
            scores += roll(tl.where(is_near(N), near, others), N)
            if WALK == QUERIES and bias.carries:
                state = others
        if bias.has_keys:
            near_keys = products_of(columns.x, columns.head, bias.keys, bias, distance, -1, N)
            others_keys = products_of(columns.x, columns.head, bias.keys, bias, distance + N, -1, N)
            scores += roll(tl.where(is_near(N), near_keys, others_keys), N).T
    return scores * scale, state, ()


@triton.jit
def open_vectors(bias, M: tl.constexpr, N: tl.constexpr, WALK: tl.constexpr):
    state = ()
    if WALK == DIAGONAL:
        empty = tl.zeros((M, bias.block), tl.float32)
        of_queries = ()
        of_keys = ()
        if bias.has_queries:
            of_queries = Both(empty, empty)
        if bias.has_keys:
            of_keys = Both(empty, empty)
        state = of_queries, of_keys
    elif WALK == QUERIES and bias.has_queries:
        dx = ()
        if bias.queries.x is not None:
            dx = tl.zeros((M, bias.block), tl.float32)
        nothing = tl.zeros((M,), tl.float32)
        state = Collected(dx, nothing, nothing, nothing, nothing)
    elif WALK == KEYS and bias.has_keys:
        dx = ()
        if bias.keys.x is not None:
            dx = tl.zeros((N, bias.block), tl.float32)
        nothing = tl.zeros((N,), tl.float32)
        state = Collected(dx, nothing, nothing, nothing, nothing)
    return state


@triton.jit
def add_along(dx, ds, own, side, bias, distance, SIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Add the gradients of rows, from those of the scores."""
    near = load_vectors(own.head, side, bias, distance, SIGN, BLOCK)
    rolled = roll(ds.to(near.dtype), BLOCK)
    nothing = tl.zeros_like(rolled)
    of_near = tl.where(is_near(BLOCK), rolled, nothing)
    dx = tl.dot(of_near, near, dx, input_precision=bias.precision)
    others = load_vectors(own.head, side, bias, distance - SIGN * BLOCK, SIGN, BLOCK)
    of_others = tl.where(is_near(BLOCK), nothing, rolled)
    return tl.dot(of_others, others, dx, input_precision=bias.precision)


@triton.jit
def add_to_vectors(to, ds, x, bias, BLOCK: tl.constexpr):
    """Add the gradients of vectors, from those of the scores."""
    rolled = roll(ds.to(x.dtype), BLOCK)
    nothing = tl.zeros_like(rolled)
    near = tl.where(is_near(BLOCK), rolled, nothing)
    others = tl.where(is_near(BLOCK), nothing, rolled)
    return Both(
        tl.dot(near.T, x, to.near, input_precision=bias.precision),
        tl.dot(others.T, x, to.others, input_precision=bias.precision),
    )


@triton.jit
def collect_own(
    state, ds, dx, own, side, bias, tile,
    AXIS: tl.constexpr, PLACE: tl.constexpr, SIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Collect for the rows that a walk owns; ``AXIS`` is that of the others."""
    dp = state.dx
    first = state.first
    last = state.last
    far_first = state.far_first
    far_last = state.far_last
    if PLACE == BEFORE:
        far_last += tl.sum(ds, AXIS)
    elif PLACE == AFTER:
        far_first += tl.sum(ds, AXIS)
    else:
        by_row = ds
        if AXIS == 0:
            by_row = ds.T
        distance = tile.i0 - tile.j0
        if side.x is not None:
            dp = add_along(dp, by_row, own, side, bias, distance, SIGN, BLOCK)
        else:
            dx = add_along(dx, by_row, own, side, bias, distance, SIGN, BLOCK)
        row = tile.i[:, None] - tile.j[None, :] + bias.zero
        is_last = row >= bias.rows - 1
        first += tl.sum(tl.where((row <= 0) & (is_last == 0), ds, 0.0), AXIS)
        last += tl.sum(tl.where(is_last, ds, 0.0), AXIS)
    return Collected(dp, first, last, far_first, far_last), dx


@triton.jit
def collect_vectors(
    state, ds, dx, rows, columns, bias, tile, PLACE: tl.constexpr, WALK: tl.constexpr
):
    N: tl.constexpr = tile.j.shape[0]
    if WALK == DIAGONAL:
        of_queries, of_keys = state
        if bias.has_queries:
            of_queries = add_to_vectors(of_queries, ds, rows.x, bias, N)
        if bias.has_keys:
            of_keys = add_to_vectors(of_keys, ds.T, columns.x, bias, N)
        state = of_queries, of_keys
    elif WALK == QUERIES and bias.has_queries:
        state, dx = collect_own(state, ds, dx, rows, bias.queries, bias, tile, 1, PLACE, 1, N)
    elif WALK == KEYS and bias.has_keys:
        state, dx = collect_own(state, ds, dx, columns, bias.keys, bias, tile, 0, PLACE, -1, N)
    return state, dx


@triton.jit
def close_own(state, dx, own, side, bias, b, h, at, number, numbers):
    """Write what was collected for the rows that a walk owns."""
    far = state.far_first[:, None] * load_vector(own.head, side, bias, bias.rows * 0)[None, :]
    far += state.far_last[:, None] * load_vector(own.head, side, bias, bias.rows - 1)[None, :]
    dp = state.dx
    if side.x is not None:
        dp += far
        store_tile(side.to_x, b, h, at, own.inside, dp * bias.scale)
    else:
        dx += far
    channels = tl.arange(0, bias.block)
    narrow = channels < bias.width
    x = own.x.to(tl.float32)
    to = side.to_ends + number * bias.width + channels
    first = tl.where(own.inside, state.first + state.far_first, 0.0)
    tl.store(to, tl.sum(first[:, None] * x, 0), mask=narrow)
    last = tl.where(own.inside, state.last + state.far_last, 0.0)
    tl.store(to + numbers * bias.width, tl.sum(last[:, None] * x, 0), mask=narrow)
    nothing = tl.zeros_like(state.first)
    return Collected(dp, nothing, nothing, nothing, nothing), dx


@triton.jit
def store_both(to, both, bias, at, SIGN: tl.constexpr):
    """Write the gradients of a diagonal's vectors, from the distance one block before on."""
    M: tl.constexpr = both.near.shape[0]
    row = tl.arange(0, M) * SIGN
    to += at.number * (2 * M * bias.width)
    everywhere = tl.arange(0, M) >= 0
    store_dense(to, row + M, everywhere, both.near, bias.width, bias.block)
    place = row if SIGN == 1 else (row + 2 * M) & (2 * M - 1)
    store_dense(to, place, everywhere, both.others, bias.width, bias.block)


@triton.jit
def close_vectors(state, dx, own, bias, sees, at, WALK: tl.constexpr):
    if WALK == DIAGONAL:
        of_queries, of_keys = state
        if bias.has_queries:
            store_both(bias.queries.to_vectors, of_queries, bias, at, 1)
        if bias.has_keys:
            # Distances are in reverse order; no key is a whole block from the diagonal.
            store_both(bias.keys.to_vectors, of_keys, bias, at, -1)
    elif WALK == QUERIES and bias.has_queries:
        M: tl.constexpr = at.rows.shape[0]
        blocks = (sees.queries + M - 1) // M
        numbers = bias.size.to(tl.int64) * blocks
        number = number_of(at, sees)
        state, dx = close_own(
            state, dx, own, bias.queries, bias, at.b, at.h, at.rows, number, numbers
        )
    elif WALK == KEYS and bias.has_keys:
        N: tl.constexpr = at.j.shape[0]
        tiles = (sees.keys + N - 1) // N
        numbers = bias.size.to(tl.int64) * tiles
        number = (at.b * sees.heads + at.h) * tiles + at.j0 // N
        # One head of keys has the gradients of all of its heads of queries, one after the other.
        state, dx = close_own(
            state, dx, own, bias.keys, bias, at.b, at.h // sees.group, at.j, number, numbers
        )
    return state, dx


class FewRows(NamedTuple):
    """Where the products of each query with all vectors begin."""

    at: Any


@triton.jit
def few_vectors(bias, sees, b, h, i):
    rows = ()
    if bias.has_queries:
        t = i - start_of(sees, b)
        rows = FewRows(bias.queries.few + ((b * sees.heads + h) * sees.queries + t) * bias.rows)
    return rows


@triton.jit
def add_few_vectors(products, rows, bias, sees, b, h, i, j, k, seen, scale):
    if bias.has_queries:
        rows_of_keys = clip(i[:, None] - j[None, :] + bias.zero, 0, bias.rows - 1)
        products += tl.load(rows.at[:, None] + rows_of_keys)
    if bias.has_keys:
        x = k
        kv = tl.min(h) // sees.group
        if bias.keys.x is not None:
            x = load_tile(bias.keys.x, b, kv, tl.min(j), sees.keys, j.shape[0], True)
        channels = tl.arange(0, bias.block)
        number = tl.arange(0, products.shape[0])
        # Each query has vectors of its own: there are few of them.
        for n in tl.range(0, sees.queries * sees.group):
            head = bias.keys.vectors + (kv * sees.group + n // sees.queries) * bias.keys.vectors_h
            distance = start_of(sees, b) + n % sees.queries - j
            row = clip(distance + bias.zero, 0, bias.rows - 1)
            at = head + row.to(tl.int64)[:, None] * bias.keys.step + channels[None, :]
            vectors = tl.load(at, mask=(channels < bias.width)[None, :], other=0.0)
            of_keys = tl.sum(x.to(tl.float32) * vectors.to(tl.float32), 1)
            products += tl.where((number == n)[:, None], of_keys[None, :], 0.0)
    return products * scale


HOOKS = hooks(
    has_far_keys=True,
    has_far_queries=True,
    masks_all=True,
    keys_first=False,
    head=head_vectors,
    rows=vector_rows,
    columns=vector_columns,
    spans=near_tiles,
    query_spans=near_blocks,
    begin=begin_vectors,
    add=add_vectors,
    open=open_vectors,
    collect=collect_vectors,
    close=close_vectors,
    few_rows=few_vectors,
    few=add_few_vectors,
)


@triton.jit
def at_ends(
    x, vectors, to, step, vectors_h, count, rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The products of tokens with the first vector, and with the last, ``(2, B, H, T)``."""
    blocks = (count + BLOCK - 1) // BLOCK
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK
    b, h = sequence // HEADS, sequence % HEADS
    tokens = load_tile(x, b, h // GROUP, first, count, BLOCK, True).to(tl.float32)
    at = first + tl.arange(0, BLOCK)
    size = tl.num_programs(0).to(tl.int64) // blocks * count
    channels = tl.arange(0, x.block)
    narrow = channels < x.width
    vectors += h * vectors_h + channels
    vector = tl.load(vectors, mask=narrow, other=0.0).to(tl.float32)
    tl.store(to + sequence * count + at, tl.sum(tokens * vector[None, :], 1), mask=at < count)
    last = (rows - 1).to(tl.int64) * step
    vector = tl.load(vectors + last, mask=narrow, other=0.0).to(tl.float32)
    products = tl.sum(tokens * vector[None, :], 1)
    tl.store(to + size + sequence * count + at, products, mask=at < count)


# Queries and keys of a tile, warps and stages. The first two are for calls with vectors for queries
# and for keys, of halves in heads up to 64 and up to 128. For other calls, the next are for halves
# in heads up to 64, up to 128 and wider, and the last for float32 in the same heads.
_SETTINGS = (
    ((64, 4, 1), (64, 4, 1), (32, 2, 2), (32, 4, 2)),
    ((64, 4, 1), (64, 4, 1), (32, 2, 1), (32, 4, 2)),
    ((64, 4, 3), (64, 4, 2), (64, 4, 2), (32, 2, 2)),
    ((64, 4, 1), (64, 4, 1), (64, 4, 1), (32, 4, 2)),
    *[((32, 4, 1),) * 4] * 3,
    ((16, 4, 1),) * 4,
)


@triton.jit
def with_all(
    x, vectors, to, step, vectors_h, count, rows,
    HEADS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products of queries with all vectors, ``(B, H, Q, R)``."""
    blocks = (count + M - 1) // M
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * M
    tokens = load_tile(x, sequence // HEADS, sequence % HEADS, first, count, M, True)
    row = tl.program_id(1) * N + tl.arange(0, N)
    channels = tl.arange(0, x.block)
    at = vectors + sequence % HEADS * vectors_h + row.to(tl.int64)[:, None] * step
    inside = (row < rows)[:, None] & (channels < x.width)[None, :]
    found = tl.load(at + channels[None, :], mask=inside, other=0.0)
    products = tl.dot(tokens, found.T, input_precision=PRECISION)
    t = first + tl.arange(0, M)
    places = (sequence * count + t)[:, None] * rows + row[None, :]
    tl.store(to + places, products, mask=(t < count)[:, None] & (row < rows)[None, :])


@triton.jit
def fold(
    sums, ends, to, scale, rows, zero, low, high, count, parts, blocks, batch,
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


def prepare(walks: Walks) -> Prepared:
    """The vectors of a call, with the products at both ends."""
    q, k, found = walks.q, walks.k, walks.call.bias
    both = found.for_queries, found.for_keys
    at = (walks.width > 64) + (walks.width > 128) + (3 if walks.is_exact else 0)
    settings = _SETTINGS[at if at < 2 and None not in both else 2 + at]
    bias = Vectors(
        hooks=HOOKS,
        has_queries=Constant(found.for_queries is not None),
        has_keys=Constant(found.for_keys is not None),
        queries=_side_of(walks, found.for_queries, found.p, q),
        keys=_side_of(walks, found.for_keys, found.m, k),
        rows=next(len(x) for x in both if x is not None),
        zero=found.zero,
        scale=float(walks.call.scale),
        size=walks.sequences,
        width=Constant(q.shape[3]),
        block=Constant(block_of(q)),
        precision=Constant(walks.precision),
        # With vectors for both, and in a backward pass, registers run out.
        carries=Constant(None in both),
    )
    tiles = Tiles(*[(size, size, warps, stages) for size, warps, stages in settings])
    return Prepared(bias, tiles)


def prepare_few(walks: Walks) -> Prepared | None:
    """The vectors of a call of few queries, with the products of each query and all vectors."""
    found, (_, heads, queries, _) = walks.call.bias, walks.q.shape
    # Vectors for keys are read for each query.
    if found.for_keys is not None and heads // walks.k.shape[1] * queries > 8:
        return None
    prepared = prepare(walks)
    side, q = prepared.bias.queries, walks.q
    if side is NOTHING:
        return prepared
    own = q if found.p is None else walks.plan.with_dense_rows(found.p)
    rows = prepared.bias.rows
    few = walks.plan.empty((*q.shape[:3], rows), torch.float32)
    constants = {"HEADS": q.shape[1], "M": 16, "N": 64, "PRECISION": walks.precision}
    grid = cdiv(q.shape[2], 16) * walks.sequences, cdiv(rows, 64)
    arguments = rows_of(own), side.vectors, few, side.step, side.vectors_h, q.shape[2], rows
    walks.plan.launch(with_all, grid, arguments, constants, **OPTIONS, num_warps=4)
    return prepared._replace(bias=prepared.bias._replace(queries=side._replace(few=few)))


def _side_of(walks: Walks, found: Operand | None, x: Operand | None, like: Operand) -> Any:
    """The vectors of queries, or of keys."""
    if found is None:
        return NOTHING
    plan, heads, count = walks.plan, walks.q.shape[1], like.shape[2]
    found = plan.with_dense_rows(found)
    own = like if x is None else plan.with_dense_rows(x)
    ends = plan.empty((2, own.shape[0], heads, count), torch.float32)
    block = max(4096 // block_of(own), 16)
    constants = {"HEADS": heads, "GROUP": heads // own.shape[1], "BLOCK": block}
    grid = (cdiv(count, block) * own.shape[0] * heads,)
    step, head = strides(found)[:2]
    arguments = rows_of(own), found, ends, step, head, count, len(found)
    plan.launch(at_ends, grid, arguments, constants, **OPTIONS, num_warps=4)
    return Side(
        vectors=found,
        step=step,
        vectors_h=head,
        x=NOTHING if x is None else rows_of(own),
        ends=ends,
        to_x=NOTHING,
        to_ends=NOTHING,
        to_vectors=NOTHING,
        few=NOTHING,
        count=count,
    )


def gradient_of(
    walks: Walks, prepared: Prepared, above: Above, results: Mapping[str, Operand]
) -> Gradient:
    """The gradients of p and m, sums at both ends by blocks, and sums of diagonals."""
    (batch, heads, queries, width), tiles = walks.q.shape, prepared.tiles
    nearest, furthest = _distances(walks, prepared.bias.rows)
    block = tiles.to_bias[0]
    count = 0 if furthest < nearest else cdiv(furthest - nearest, block) + 1
    # Short diagonals have parts, so that all processors have work.
    shares = max(min(256 // max(count * heads, 1), queries // (4 * block)), 1)
    sides: dict[str, Any] = {}
    folds: list[tuple[Any, ...]] = []
    for name, to_x, to, size in (
        ("queries", results["p"], results["for_queries"], tiles.to_queries[0]),
        ("keys", results["m"], results["for_keys"], tiles.to_keys[1]),
    ):
        side = getattr(prepared.bias, name)
        if side is not NOTHING:
            blocks = cdiv(side.count, size)
            ends = walks.plan.empty((2, batch * heads, blocks, width), torch.float32)
            sums = walks.plan.empty((shares * heads, count, 2 * block, width), torch.float32)
            place = NOTHING if side.x is NOTHING else rows_of(to_x)
            side = side._replace(to_x=place, to_ends=ends, to_vectors=sums)
            rows = prepared.bias.rows
            numbers = walks.call.scale, rows, walks.call.bias.zero, nearest, furthest, count
            constants = {"HEADS": heads, "TOGETHER": heads // to.shape[1], "D": width}
            constants |= {"BLOCK_D": power_of_two(width), "SIZE": block, "BLOCK": 16}
            arguments = sums, ends, to, *numbers, shares, blocks, batch
            folds.append((fold, (cdiv(rows, 16), to.shape[1]), arguments, constants))
        sides[name] = side
    bias = prepared.bias._replace(**sides, carries=Constant(False))
    return Gradient(bias, tuple(folds), count, nearest, shares)


def _distances(walks: Walks, rows: int) -> tuple[int, int]:
    """The nearest and the furthest distance that is seen and has a row between both ends."""
    call, queries, keys = walks.call, walks.q.shape[2], walks.k.shape[2]
    zero = call.bias.zero
    nearest = max(1 - zero, 0 if call.causal else -queries - keys)
    furthest = min(rows - 2 - zero, queries + keys)
    if call.starts is None:
        furthest = min(furthest, call.start + queries - 1)
        nearest = max(nearest, call.start - keys + 1)
    if call.window is not None:
        nearest, furthest = max(nearest, -call.window[1]), min(furthest, call.window[0])
    return nearest, furthest
