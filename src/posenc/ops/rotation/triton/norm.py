"""RMSNorm and rotation in one pass, and the gradient of both in another."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from posenc.ops.plan import Constant, Operand, Plan, Target, cdiv, power_of_two
from posenc.ops.rotation.spec import Turn, heads_first, is_of_all_heads
from posenc.ops.rotation.triton.pairs import (
    channels_of,
    heads_of,
    load_pairs,
    load_tables,
    negative,
    others_of,
    rotated,
    rows_at,
    store_pairs,
    table_of,
    turn_in,
)
from posenc.ops.rotation.triton.rotate import SHORT

# The most programs of the backward pass: they fill a large GPU, and their shares are soon summed.
_SHARES = 1056


def plan_norm(call: Any, plan: Plan, target: Target) -> None:
    """Normalise and rotate the tensors of a call into the results."""
    batch, _, length, width = heads_first(call.xs[0], call.layout).shape
    turn = turn_in(plan, call, length, width)
    items, copied = [], []
    for x, weight, result in zip(call.xs, call.weights, plan.results, strict=True):
        read = heads_first(plan.with_dense_rows(x), call.layout)
        written = result if result.has_dense_rows() else plan.empty(x.shape, x.dtype)
        if written is not result:
            copied.append((result, written))
        if x.numel():
            items.append((read, _whole(plan, weight), heads_first(written, call.layout)))
    # One launch for both, if that takes longer than the kernel.
    together = len(items) == 2 and items[0][0].dtype == items[1][0].dtype
    if together and batch * length <= SHORT:
        _launch(plan, items, turn, call)
    else:
        for item in items:
            _launch(plan, [item], turn, call)
    for result, written in copied:
        plan.copy(result, written)


def _whole(plan: Plan, weight: Operand) -> Operand:
    """The weight, or a copy without gaps."""
    return weight if weight.is_contiguous() else plan.contiguous(weight)


def _launch(
    plan: Plan, items: list[tuple[Operand, Operand, Operand]], turn: Turn, call: Any
) -> None:
    """Launch the kernel on one tensor, or on queries and keys."""
    (q, _, q_out), (k, _, k_out) = items[0], items[-1]
    cos, sin, rows, spec = turn
    batch, _, length, _ = q.shape
    blocks = [_heads(x, weight) for x, weight, _ in items]
    norms = [norm_of(x, weight, call) for x, weight, _ in items]
    # Of one tensor, the last is the first.
    arguments = (
        heads_of(q), heads_of(q_out), norms[0], heads_of(k), heads_of(k_out), norms[-1],
        table_of(cos, sin, rows, spec.transposed), channels_of(q, cos, spec), batch, length,
    )  # fmt: skip
    constants = {"Q_BLOCK": blocks[0], "K_BLOCK": blocks[-1]}
    # One program takes all heads of a token. Measured on an H200: benchmarks/README.md.
    warps = min(max(blocks[0] * q.shape[3] // 1024, 2), 8)
    plan.launch(_forward, (batch * length, len(items)), arguments, constants, num_warps=warps)


def plan_norm_backward(call: Any, plan: Plan, target: Target) -> None:
    """Make the gradients of the tensor and of the weight of a call."""
    to_x, to_weight = plan.results
    if call.x.numel() == 0:
        plan.fill_with_zeros(to_weight)
        return
    whole = heads_first(call.x, call.layout)
    cos, sin, rows, spec = turn_in(plan, call, *whole.shape[2:])
    weight = _whole(plan, call.weight)
    written = to_x if to_x.has_dense_rows() else plan.empty(to_x.shape, to_x.dtype)
    g, x, dx = (
        heads_first(t, call.layout)
        for t in (plan.with_dense_rows(call.g), plan.with_dense_rows(call.x), written)
    )
    (batch, heads, length, width), block = x.shape, _heads(x, weight)
    blocks = cdiv(heads, block)
    stride = min(batch * length, max(1, _SHARES // blocks))
    share_type = torch.promote_types(weight.dtype, torch.float32)
    count = weight.shape[0]
    shares = plan.empty((stride * blocks, count), share_type)
    arguments = (
        heads_of(g), heads_of(x), heads_of(dx), shares, norm_of(x, weight, call),
        table_of(cos, sin, rows, spec.transposed), channels_of(x, cos, spec), stride, batch, length,
    )  # fmt: skip
    constants = {"BLOCK_H": block}
    warps = 8 if block * width >= 4096 else 4
    plan.launch(_backward, (stride * blocks,), arguments, constants, num_warps=warps)
    plan_sum(plan, shares, to_weight)
    if written is not to_x:
        plan.copy(to_x, written)


def plan_sum(plan: Plan, shares: Operand, to: Operand) -> None:
    """Sum the rows of ``shares`` ``[n, ...]`` into ``to``, in order."""
    count = to.numel()
    grid = (cdiv(count, 64),)
    numbers = shares.shape[0], count
    constants = {"BLOCK_N": 64, "BLOCK": 64}
    plan.launch(sum_rows, grid, (shares, to, *numbers), constants, num_warps=4)


@triton.jit
def sum_rows(shares, to, rows, count, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of columns, of blocks of rows one after the other."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK_N, BLOCK), shares.dtype.element_ty)
    for first in range(0, rows, BLOCK_N):
        row = first + tl.arange(0, BLOCK_N)
        mask = (row < rows)[:, None] & (column < count)[None, :]
        total += tl.load(
            shares + row.to(tl.int64)[:, None] * count + column[None, :], mask=mask, other=0.0
        )
    tl.store(to + column, tl.sum(total, 0).to(to.dtype.element_ty), mask=column < count)


def _heads(x: Operand, weight: Operand) -> int:
    """Heads of one block: all for a norm over all heads, else as many as 1024 channels hold."""
    heads = power_of_two(x.shape[1])
    if is_of_all_heads(weight, x):
        return heads
    return min(heads, max(1, 1024 // power_of_two(x.shape[3])))


class Norm(NamedTuple):
    """RMSNorm: its weight, and what it is a norm of; what is added to the weight, and to a mean."""

    weight: Any
    width: Any
    is_of_all_heads: Any
    shift: Any
    eps: Any


def norm_of(x: Operand, weight: Operand, call: Any) -> Norm:
    """The norm of a call as kernels read it; as arguments its numbers would be float32."""
    of = x.shape[3], is_of_all_heads(weight, x), call.shift, call.eps
    return Norm(weight, *map(Constant, of))


@triton.jit
def load_channels(row, present, pair, other, keep, channels, INTERLEAVED: tl.constexpr):
    """Load both channels of a token's pairs, and the channels that are not rotated."""
    a, b = load_pairs(row, present, pair, channels, INTERLEAVED)
    rest = a * 0
    if channels.rest > 0:
        rest = tl.load(row + other, mask=keep, other=0.0).to(channels.wide)
    return a, b, rest


