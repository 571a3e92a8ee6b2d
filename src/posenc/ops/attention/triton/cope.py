"""Attention with positions that gates count (CoPE): the kernels.

A query's position of key ``j`` is the sum of the gates of keys ``j`` to its own, so tiles of keys
are visited from the query's own backwards, and ``counts`` is the sum of those visited. The bias is
interpolated between ``levels``, the products of the query with the embeddings of whole
positions. Once all queries of a block have counted to the last position, the bias is its level, and
no gate is needed. For the backward pass `to_queries` stores, for each tile that it visits with
gates, the counts and the sum of the positions' gradients; `to_keys` reads them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from posenc.ops.attention.triton.attention import (
    OPTIONS,
    STARTS,
    constants_of,
    places_of,
    whole,
    with_whole_places,
)
from posenc.ops.attention.triton.attention_parts import (
    LN2,
    LOG2E,
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
from posenc.ops.plan import Operand, Plan, strides

# Lengths, offsets and windows, which would compile a kernel again.
UNSPECIALIZED = ["start", "left", "right", "keys", "queries"]
# Queries and keys of a tile, of halves in heads up to 64, up to 128 and wider, then of float32 in
# the same heads; and the warps and stages of each kernel.
TILES = 64, 64, 32, 32, 32, 16
WARPS = {
    "forward": ((4, 2), (4, 2), (4, 1), (4, 1), (4, 1), (4, 1)),
    "to_queries": ((4, 2), (4, 2), (4, 1), (4, 1), (4, 1), (4, 1)),
    "to_keys": ((8, 1), (8, 1), (4, 1), (4, 1), (4, 1), (4, 1)),
}


@triton.jit
def seen_keys(low, high, column0, BLOCK: tl.constexpr):
    """Which keys of a tile the queries see."""
    columns = column0 + tl.arange(0, BLOCK)
    return (columns[None, :] >= low[:, None]) & (columns[None, :] <= high[:, None])


@triton.jit
def last_level(levels, LAST: tl.constexpr, BLOCK_P: tl.constexpr):
    """The level of the last position."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_P)[None, :] == LAST, levels, 0.0), 1)


@triton.jit
def count(scores, seen, counts, levels, LAST: tl.constexpr):
    """The gates of a tile, its positions, their levels, and the levels' slopes."""
    gates = tl.where(seen, tl.sigmoid(scores), 0.0)
    at = tl.minimum(counts[:, None] + tl.cumsum(gates, 1, reverse=True), LAST * 1.0)
    below = tl.floor(at).to(tl.int32)
    left = tl.gather(levels, below, 1)
    slope = tl.gather(levels, tl.minimum(below + 1, LAST), 1) - left
    return gates, at, left + slope * (at - below.to(tl.float32)), slope


@triton.jit
def add_tile(state, scores, seen, v, PRECISION: tl.constexpr):
    """One step of the softmax; ``scores`` are in units of e."""
    scores = tl.where(seen, scores * LOG2E, float("-inf"))
    return softmax_step(state, scores, v, True, PRECISION)


