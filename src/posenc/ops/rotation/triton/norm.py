"""RMSNorm and rotation in one pass, and the gradient of both in another."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from posenc.ops.plan import START, Operand, Plan, Target, strides
from posenc.ops.rotation.spec import Turn, heads_first, is_of_all_heads
from posenc.ops.rotation.triton.pairs import (
    load_pairs,
    load_tables,
    negative,
    rotated,
    shared_constants,
    store_pairs,
    table_numbers,
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
    (q, q_weight, q_out), (k, k_weight, k_out) = items[0], items[-1]
    cos, sin, rows, spec = turn
    batch, _, length, width = q.shape
    blocks = [_heads(x, weight) for x, weight, _ in items]
    # Of one tensor, the last is the first.
    positions = q if rows.positions is None else rows.positions
    arguments = (
        q, k, q_out, k_out, q_weight, k_weight, cos, sin, positions, START,
        *strides(q, k, q_out, k_out), *table_numbers(cos, rows), batch, length,
    )  # fmt: skip
    constants = {
        # As arguments these would be float32.
        "EPS": call.eps,
        "SHIFT": call.shift,
        "Q_HEADS": q.shape[1],
        "K_HEADS": k.shape[1],
        "WIDTH": width,
        **shared_constants(q, cos, rows, spec),
        "Q_ALL": is_of_all_heads(q_weight, q),
        "K_ALL": is_of_all_heads(k_weight, k),
        "Q_BLOCK": blocks[0],
        "K_BLOCK": blocks[-1],
    }
    # One program takes all heads of a token. Measured on an H200: benchmarks/README.md.
    warps = min(max(blocks[0] * width // 1024, 2), 8)
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
    blocks = triton.cdiv(heads, block)
    stride = min(batch * length, max(1, _SHARES // blocks))
    share_type = torch.promote_types(weight.dtype, torch.float32)
    count = weight.shape[0]
    shares = plan.empty((stride * blocks, count), share_type)
    positions = g if rows.positions is None else rows.positions
    arguments = (
        g, x, dx, shares, weight, cos, sin, positions, START,
        *strides(g, x, dx), stride, *table_numbers(cos, rows), batch, length,
    )  # fmt: skip
    constants = {
        # As arguments these would be float32.
        "EPS": call.eps,
        "SHIFT": call.shift,
        "HEADS": heads,
        "WIDTH": width,
        **shared_constants(x, cos, rows, spec),
        "ALL_HEADS": is_of_all_heads(weight, x),
        "BLOCK_H": block,
    }
    warps = 8 if block * width >= 4096 else 4
    plan.launch(_backward, (stride * blocks,), arguments, constants, num_warps=warps)
    plan_sum(plan, shares, to_weight)
    if written is not to_x:
        plan.copy(to_x, written)


def plan_sum(plan: Plan, shares: Operand, to: Operand) -> None:
    """Sum the rows of ``shares`` ``[n, ...]`` into ``to``, in order."""
    count = to.numel()
    grid = (triton.cdiv(count, 64),)
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
    heads = int(triton.next_power_of_2(x.shape[1]))
    if is_of_all_heads(weight, x):
        return heads
    return min(heads, max(1, 1024 // int(triton.next_power_of_2(x.shape[3]))))


@triton.jit
def load_channels(
    row, present, pair, other, keep,
    PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    IN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Load both channels of a token's pairs, and the channels that are not rotated."""
    a, b = load_pairs(row, present, pair, FIRST, PAIRS, IN, WIDE)
    rest = a * 0
    if REST > 0:
        rest = tl.load(row + other, mask=keep, other=0.0).to(WIDE)
    return a, b, rest