@triton.jit
def norm_factors(norm, x, h, pair, other, channels, INTERLEAVED: tl.constexpr):
    """The norm's factor of each channel, ``[1, H, P]``, which the heads share if it is of each.

    It is loaded for each head, so that each thread has the factors of its own channels.
    """
    h = h[None, :, None]
    row, present = norm.weight + h * (norm.width if norm.is_of_all_heads else 0), h < x.heads
    keep = present & (other < norm.width)
    wp, wq, wr = load_channels(row, present, pair, other, keep, channels, INTERLEAVED)
    if norm.shift != 0.0:
        wp, wq, wr = wp + norm.shift, wq + norm.shift, wr + norm.shift
    return wp, wq, wr


@triton.jit
def sum_products(p, q, rest, a, b, other, REST: tl.constexpr, ALL_HEADS: tl.constexpr):
    """Sum of products over the channels that share a norm, ``[1, H or 1, 1]``."""
    total = tl.sum(tl.fma(p, a, q * b), axis=2, keep_dims=True)
    if REST > 0:
        total += tl.sum(rest * other, axis=2, keep_dims=True)
    if ALL_HEADS:
        total = tl.sum(total, axis=1, keep_dims=True)
    return total


@triton.jit
def norm_scale(p, q, rest, norm, x, channels):
    """One over the root of the mean square, ``[1, H or 1, 1]``."""
    count: tl.constexpr = norm.width * x.heads if norm.is_of_all_heads else norm.width
    total = sum_products(p, q, rest, p, q, rest, channels.rest, norm.is_of_all_heads)
    return tl.rsqrt(total / count + norm.eps).to(channels.wide)