@triton.jit
def is_counting(counts, low, tile, LAST: tl.constexpr, BLOCK: tl.constexpr):
    """Whether a query that sees keys up to this tile has not counted to the last position."""
    return tl.min(tl.where(low < (tile + 1) * BLOCK, counts, LAST * 1.0)) < LAST


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward(
    q, k, v, levels, out, lse, starts, first, last, start, scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, l_b, l_h, l_t, o_b, o_h, o_t,
    starts_b, ends_b, left, right, queries, keys,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    LAST: tl.constexpr, BLOCK_P: tl.constexpr,
    HAS_STARTS: tl.constexpr, DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Attention of a block of queries, and its log-sum-exp."""
    sequence, b, h, row0 = query_block(queries, HEADS, BLOCK)
    width: tl.constexpr = (D, BLOCK_D)
    v_width: tl.constexpr = (DV, BLOCK_DV)
    p_width: tl.constexpr = (LAST + 1, BLOCK_P)
    at = row0 + tl.arange(0, BLOCK)
    own = query_start(starts, start, b, starts_b, HAS_STARTS) + at
    present = at < queries
    query = load_rows(q + b * q_b + h * q_h, row0, queries, q_t, width, BLOCK)
    level = load_rows(levels + b * l_b + h * l_h, row0, queries, l_t, p_width, BLOCK)
    level = level.to(tl.float32)
    keys_at = k + b * k_b + h // GROUP * k_h
    values_at = v + b * v_b + h // GROUP * v_h
    ends = first + b * ends_b, last + b * ends_b, left, right
    low, high = visible_rows(own, present, ends, keys, True, DOCUMENTS, WINDOW)
    state = softmax_begin(BLOCK, BLOCK_DV)
    begin = tl.maximum(tl.min(low), 0) // BLOCK
    tile = tl.maximum((tl.max(high) + BLOCK) // BLOCK, begin) - 1
    counts = tl.zeros((BLOCK,), tl.float32)
    while (tile >= begin) & is_counting(counts, low, tile, LAST, BLOCK):
        key = load_rows(keys_at, tile * BLOCK, keys, k_t, width, BLOCK)
        value = load_rows(values_at, tile * BLOCK, keys, v_t, v_width, BLOCK)
        scores = tl.dot(query, key.T, input_precision=PRECISION) * scale
        seen = seen_keys(low, high, tile * BLOCK, BLOCK)
        gates, _, bias, _ = count(scores, seen, counts, level, LAST)
        state = add_tile(state, scores + bias, seen, value, PRECISION)
        counts += tl.sum(gates, 1)
        tile -= 1
    flat = last_level(level, LAST, BLOCK_P)
    for n in tl.range(begin, tile + 1):
        key = load_rows(keys_at, n * BLOCK, keys, k_t, width, BLOCK)
        value = load_rows(values_at, n * BLOCK, keys, v_t, v_width, BLOCK)
        scores = tl.dot(query, key.T, input_precision=PRECISION) * scale + flat[:, None]
        state = add_tile(state, scores, seen_keys(low, high, n * BLOCK, BLOCK), value, PRECISION)
    acc, sums = softmax_end(state)
    tl.store(lse + sequence * queries + at, sums * LN2, mask=present)
    store_rows(out + b * o_b + h * o_h, acc, at, present, o_t, v_width)


@triton.jit
def gradients_of(scores, seen, g, v, sums, minus, PRECISION: tl.constexpr):
    """The weights of a tile, and the gradients of its scores."""
    weights = tl.exp2(tl.where(seen, scores * LOG2E, float("-inf")) - sums[:, None])
    dp = tl.dot(g, v.T, input_precision=PRECISION)
    return weights, weights * (dp - minus[:, None])


@triton.jit
def to_levels(dl, ds, at, seen, LAST: tl.constexpr, BLOCK_P: tl.constexpr):
    """Add to the gradients of levels: a position's is shared by the two next to it."""
    position = tl.arange(0, BLOCK_P)[None, :]
    begin = tl.floor(tl.min(tl.where(seen, at, LAST * 1.0))).to(tl.int32)
    end = tl.minimum(tl.floor(tl.max(tl.where(seen, at, 0.0))).to(tl.int32) + 2, LAST + 1)
    for n in tl.range(begin, end):
        share = tl.maximum(1.0 - tl.abs(at - n * 1.0), 0.0)
        dl += tl.where(position == n, tl.sum(ds * share, 1)[:, None], 0.0)
    return dl


@triton.jit(do_not_specialize=UNSPECIALIZED)
def to_queries(
    q, k, v, levels, g, out, lse, g_lse, starts, first, last,
    dq, dl, delta, counted, passed, passed_all, start, scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, l_b, l_h, l_t, g_b, g_h, g_t, o_b, o_h, o_t,
    dq_b, dq_h, dq_t, dl_b, dl_h, dl_t, starts_b, ends_b, left, right, queries, keys,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    LAST: tl.constexpr, BLOCK_P: tl.constexpr,
    HAS_STARTS: tl.constexpr, DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr,
    LSE_TOO: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of queries, except by way of the levels, and of their levels.

    The gradient of a gate is the sum of those of the positions of its key and of earlier ones: of
    all positions, less those of this tile and later ones, plus those of this tile up to the key.
    The first is known at the end, and then multiplies the sum of all gates' slopes and keys.
    """
    sequence, b, h, row0 = query_block(queries, HEADS, BLOCK)
    width: tl.constexpr = (D, BLOCK_D)
    v_width: tl.constexpr = (DV, BLOCK_DV)
    p_width: tl.constexpr = (LAST + 1, BLOCK_P)
    at = row0 + tl.arange(0, BLOCK)
    own = query_start(starts, start, b, starts_b, HAS_STARTS) + at
    present = at < queries
    query = load_rows(q + b * q_b + h * q_h, row0, queries, q_t, width, BLOCK)
    level = load_rows(levels + b * l_b + h * l_h, row0, queries, l_t, p_width, BLOCK)
    level = level.to(tl.float32)
    grad = load_rows(g + b * g_b + h * g_h, row0, queries, g_t, v_width, BLOCK)
    made = load_rows(out + b * o_b + h * o_h, row0, queries, o_t, v_width, BLOCK)
    of_head = sequence * queries
    minus = store_delta(delta + of_head, g_lse + of_head, grad, made, at, present, LSE_TOO)
    sums = load_lse(lse + of_head, at, queries)
    keys_at = k + b * k_b + h // GROUP * k_h
    values_at = v + b * v_b + h // GROUP * v_h
    ends = first + b * ends_b, last + b * ends_b, left, right
    low, high = visible_rows(own, present, ends, keys, True, DOCUMENTS, WINDOW)
    to_query = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    by_gates = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    to_level = tl.zeros((BLOCK, BLOCK_P), tl.float32)
    counts = tl.zeros((BLOCK,), tl.float32)
    later = tl.zeros((BLOCK,), tl.float32)
    tiles = (keys + BLOCK - 1) // BLOCK
    begin = tl.maximum(tl.min(low), 0) // BLOCK
    tile = tl.maximum((tl.max(high) + BLOCK) // BLOCK, begin) - 1
    while (tile >= begin) & is_counting(counts, low, tile, LAST, BLOCK):
        key = load_rows(keys_at, tile * BLOCK, keys, k_t, width, BLOCK)
        value = load_rows(values_at, tile * BLOCK, keys, v_t, v_width, BLOCK)
        scores = tl.dot(query, key.T, input_precision=PRECISION) * scale
        seen = seen_keys(low, high, tile * BLOCK, BLOCK)
        gates, places, bias, slope = count(scores, seen, counts, level, LAST)
        _, ds = gradients_of(scores + bias, seen, grad, value, sums, minus, PRECISION)
        to_level = to_levels(to_level, ds, places, seen, LAST, BLOCK_P)
        by_place = tl.where(places < LAST, ds * slope, 0.0)
        later += tl.sum(by_place, 1)
        of_tile = (of_head + at) * tiles + tile
        tl.store(counted + of_tile, counts, mask=present)
        tl.store(passed + of_tile, later, mask=present)
        of_gates = gates * (1.0 - gates)
        ds += (tl.cumsum(by_place, 1) - later[:, None]) * of_gates
        to_query = tl.dot(ds.to(key.dtype), key, to_query, input_precision=PRECISION)
        by_gates = tl.dot(of_gates.to(key.dtype), key, by_gates, input_precision=PRECISION)
        counts += tl.sum(gates, 1)
        tile -= 1
    # Tiles that are not visited here have no gates.
    visited = tl.maximum((tl.max(high) + BLOCK) // BLOCK, begin)
    for n in tl.range(0, tiles):
        if (n <= tile) | (n >= visited):
            of_tile = (of_head + at) * tiles + n
            tl.store(counted + of_tile, counts * 0.0 + LAST, mask=present)
            tl.store(passed + of_tile, later, mask=present)
    flat = last_level(level, LAST, BLOCK_P)
    to_last = tl.zeros((BLOCK,), tl.float32)
    for n in tl.range(begin, tile + 1):
        key = load_rows(keys_at, n * BLOCK, keys, k_t, width, BLOCK)
        value = load_rows(values_at, n * BLOCK, keys, v_t, v_width, BLOCK)
        scores = tl.dot(query, key.T, input_precision=PRECISION) * scale + flat[:, None]
        seen = seen_keys(low, high, n * BLOCK, BLOCK)
        _, ds = gradients_of(scores, seen, grad, value, sums, minus, PRECISION)
        to_last += tl.sum(ds, 1)
        to_query = tl.dot(ds.to(key.dtype), key, to_query, input_precision=PRECISION)
    tl.store(passed_all + of_head + at, later, mask=present)
    to_query = (to_query + later[:, None] * by_gates) * scale
    to_level += tl.where(tl.arange(0, BLOCK_P)[None, :] == LAST, to_last[:, None], 0.0)
    store_rows(dq + b * dq_b + h * dq_h, to_query, at, present, dq_t, width)
    store_rows(dl + b * dl_b + h * dl_h, to_level, at, present, dl_t, p_width)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def to_keys(
    q, k, v, levels, g, lse, starts, first, last, delta, counted, passed, passed_all,
    dk, dv, start, scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, l_b, l_h, l_t, g_b, g_h, g_t,
    dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, starts_b, ends_b, left, right, queries, keys,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    LAST: tl.constexpr, BLOCK_P: tl.constexpr,
    HAS_STARTS: tl.constexpr, DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values."""
    kv_heads: tl.constexpr = HEADS // GROUP
    tiles = (keys + BLOCK - 1) // BLOCK
    tile = tl.program_id(0) % tiles
    column0 = tile * BLOCK
    b = (tl.program_id(0) // tiles // kv_heads).to(tl.int64)
    kv = (tl.program_id(0) // tiles % kv_heads).to(tl.int64)
    width: tl.constexpr = (D, BLOCK_D)
    v_width: tl.constexpr = (DV, BLOCK_DV)
    p_width: tl.constexpr = (LAST + 1, BLOCK_P)
    own_start = query_start(starts, start, b, starts_b, HAS_STARTS)
    key = load_rows(k + b * k_b + kv * k_h, column0, keys, k_t, width, BLOCK)
    value = load_rows(v + b * v_b + kv * v_h, column0, keys, v_t, v_width, BLOCK)
    ends = first + b * ends_b, last + b * ends_b, left, right
    # Blocks of queries that see some of these keys.
    least, most = queries_of_keys(own_start, column0, queries, left, right, True, WINDOW, BLOCK)
    begin = (least - own_start) // BLOCK
    end = tl.where(most < least, begin, (most - own_start + BLOCK) // BLOCK)
    to_key = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    to_value = tl.zeros((BLOCK, BLOCK_DV), tl.float32)
    for n in range(GROUP):
        h = kv * GROUP + n
        of_head = (b * HEADS + h) * queries
        for block in tl.range(begin, end):
            row0 = block * BLOCK
            at = row0 + tl.arange(0, BLOCK)
            present = at < queries
            query = load_rows(q + b * q_b + h * q_h, row0, queries, q_t, width, BLOCK)
            level = load_rows(levels + b * l_b + h * l_h, row0, queries, l_t, p_width, BLOCK)
            level = level.to(tl.float32)
            grad = load_rows(g + b * g_b + h * g_h, row0, queries, g_t, v_width, BLOCK)
            own = own_start + at
            low, high = visible_rows(own, present, ends, keys, True, DOCUMENTS, WINDOW)
            seen = seen_keys(low, high, column0, BLOCK)
            sums = load_lse(lse + of_head, at, queries)
            minus = tl.load(delta + of_head + at, mask=present, other=0.0)
            of_tile = (of_head + at) * tiles + tile
            counts = tl.load(counted + of_tile, mask=present, other=LAST * 1.0)
            scores = tl.dot(query, key.T, input_precision=PRECISION) * scale
            if tl.min(counts) < LAST:
                gates, places, bias, slope = count(scores, seen, counts, level, LAST)
                weights, ds = gradients_of(scores + bias, seen, grad, value, sums, minus, PRECISION)
                by_place = tl.where(places < LAST, ds * slope, 0.0)
                later = tl.load(passed + of_tile, mask=present, other=0.0)
                total = tl.load(passed_all + of_head + at, mask=present, other=0.0)
                earlier = (total - later)[:, None] + tl.cumsum(by_place, 1)
                ds += earlier * gates * (1.0 - gates)
            else:
                flat = last_level(level, LAST, BLOCK_P)[:, None]
                weights, ds = gradients_of(scores + flat, seen, grad, value, sums, minus, PRECISION)
            to_value = tl.dot(weights.to(grad.dtype).T, grad, to_value, input_precision=PRECISION)
            to_key = tl.dot(ds.to(query.dtype).T, query, to_key, input_precision=PRECISION)
    at = column0 + tl.arange(0, BLOCK)
    present = at < keys
    store_rows(dk + b * dk_b + kv * dk_h, to_key * scale, at, present, dk_t, width)
    store_rows(dv + b * dv_b + kv * dv_h, to_value, at, present, dv_t, v_width)


class Prepared:
    """A call with counted positions: its tensors as kernels read them.

    ``levels`` are products of the queries with the embedding of each position, ``[B, H, Q, P]``.
    """

    def __init__(self, given: Any, call: Any, plan: Plan) -> None:
        tensors = given.q, given.k, given.v, call.bias.levels
        self.q, self.k, self.v, self.levels = map(plan.with_dense_rows, tensors)
        self.plan, self.call = plan, with_whole_places(plan, call)
        places = self.call.starts, self.call.first, self.call.last
        self.places = [self.q if x is None else x for x in places]
        wide = max(self.q.shape[3], self.v.shape[3], self.levels.shape[3])
        self.kind = (wide > 64) + (wide > 128) + (3 if self.q.dtype == torch.float32 else 0)
        self.block = TILES[self.kind]

    def launch(self, kernel: Any, strided: Any, tokens: Operand, tensors: Any, **how: Any) -> None:
        """Launch a kernel, whose programs have a block of ``tokens`` each."""
        call, q, k = self.call, self.q, self.k
        steps = strides(q, k, self.v, self.levels, *strided)
        numbers = (call.scale, *steps, *places_of(call), q.shape[2], k.shape[2])
        count = self.levels.shape[3]
        constants = constants_of(q, k, self.v, call) | {"BLOCK": self.block, **how}
        constants |= {"LAST": count - 1, "BLOCK_P": max(16, triton.next_power_of_2(count))}
        batch, heads, length, _ = tokens.shape
        grid = (triton.cdiv(length, self.block) * batch * heads,)
        warps, stages = WARPS[kernel.__name__][self.kind]
        options = {**OPTIONS, "num_warps": warps, "num_stages": stages}
        self.plan.launch(kernel, grid, (*tensors, call.start, *numbers), constants, **options)


def plan_forward(given: Any, call: Any, plan: Plan) -> None:
    """Make the output and the log-sum-exp."""
    plan.least, plan.most = STARTS
    out, lse = plan.results
    made = Prepared(given, call, plan)
    q, k, v, levels = made.q, made.k, made.v, made.levels
    made.launch(forward, (out,), q, (q, k, v, levels, out, lse, *made.places))


def plan_backward(given: Any, call: Any, plan: Plan) -> None:
    """Make the gradients of q, k, v and the levels."""
    dq, dk, dv, dl = plan.results
    made, g = Prepared(given, call, plan), plan.with_dense_rows(given.g)
    q, k, v, levels = made.q, made.k, made.v, made.levels
    out, lse = whole(plan, given.out), whole(plan, given.lse)
    of_lse = lse if given.g_lse is None else whole(plan, given.g_lse)
    delta, passed_all = (plan.empty(lse.shape, lse.dtype) for _ in range(2))
    tiles = triton.cdiv(k.shape[2], made.block)
    counted, passed = (plan.empty((*lse.shape, tiles), lse.dtype) for _ in range(2))
    by_tile = counted, passed, passed_all
    tensors = (q, k, v, levels, g, out, lse, of_lse, *made.places, dq, dl, delta, *by_tile)
    made.launch(to_queries, (g, out, dq, dl), q, tensors, LSE_TOO=given.g_lse is not None)
    tensors = (q, k, v, levels, g, lse, *made.places, delta, *by_tile, dk, dv)
    made.launch(to_keys, (g, dk, dv), k, tensors)
