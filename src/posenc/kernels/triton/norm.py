"""RMSNorm and rotation in one pass, and the gradient of both in another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from posenc.kernels.spec import Norm, Rows, Spec, is_of_all_heads
from posenc.kernels.triton.launch import Launch, launch_for
from posenc.kernels.triton.pairs import (
    load_pairs,
    load_tables,
    negative,
    rotated,
    same_strides,
    shared_constants,
    store_pairs,
    table_numbers,
)
from posenc.kernels.triton.rotate import SHORT

# The most programs of the backward pass: they fill a large GPU, and their shares are soon summed.
_SHARES = 1056


def norm_into(x: Tensor, y: Tensor, weight: Tensor, *how: Any) -> None:
    """Normalise and rotate ``x`` into ``y``; both have dense rows."""
    if y.numel():
        _run_forward([x], [y], [weight], *how)


def norm_qk_into(
    xs: Sequence[Tensor], ys: Sequence[Tensor], weights: Sequence[Tensor], *how: Any
) -> None:
    """:func:`norm_into` of queries and keys: one launch if that takes longer than the kernel."""
    q, k = xs
    together = q.dtype == k.dtype and q.numel() and k.numel()
    if together and q.shape[0] * q.shape[2] <= SHORT:
        _run_forward(xs, ys, weights, *how)
    else:
        for x, y, weight in zip(xs, ys, weights, strict=True):
            norm_into(x, y, weight, *how)


def _run_forward(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    weights: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    spec: Spec,
    norm: Norm,
) -> None:
    """Launch the kernel on one tensor, or on queries and keys."""
    q, k, positions = xs[0], xs[-1], rows.positions
    cos, sin = same_strides(cos, sin)
    weights = [weight.resolve_neg().contiguous() for weight in weights]
    # Of one tensor, the last is the first.
    tensors = (q, k, ys[0], ys[-1], weights[0], weights[-1])
    given = (*tensors, cos, sin, q if positions is None else positions)

    def prepare() -> Launch:
        batch, _, length, width = q.shape
        blocks = [_heads(x, weight) for x, weight in zip(xs, weights, strict=True)]
        steps = [step for t in (q, k, ys[0], ys[-1]) for step in t.stride()[:3]]
        numbers = *steps, *table_numbers(cos, rows), batch, length
        constants = {
            # As arguments these would be float32.
            "EPS": norm.eps,
            "SHIFT": norm.shift,
            "Q_HEADS": q.shape[1],
            "K_HEADS": k.shape[1],
            "WIDTH": width,
            **shared_constants(q, cos, rows, spec),
            "Q_ALL": is_of_all_heads(weights[0], q),
            "K_ALL": is_of_all_heads(weights[-1], k),
            "Q_BLOCK": blocks[0],
            "K_BLOCK": blocks[-1],
        }
        # One program takes all heads of a token. Measured on an H200: benchmarks/README.md.
        warps = min(max(blocks[0] * width // 1024, 2), 8)
        grid = (batch * length, len(xs), 1)
        return Launch(_forward, grid, numbers, constants, num_warps=warps)

    described = ("norm", len(xs), positions is None, spec, norm.eps, norm.shift)
    launch_for(described, given, prepare)(given, rows.start)


def norm_backward_into(
    g: Tensor,
    x: Tensor,
    dx: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    spec: Spec,
    norm: Norm,
) -> Tensor:
    """Write the gradient of ``x`` into ``dx`` and return that of ``weight``; ``g`` is incoming."""
    if x.numel() == 0:
        return torch.zeros_like(weight)
    (batch, heads, length, width), block = x.shape, _heads(x, weight)
    blocks = triton.cdiv(heads, block)
    stride = min(batch * length, max(1, _SHARES // blocks))
    share_type = torch.promote_types(weight.dtype, torch.float32)
    shares = torch.empty((stride * blocks, weight.shape[0]), device=x.device, dtype=share_type)
    cos, sin = same_strides(cos, sin)
    positions = g if rows.positions is None else rows.positions
    given = (g, x, dx, shares, weight.resolve_neg().contiguous(), cos, sin, positions)

    def prepare() -> Launch:
        steps = *g.stride()[:3], *x.stride()[:3], *dx.stride()[:3], stride
        numbers = *steps, *table_numbers(cos, rows), batch, length
        constants = {
            # As arguments these would be float32.
            "EPS": norm.eps,
            "SHIFT": norm.shift,
            "HEADS": heads,
            "WIDTH": width,
            **shared_constants(x, cos, rows, spec),
            "ALL_HEADS": is_of_all_heads(weight, x),
            "BLOCK_H": block,
        }
        warps = 8 if block * width >= 4096 else 4
        return Launch(_backward, (stride * blocks, 1, 1), numbers, constants, num_warps=warps)

    described = ("norm_backward", rows.positions is None, spec, norm)
    launch_for(described, given, prepare)(given, rows.start)
    return shares.sum(0).to(weight.dtype).view_as(weight)


def _heads(x: Tensor, weight: Tensor) -> int:
    """Heads of one block: all for a norm over all heads, else as many as 1024 channels hold."""
    heads = int(triton.next_power_of_2(x.shape[1]))
    if is_of_all_heads(weight, x):
        return heads
    return min(heads, max(1, 1024 // int(triton.next_power_of_2(x.shape[3]))))


@triton.jit
def load_channels(
    row, present, at, other, keep,
    PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    IN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Load both channels of a token's pairs, and the channels that are not rotated."""
    a, b = load_pairs(row, present, at, FIRST, PAIRS, IN, WIDE)
    rest = a * 0
    if REST > 0:
        rest = tl.load(row + other, mask=keep, other=0.0).to(WIDE)
    return a, b, rest