@triton.jit
def _normalise(x, y, norm, table, channels, b, t, length, BLOCK_H: tl.constexpr):
    """One token of one tensor."""
    pair = tl.arange(0, channels.block)[None, None, :]
    other = others_of(channels)
    narrow = pair < channels.pairs
    c, s, _ = load_tables(table, b, t, t < length, pair, narrow, channels.wide)
    # A norm over all heads needs them in one block. Otherwise blocks share the token's tables.
    wp, wq, wr = norm_factors(
        norm, x, tl.arange(0, BLOCK_H), pair, other, channels, channels.is_interleaved
    )
    for block in tl.static_range((x.heads + BLOCK_H - 1) // BLOCK_H):
        h = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
        present = (h < x.heads)[None, :, None]
        keep = present & (tl.arange(0, channels.block_rest)[None, None, :] < channels.rest)
        x_at = rows_at(x, b, t, h)
        y_at = rows_at(y, b, t, h)
        p, q, rest = load_channels(
            x_at, present, pair, other, keep, channels, channels.is_interleaved
        )
        scale = norm_scale(p, q, rest, norm, x, channels)
        p, q = rotated(p * scale * wp, q * scale * wq, c, s)
        store_pairs(y_at, present, pair, p, q, channels, channels.is_interleaved_out)
        if channels.rest > 0:
            tl.store(y_at + other, (rest * scale * wr).to(y.at.dtype.element_ty), mask=keep)


@triton.jit
def _forward(
    q, q_out, q_norm, k, k_out, k_norm, table, channels, batch, length,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """One token of the queries, or of the keys; of one tensor, the keys have no programs."""
    program = tl.program_id(0)
    b = (program % batch).to(tl.int64)
    t = (program // batch).to(tl.int64) + tl.arange(0, 1)
    if tl.program_id(1) == 0:
        _normalise(q, q_out, q_norm, table, channels, b, t, length, Q_BLOCK)
    else:
        _normalise(k, k_out, k_norm, table, channels, b, t, length, K_BLOCK)


@triton.jit
def _backward(
    g, x, dx, partial, norm, table, channels, shares, batch, length, BLOCK_H: tl.constexpr
):
    blocks = (x.heads + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    h = program % blocks * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64)
    pair = tl.arange(0, channels.block)[None, None, :]
    narrow = pair < channels.pairs
    other = others_of(channels)
    present = (h < x.heads)[None, :, None]
    keep = present & (tl.arange(0, channels.block_rest)[None, None, :] < channels.rest)
    count = norm.width * x.heads if norm.is_of_all_heads else norm.width
    to_wp = tl.zeros((1, BLOCK_H, channels.block), channels.wide)
    to_wq = tl.zeros((1, BLOCK_H, channels.block), channels.wide)
    to_wr = tl.zeros((1, BLOCK_H, channels.block_rest), channels.wide)
    wp, wq, wr = norm_factors(norm, x, h, pair, other, channels, channels.is_interleaved)
    # A program takes every `shares`-th token, so that neighbours read neighbouring memory.
    for token in range(program // blocks, batch * length, shares):
        b = (token % batch).to(tl.int64)
        t = (token // batch).to(tl.int64) + tl.arange(0, 1)
        c, s, _ = load_tables(table, b, t, t < length, pair, narrow, channels.wide)
        p, q, rest = load_channels(
            rows_at(x, b, t, h), present, pair, other, keep, channels, channels.is_interleaved
        )
        gp, gq, gr = load_channels(
            rows_at(g, b, t, h), present, pair, other, keep, channels, channels.is_interleaved_out
        )
        gp, gq = rotated(gp, gq, c, negative(s))
        scale = norm_scale(p, q, rest, norm, x, channels)
        p, q, rest = p * scale, q * scale, rest * scale
        to_wp, to_wq = tl.fma(gp, p, to_wp), tl.fma(gq, q, to_wq)
        gp, gq = gp * wp, gq * wq
        if channels.rest > 0:
            to_wr = tl.fma(gr, rest, to_wr)
            gr = gr * wr
        pull = sum_products(gp, gq, gr, p, q, rest, channels.rest, norm.is_of_all_heads)
        pull = negative(pull / count)
        to = rows_at(dx, b, t, h)
        gp, gq = tl.fma(p, pull, gp) * scale, tl.fma(q, pull, gq) * scale
        store_pairs(to, present, pair, gp, gq, channels, channels.is_interleaved)
        if channels.rest > 0:
            back = (tl.fma(rest, pull, gr) * scale).to(dx.at.dtype.element_ty)
            tl.store(to + other, back, mask=keep)
    if norm.is_of_all_heads:
        mine = (partial + program * x.heads * norm.width + h * norm.width)[None, :, None]
    else:
        mine = partial + program * norm.width + tl.zeros((1, 1, 1), tl.int64)
        present = tl.full((1, 1, 1), True, tl.int1)
        keep = tl.arange(0, channels.block_rest)[None, None, :] < channels.rest
        to_wp, to_wq = tl.sum(to_wp, axis=1, keep_dims=True), tl.sum(to_wq, axis=1, keep_dims=True)
        to_wr = tl.sum(to_wr, axis=1, keep_dims=True)
    store_pairs(mine, present, pair, to_wp, to_wq, channels, channels.is_interleaved)
    if channels.rest > 0:
        tl.store(mine + other, to_wr.to(partial.dtype.element_ty), mask=keep)