@triton.jit
def norm_factors(
    weight, h, pair, other,
    SHIFT: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr,
    REST: tl.constexpr, IN: tl.constexpr, ALL_HEADS: tl.constexpr, WIDE: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """The norm's factor of each channel, ``[1, H, P]``: the heads share it if not ``ALL_HEADS``.

    It is loaded for each head, so that each thread has the factors of its own channels.
    """
    h = h[None, :, None]
    row, present = weight + h * (WIDTH if ALL_HEADS else 0), h < HEADS
    keep = present & (other < WIDTH)
    wp, wq, wr = load_channels(row, present, pair, other, keep, PAIRS, FIRST, REST, IN, WIDE)
    if SHIFT != 0.0:
        wp, wq, wr = wp + SHIFT, wq + SHIFT, wr + SHIFT
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
def _normalise(
    x, y, weight, table, b, t, length,
    EPS: tl.constexpr, SHIFT: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    COLUMN: tl.constexpr, HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
    ALL_HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One token of one tensor; ``x`` and ``y`` are pointers and their strides."""
    source, x_b, x_h, x_t = x
    target, y_b, y_h, y_t = y
    pair = tl.arange(0, BLOCK_P)[None, None, :]
    other = (2 * PAIRS if FIRST == 0 else 0) + tl.arange(0, BLOCK_REST)[None, None, :]
    count: tl.constexpr = WIDTH * HEADS if ALL_HEADS else WIDTH
    c, s, _ = load_tables(
        table, b, t, t < length, pair, pair < PAIRS, COLUMN, HAS_POSITIONS, ADVANCES, TRANSPOSED,
        WIDE,
    )  # fmt: skip
    # A norm over all heads needs them in one block. Otherwise blocks share the token's tables.
    wp, wq, wr = norm_factors(
        weight, tl.arange(0, BLOCK_H), pair, other, SHIFT,
        WIDTH, PAIRS, FIRST, REST, IN, ALL_HEADS, WIDE, HEADS,
    )  # fmt: skip
    for block in tl.static_range((HEADS + BLOCK_H - 1) // BLOCK_H):
        h = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
        present = (h < HEADS)[None, :, None]
        keep = present & (tl.arange(0, BLOCK_REST)[None, None, :] < REST)
        x_at = source + (b * x_b + t[:, None] * x_t + h[None, :] * x_h)[:, :, None]
        y_at = target + (b * y_b + t[:, None] * y_t + h[None, :] * y_h)[:, :, None]
        p, q, rest = load_channels(x_at, present, pair, other, keep, PAIRS, FIRST, REST, IN, WIDE)
        scale = tl.rsqrt(sum_products(p, q, rest, p, q, rest, REST, ALL_HEADS) / count + EPS).to(
            WIDE
        )
        p, q = rotated(p * scale * wp, q * scale * wq, c, s)
        store_pairs(y_at, present, pair, p, q, FIRST, PAIRS, OUT)
        if REST > 0:
            tl.store(y_at + other, (rest * scale * wr).to(target.dtype.element_ty), mask=keep)


@triton.jit
def _forward(
    q, k, q_out, k_out, q_weight, k_weight, cos, sin, positions, start,
    q_b, q_h, q_t, k_b, k_h, k_t, qo_b, qo_h, qo_t, ko_b, ko_h, ko_t,
    rows, table_b, table_t, positions_b, positions_t, batch, length,
    EPS: tl.constexpr, SHIFT: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    COLUMN: tl.constexpr, HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
    Q_ALL: tl.constexpr, K_ALL: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """One token of the queries, or of the keys; of one tensor, the keys have no programs."""
    program = tl.program_id(0)
    b = (program % batch).to(tl.int64)
    t = (program // batch).to(tl.int64) + tl.arange(0, 1)
    table = cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start
    if tl.program_id(1) == 0:
        _normalise(
            (q, q_b, q_h, q_t), (q_out, qo_b, qo_h, qo_t), q_weight, table, b, t, length,
            EPS, SHIFT, Q_HEADS, WIDTH, PAIRS, FIRST, REST, COLUMN, HAS_POSITIONS, ADVANCES,
            IN, OUT, TRANSPOSED, WIDE, BLOCK_P, BLOCK_REST, Q_ALL, Q_BLOCK,
        )  # fmt: skip
    else:
        _normalise(
            (k, k_b, k_h, k_t), (k_out, ko_b, ko_h, ko_t), k_weight, table, b, t, length,
            EPS, SHIFT, K_HEADS, WIDTH, PAIRS, FIRST, REST, COLUMN, HAS_POSITIONS, ADVANCES,
            IN, OUT, TRANSPOSED, WIDE, BLOCK_P, BLOCK_REST, K_ALL, K_BLOCK,
        )  # fmt: skip


@triton.jit
def _backward(
    g, x, dx, partial, weight, cos, sin, positions, start,
    g_b, g_h, g_t, x_b, x_h, x_t, dx_b, dx_h, dx_t, shares,
    rows, table_b, table_t, positions_b, positions_t, batch, length,
    EPS: tl.constexpr, SHIFT: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    COLUMN: tl.constexpr, HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
    ALL_HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    blocks = (HEADS + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    h = program % blocks * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64)
    pair = tl.arange(0, BLOCK_P)[None, None, :]
    other = (2 * PAIRS if FIRST == 0 else 0) + tl.arange(0, BLOCK_REST)[None, None, :]
    present = (h < HEADS)[None, :, None]
    keep = present & (tl.arange(0, BLOCK_REST)[None, None, :] < REST)
    count = WIDTH * HEADS if ALL_HEADS else WIDTH
    table = cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start
    to_wp = tl.zeros((1, BLOCK_H, BLOCK_P), WIDE)
    to_wq = tl.zeros((1, BLOCK_H, BLOCK_P), WIDE)
    to_wr = tl.zeros((1, BLOCK_H, BLOCK_REST), WIDE)
    wp, wq, wr = norm_factors(
        weight, h, pair, other, SHIFT, WIDTH, PAIRS, FIRST, REST, IN, ALL_HEADS, WIDE, HEADS
    )
    # A program takes every `shares`-th token, so that neighbours read neighbouring memory.
    for token in range(program // blocks, batch * length, shares):
        b = (token % batch).to(tl.int64)
        t = (token // batch).to(tl.int64) + tl.arange(0, 1)
        c, s, _ = load_tables(
            table, b, t, t < length, pair, pair < PAIRS, COLUMN, HAS_POSITIONS, ADVANCES,
            TRANSPOSED, WIDE,
        )  # fmt: skip
        x_at = (b * x_b + t[:, None] * x_t + h[None, :] * x_h)[:, :, None]
        p, q, rest = load_channels(
            x + x_at, present, pair, other, keep, PAIRS, FIRST, REST, IN, WIDE
        )
        g_at = (b * g_b + t[:, None] * g_t + h[None, :] * g_h)[:, :, None]
        gp, gq, gr = load_channels(
            g + g_at, present, pair, other, keep, PAIRS, FIRST, REST, OUT, WIDE
        )
        gp, gq = rotated(gp, gq, c, negative(s))
        scale = tl.rsqrt(sum_products(p, q, rest, p, q, rest, REST, ALL_HEADS) / count + EPS).to(
            WIDE
        )
        p, q, rest = p * scale, q * scale, rest * scale
        to_wp, to_wq = tl.fma(gp, p, to_wp), tl.fma(gq, q, to_wq)
        gp, gq = gp * wp, gq * wq
        if REST > 0:
            to_wr = tl.fma(gr, rest, to_wr)
            gr = gr * wr
        pull = negative(sum_products(gp, gq, gr, p, q, rest, REST, ALL_HEADS) / count)
        dx_at = (b * dx_b + t[:, None] * dx_t + h[None, :] * dx_h)[:, :, None]
        gp, gq = tl.fma(p, pull, gp) * scale, tl.fma(q, pull, gq) * scale
        store_pairs(dx + dx_at, present, pair, gp, gq, FIRST, PAIRS, IN)
        if REST > 0:
            back = (tl.fma(rest, pull, gr) * scale).to(dx.dtype.element_ty)
            tl.store(dx + dx_at + other, back, mask=keep)
    if ALL_HEADS:
        mine = (partial + program * HEADS * WIDTH + h * WIDTH)[None, :, None]
    else:
        mine = partial + program * WIDTH + tl.zeros((1, 1, 1), tl.int64)
        present = tl.full((1, 1, 1), True, tl.int1)
        keep = tl.arange(0, BLOCK_REST)[None, None, :] < REST
        to_wp, to_wq = tl.sum(to_wp, axis=1, keep_dims=True), tl.sum(to_wq, axis=1, keep_dims=True)
        to_wr = tl.sum(to_wr, axis=1, keep_dims=True)
    store_pairs(mine, present, pair, to_wp, to_wq, FIRST, PAIRS, IN)
    if REST > 0:
        tl.store(mine + other, to_wr.to(partial.dtype.element_ty), mask=keep)
