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

# The most programs of the backward pass, as in norm.py.
_SHARES = 1056


def phases_of(delta: Tensor, x: Tensor) -> Tensor:
    """Cosines and sines of ``delta``, ``[2, H, D]``, in the dtype in which ``x`` is computed."""
    dtype = torch.float32 if x.element_size() == 2 else torch.float64
    phases = torch.empty((2, *delta.shape), device=x.device, dtype=dtype)

    def prepare() -> Launch:
        numbers = (*delta.stride(), delta.shape[1], delta.numel())
        grid = (triton.cdiv(delta.numel(), 256), 1, 1)
        return Launch(_phases, grid, numbers, {"BLOCK": 256})

    launch_for(("phases",), (delta, phases), prepare)((delta, phases), 0)
    return phases


def polar_into(x: Tensor, y: Tensor, phases: Tensor | None, *how: Any) -> None:
    """Write PoPE of ``x`` into ``y``, with the phases of :func:`phases_of`. Not for float64."""
    _run(_forward, (x, y), phases, *how)


def polar_backward_into(
    g: Tensor, x: Tensor, dx: Tensor, phases: Tensor | None, *how: Any
) -> Tensor | None:
    """Write the gradient of ``x`` into ``dx`` and return that of the phases."""
    batch, heads, length, width = x.shape
    blocks = triton.cdiv(heads, _tile(x, phases is not None, backward=True)[0])
    programs = min(batch * length, max(1, _SHARES // blocks))
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


def _tile(x: Tensor, turned: bool, backward: bool) -> tuple[int, int]:
    """Heads of a block, which share a row of the tables, and warps; measured on an H200."""
    channels, warps = (1024, 4) if backward else (1024, 2)
    if turned and not backward:
        channels, warps = 512, 2 if x.dtype == torch.float32 else 1
    most = max(1, channels // int(triton.next_power_of_2(x.shape[3])))
    return min(most, int(triton.next_power_of_2(x.shape[1]))), warps


def _launch(
    kernel: Any, tensors: tuple[Tensor, ...], turned: bool, cos: Tensor, rows: Rows
) -> Launch:
    backward = kernel is _backward
    x = tensors[1 if backward else 0]
    batch, heads, length, width = x.shape
    block, warps = _tile(x, turned, backward)
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
        "BLOCK_H": block,
        "BLOCK_D": triton.next_power_of_2(width),
    }
    programs = tensors[3].shape[0] if backward else batch * length
    grid = (programs, triton.cdiv(heads, block), 1)
    return Launch(kernel, grid, numbers, constants, num_warps=warps)


@triton.jit(do_not_specialize=["start"])
def _phases(delta, phases, start, delta_h, delta_d, width, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    present = i < count
    at = delta + i // width * delta_h + i % width * delta_d
    angle = tl.load(at, mask=present, other=0).to(tl.float64)
    element: tl.constexpr = phases.dtype.element_ty
    tl.store(phases + i, tl.cos(angle).to(element), mask=present)
    tl.store(phases + count + i, tl.sin(angle).to(element), mask=present)


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
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    # Programs that run together share table rows.
    b = (program % batch).to(INDEX)
    t = (program // batch).to(INDEX) + tl.arange(0, 1)
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(INDEX)
    at = tl.arange(0, BLOCK_D)[None, None, :]
    present = (h < HEADS)[None, :, None] & (at < WIDTH)
    x_at = (b * x_b + t[:, None] * x_t + h[None, :] * x_h)[:, :, None]
    v = tl.load(x + x_at + at, mask=present, other=0).to(tl.float32)
    table = cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start
    c, s, _ = load_tables(
        table, b, t, t < length, at, at < WIDTH, HAS_POSITIONS, ADVANCES, False, WIDE
    )
    c, s = _turned(c, s, phases, h, at, present, HEADS, WIDTH, TURNED, WIDE)
    size = softplus(v, decay_of(v, WIDE))
    to = y + (b * y_b + t[:, None] * y_t + h[None, :] * y_h)[:, :, None] + at
    element: tl.constexpr = y.dtype.element_ty
    tl.store(to, (size * c).to(element), mask=present)
    tl.store(to + WIDTH, (size * s).to(element), mask=present)


@triton.jit(do_not_specialize=["start"])
def _backward(
    g, x, dx, shares, phases, cos, sin, positions, start,
    g_b, g_h, g_t, x_b, x_h, x_t, dx_b, dx_h, dx_t,
    rows, table_b, table_t, positions_b, positions_t, batch, length,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr,
    TURNED: tl.constexpr, WIDE: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
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
        v = tl.load(x + x_at + at, mask=present, other=0).to(tl.float32)
        g_at = g + (b * g_b + t[:, None] * g_t + h[None, :] * g_h)[:, :, None] + at
        p = tl.load(g_at, mask=present, other=0).to(WIDE)
        q = tl.load(g_at + WIDTH, mask=present, other=0).to(WIDE)
        decay = decay_of(v, WIDE)
        back = softplus_slope(v, decay) * tl.fma(p, c, q * s)
        to = dx + (b * dx_b + t[:, None] * dx_t + h[None, :] * dx_h)[:, :, None] + at
        tl.store(to, back.to(dx.dtype.element_ty), mask=present)
        if TURNED:
            total += (softplus(v, decay) * tl.fma(q, c, negative(p * s))).to(tl.float64)
    if TURNED:
        mine = shares + (program * HEADS + h[None, :, None]) * WIDTH + at
        tl.store(mine, total, mask=present)
