"""PoPE in one pass, and its gradient in another."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from posenc.kernels.spec import Rows
from posenc.kernels.triton.launch import Launch, launch_for
from posenc.kernels.triton.pairs import index, load_tables, negative, table_numbers
from posenc.kernels.triton.softplus import decay_of, softplus, softplus_slope

# Channels of one block, and the most programs of the backward pass, as in norm.py.
_BLOCK = 1024
_SHARES = 1056


def polar_into(x: Tensor, y: Tensor, phases: Tensor | None, *how: Any) -> None:
    """Write PoPE of ``x`` into ``y``; see `c.polar_into`. Not for float64."""
    _run(_forward, (x, y), phases, *how)


def polar_backward_into(
    g: Tensor, x: Tensor, dx: Tensor, phases: Tensor | None, *how: Any
) -> Tensor | None:
    """Write the gradient of ``x`` into ``dx`` and return that of the phases."""
    batch, heads, length, width = x.shape
    programs = min(batch * length, max(1, _SHARES // triton.cdiv(heads, _tile(x, one=True)[0])))
    shares = torch.empty((programs, heads, width), device=x.device, dtype=torch.float64)
    _run(_backward, (g, x, dx, shares), phases, *how)
    return None if phases is None else shares.sum(0)


def _run(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    phases: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
) -> None:
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    positions, turned = rows.positions, phases is not None
    given = (*tensors, cos if phases is None else phases, cos, sin)
    given = (*given, tensors[0] if positions is None else positions)
    described = ("polar", kernel.__name__, turned, positions is None)
    prepare = partial(_launch, kernel, tensors, turned, cos, rows)
    launch_for(described, given, prepare)(given, rows.start)


def _tile(x: Tensor, *, one: bool) -> tuple[int, int]:
    """Heads and tokens of a block, in the order of memory; with ``one``, a single token."""
    _, heads, length, width = x.shape
    most = max(1, _BLOCK // int(triton.next_power_of_2(width)))
    if not one and x.stride(1) > x.stride(2):
        return 1, min(most, int(triton.next_power_of_2(length)))
    return min(most, int(triton.next_power_of_2(heads))), 1


def _launch(
    kernel: Any, tensors: tuple[Tensor, ...], turned: bool, cos: Tensor, rows: Rows
) -> Launch:
    backward = kernel is _backward
    x = tensors[1 if backward else 0]
    batch, heads, length, width = x.shape
    block_h, block_t = _tile(x, one=backward)
    blocks = triton.cdiv(heads, block_h)
    strides = [stride for t in tensors[: 3 if backward else 2] for stride in t.stride()[:3]]
    numbers = (*strides, *table_numbers(cos, rows), batch, length)
    used = [*tensors, cos] if rows.positions is None else [*tensors, cos, rows.positions]
    constants = {
        "HEADS": heads,
        "WIDTH": width,
        "HAS_POSITIONS": rows.positions is not None,
        "ADVANCES": rows.is_sequential(),
        "TURNED": turned,
        "WIDE": tl.float64 if x.dtype == torch.float32 else tl.float32,
        "INDEX": index(*used),
        "BLOCK_H": block_h,
        "BLOCK_T": block_t,
        "BLOCK_D": triton.next_power_of_2(width),
    }
    steps = tensors[3].shape[0] if backward else batch * triton.cdiv(length, block_t)
    return Launch(kernel, (steps, blocks, 1), numbers, constants, num_warps=4)


@triton.jit
def _turned(
    c, s, phases, h, at, mask,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Cosines and sines at angles that are larger by the phases of heads ``h``."""
    if TURNED:
        where = phases + h[None, :, None] * WIDTH + at
        pc = tl.load(where, mask=mask, other=0).to(WIDE)
        ps = tl.load(where + HEADS * WIDTH, mask=mask, other=0).to(WIDE)
        return tl.fma(c, pc, negative(s * ps)), tl.fma(s, pc, c * ps)
    else:
        return c, s


@triton.jit(do_not_specialize=["start"])
def _forward(
    x, y, phases, cos, sin, positions, start,
    x_b, x_h, x_t, y_b, y_h, y_t,
    rows, table_b, table_t, positions_b, positions_t, batch, length,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr,
    TURNED: tl.constexpr, WIDE: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    # Programs that run together share table rows.
    b = (program % batch).to(INDEX)
    t = (program // batch).to(INDEX) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(INDEX)
    at = tl.arange(0, BLOCK_D)[None, None, :]
    alive, present = t < length, (h < HEADS)[None, :, None] & (at < WIDTH)
    mask = alive[:, None, None] & present
    x_at = (b * x_b + t[:, None] * x_t + h[None, :] * x_h)[:, :, None]
    v = tl.load(x + x_at + at, mask=mask, other=0).to(WIDE)
    table = cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start
    c, s, _ = load_tables(table, b, t, alive, at, at < WIDTH, HAS_POSITIONS, ADVANCES, False, WIDE)
    c, s = _turned(c, s, phases, h, at, present, HEADS, WIDTH, TURNED, WIDE)
    size = softplus(v, decay_of(v))
    to = y + (b * y_b + t[:, None] * y_t + h[None, :] * y_h)[:, :, None] + at
    element: tl.constexpr = y.dtype.element_ty
    tl.store(to, (size * c).to(element), mask=mask)
    tl.store(to + WIDTH, (size * s).to(element), mask=mask)


@triton.jit(do_not_specialize=["start"])
def _backward(
    g, x, dx, shares, phases, cos, sin, positions, start,
    g_b, g_h, g_t, x_b, x_h, x_t, dx_b, dx_h, dx_t,
    rows, table_b, table_t, positions_b, positions_t, batch, length,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr,
    TURNED: tl.constexpr, WIDE: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(INDEX)
    at = tl.arange(0, BLOCK_D)[None, None, :]
    present = (h < HEADS)[None, :, None] & (at < WIDTH)
    table = cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start
    total = tl.zeros((1, BLOCK_H, BLOCK_D), tl.float64)
    # A program takes every `programs`-th token, so that neighbours read neighbouring memory.
    for token in range(program, batch * length, programs):
        b = (token % batch).to(INDEX)
        t = (token // batch).to(INDEX) + tl.arange(0, 1)
        c, s, _ = load_tables(
            table, b, t, t < length, at, at < WIDTH, HAS_POSITIONS, ADVANCES, False, WIDE
        )
        c, s = _turned(c, s, phases, h, at, present, HEADS, WIDTH, TURNED, WIDE)
        x_at = (b * x_b + t[:, None] * x_t + h[None, :] * x_h)[:, :, None]
        v = tl.load(x + x_at + at, mask=present, other=0).to(WIDE)
        g_at = g + (b * g_b + t[:, None] * g_t + h[None, :] * g_h)[:, :, None] + at
        p = tl.load(g_at, mask=present, other=0).to(WIDE)
        q = tl.load(g_at + WIDTH, mask=present, other=0).to(WIDE)
        decay = decay_of(v)
        back = softplus_slope(v, decay) * tl.fma(p, c, q * s)
        to = dx + (b * dx_b + t[:, None] * dx_t + h[None, :] * dx_h)[:, :, None] + at
        tl.store(to, back.to(dx.dtype.element_ty), mask=present)
        if TURNED:
            total += (softplus(v, decay) * tl.fma(q, c, negative(p * s))).to(tl.float64)
    if TURNED:
        mine = shares + (program * HEADS + h[None, :, None]) * WIDTH + at
        tl.store(mine, total, mask=present)