@triton.jit
def norm_factors(
    weight, h, at, other,
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
    wp, wq, wr = load_channels(row, present, at, other, keep, PAIRS, FIRST, REST, IN, WIDE)
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
    HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
    ALL_HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One token of one tensor; ``x`` and ``y`` are pointers and their strides."""
    source, x_b, x_h, x_t = x
    target, y_b, y_h, y_t = y
    at = tl.arange(0, BLOCK_P)[None, None, :]
    other = (2 * PAIRS if FIRST == 0 else 0) + tl.arange(0, BLOCK_REST)[None, None, :]
    count: tl.constexpr = WIDTH * HEADS if ALL_HEADS else WIDTH
    c, s, _ = load_tables(
        table, b, t, t < length, at, at < PAIRS, HAS_POSITIONS, ADVANCES, TRANSPOSED, WIDE
    )
    # A norm over all heads needs them in one block. Otherwise blocks share the token's tables.
    wp, wq, wr = norm_factors(
        weight, tl.arange(0, BLOCK_H), at, other, SHIFT,
        WIDTH, PAIRS, FIRST, REST, IN, ALL_HEADS, WIDE, HEADS,
    )  # fmt: skip
    for block in tl.static_range((HEADS + BLOCK_H - 1) // BLOCK_H):
        h = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
        present = (h < HEADS)[None, :, None]
        keep = present & (tl.arange(0, BLOCK_REST)[None, None, :] < REST)
        x_at = source + (b * x_b + t[:, None] * x_t + h[None, :] * x_h)[:, :, None]
        y_at = target + (b * y_b + t[:, None] * y_t + h[None, :] * y_h)[:, :, None]
        p, q, rest = load_channels(x_at, present, at, other, keep, PAIRS, FIRST, REST, IN, WIDE)
        scale = tl.rsqrt(sum_products(p, q, rest, p, q, rest, REST, ALL_HEADS) / count + EPS).to(
            WIDE
        )
        p, q = rotated(p * scale * wp, q * scale * wq, c, s)
        store_pairs(y_at, present, at, p, q, FIRST, PAIRS, OUT)
        if REST > 0:
            tl.store(y_at + other, (rest * scale * wr).to(target.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["start"])
def _forward(
    q, k, q_out, k_out, q_weight, k_weight, cos, sin, positions, start,
    q_b, q_h, q_t, k_b, k_h, k_t, qo_b, qo_h, qo_t, ko_b, ko_h, ko_t,
    rows, table_b, table_t, positions_b, positions_t, batch, length,
    EPS: tl.constexpr, SHIFT: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
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
            EPS, SHIFT, Q_HEADS, WIDTH, PAIRS, FIRST, REST, HAS_POSITIONS, ADVANCES, IN, OUT,
            TRANSPOSED, WIDE, BLOCK_P, BLOCK_REST, Q_ALL, Q_BLOCK,
        )  # fmt: skip
    else:
        _normalise(
            (k, k_b, k_h, k_t), (k_out, ko_b, ko_h, ko_t), k_weight, table, b, t, length,
            EPS, SHIFT, K_HEADS, WIDTH, PAIRS, FIRST, REST, HAS_POSITIONS, ADVANCES, IN, OUT,
            TRANSPOSED, WIDE, BLOCK_P, BLOCK_REST, K_ALL, K_BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["start"])
def _backward(
    g, x, dx, partial, weight, cos, sin, positions, start,
    g_b, g_h, g_t, x_b, x_h, x_t, dx_b, dx_h, dx_t, shares,
    rows, table_b, table_t, positions_b, positions_t, batch, length,
    EPS: tl.constexpr, SHIFT: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
    ALL_HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    blocks = (HEADS + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    h = program % blocks * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64)
    at = tl.arange(0, BLOCK_P)[None, None, :]
    other = (2 * PAIRS if FIRST == 0 else 0) + tl.arange(0, BLOCK_REST)[None, None, :]
    present = (h < HEADS)[None, :, None]
    keep = present & (tl.arange(0, BLOCK_REST)[None, None, :] < REST)
    count = WIDTH * HEADS if ALL_HEADS else WIDTH
    table = cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start
    to_wp = tl.zeros((1, BLOCK_H, BLOCK_P), WIDE)
    to_wq = tl.zeros((1, BLOCK_H, BLOCK_P), WIDE)
    to_wr = tl.zeros((1, BLOCK_H, BLOCK_REST), WIDE)
    wp, wq, wr = norm_factors(
        weight, h, at, other, SHIFT, WIDTH, PAIRS, FIRST, REST, IN, ALL_HEADS, WIDE, HEADS
    )
    # A program takes every `shares`-th token, so that neighbours read neighbouring memory.
    for token in range(program // blocks, batch * length, shares):
        b = (token % batch).to(tl.int64)
        t = (token // batch).to(tl.int64) + tl.arange(0, 1)
        c, s, _ = load_tables(
            table, b, t, t < length, at, at < PAIRS, HAS_POSITIONS, ADVANCES, TRANSPOSED, WIDE
        )
        x_at = (b * x_b + t[:, None] * x_t + h[None, :] * x_h)[:, :, None]
        p, q, rest = load_channels(x + x_at, present, at, other, keep, PAIRS, FIRST, REST, IN, WIDE)
        g_at = (b * g_b + t[:, None] * g_t + h[None, :] * g_h)[:, :, None]
        gp, gq, gr = load_channels(
            g + g_at, present, at, other, keep, PAIRS, FIRST, REST, OUT, WIDE
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
        store_pairs(dx + dx_at, present, at, gp, gq, FIRST, PAIRS, IN)
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
    store_pairs(mine, present, at, to_wp, to_wq, FIRST, PAIRS, IN)
    if REST > 0:
        tl.store(mine + other, to_wr.to(partial.dtype.element_ty), mask=keep)
