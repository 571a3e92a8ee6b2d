"""PoPE in one pass, and its gradient in another."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from posenc.ops.plan import START, Constant, Operand, Plan, Target, cdiv, power_of_two
from posenc.ops.rotation.spec import rows_of
from posenc.ops.rotation.triton.norm import plan_sum
from posenc.ops.rotation.triton.pairs import (
    heads_of,
    index,
    load_tables,
    negative,
    rows_at,
    table_of,
    tables_in,
)

# The most programs of the backward pass, as in norm.py.
_SHARES = 1056
# exp(-a) and log1p(u), which softplus is made of, are polynomials that `tools/softplus` prints:
# Triton's own log1p does not run in its interpreter. Its exp2 is exact enough for half precision.
# Highest power first. For results in float32, computed in float64; then for half precision.
_EXP_64 = tl.constexpr((
    0.00019907569310848288, 0.0013948578326459795, 0.008333283538708528, 0.041666218319291945,
    0.16666666786308587, 0.5000000107729166, 0.999999999995509, 0.9999999999595618,
))  # fmt: skip
_LOG_64 = tl.constexpr((
    0.0011261745502929483, -0.008009632563823666, 0.02666285302885365, -0.056546791059659804,
    0.08907937721356587, -0.11697161413148038, 0.14084001010579714, -0.1663354003469392,
    0.19996719986775702, -0.24999829427637563, 0.3333332981138023, -0.4999999998780975,
))  # fmt: skip
_LOG_32 = tl.constexpr((
    -0.011684066983334834, 0.05476871895059311, -0.12181987872771625, 0.18663247910600975,
    -0.24796362119440318, 0.3332116616580786, -0.49999876948614136,
))  # fmt: skip


def plan_polar(call: Any, plan: Plan, target: Target) -> None:
    """Make PoPE of the tensor of a call. Not for float64."""
    (y,) = plan.results
    if y.numel():
        _launch(plan, _forward, (plan.with_dense_rows(call.x), y), call)


def plan_polar_backward(call: Any, plan: Plan, target: Target) -> None:
    """Make the gradients of the tensor and of the phases of a call. Not for float64."""
    to_x, to_delta = plan.results
    if not call.x.numel():
        plan.fill_with_zeros(to_delta)
        return
    g, x = plan.with_dense_rows(call.g), plan.with_dense_rows(call.x)
    written = to_x if to_x.has_dense_rows() else plan.empty(to_x.shape, to_x.dtype)
    batch, heads, length, width = x.shape
    blocks = cdiv(heads, _tile(x, call.delta is not None, backward=True)[0])
    programs = min(batch * length, max(1, _SHARES // blocks))
    shares = plan.empty((programs, heads, width), torch.float64)
    _launch(plan, _backward, (g, x, written, shares), call)
    if call.delta is not None:
        plan_sum(plan, shares, to_delta)
    if written is not to_x:
        plan.copy(to_x, written)


def _phases_in(plan: Plan, delta: Operand, x: Operand) -> Operand:
    """Cosines and sines of ``delta``, ``[2, H, D]``, in the dtype in which ``x`` is computed."""
    dtype = torch.float32 if x.element_size() == 2 else torch.float64
    phases = plan.empty((2, *delta.shape), dtype)
    numbers = *delta.stride(), delta.shape[1], delta.numel()
    grid = (cdiv(delta.numel(), 256),)
    plan.launch(_phases, grid, (delta, phases, *numbers), {"BLOCK": 256})
    return phases


def _tile(x: Operand, turned: bool, backward: bool) -> tuple[int, int]:
    """Heads of a block, which share a row of the tables, and warps; measured on an H200."""
    channels, warps = (1024, 4) if backward else (1024, 2)
    if turned and not backward:
        channels, warps = 512, 2 if x.dtype == torch.float32 else 1
    limit = max(1, channels // power_of_two(x.shape[3]))
    return min(limit, power_of_two(x.shape[1])), warps


def _launch(plan: Plan, kernel: Any, tensors: tuple[Operand, ...], call: Any) -> None:
    backward = kernel is _backward
    x, strided = tensors[1 if backward else 0], tensors[: 3 if backward else 2]
    batch, heads, length, width = x.shape
    cos, sin, rows = rows_of(*tables_in(plan, call, length), call.positions, START)
    phases = None if call.delta is None else _phases_in(plan, call.delta, x)
    block, warps = _tile(x, phases is not None, backward)
    places = () if rows.positions is None else (rows.positions,)
    constants = {
        "WIDTH": width,
        "WIDE": tl.float64 if x.dtype == torch.float32 else tl.float32,
        "INDEX": index(*tensors, cos, *places),
        "BLOCK_H": block,
        "BLOCK_D": power_of_two(width),
    }
    programs = tensors[3].shape[0] if backward else batch * length
    grid = programs, cdiv(heads, block)
    by = Constant(None) if phases is None else phases
    others = *tensors[len(strided) :], by, table_of(cos, sin, rows), batch, length
    arguments = *map(heads_of, strided), *others
    plan.launch(kernel, grid, arguments, constants, num_warps=warps)


@triton.jit
def _phases(delta, phases, delta_h, delta_d, width, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    present = i < count
    place = delta + i // width * delta_h + i % width * delta_d
    angle = tl.load(place, mask=present, other=0).to(tl.float64)
    element: tl.constexpr = phases.dtype.element_ty
    tl.store(phases + i, tl.cos(angle).to(element), mask=present)
    tl.store(phases + count + i, tl.sin(angle).to(element), mask=present)


@triton.jit
def _turned(c, s, phases, x, h, channel, mask, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Cosines and sines at angles that are larger by the phases of heads ``h``."""
    if phases is not None:
        where = phases + h[None, :, None] * WIDTH + channel
        pc = tl.load(where, mask=mask, other=0).to(WIDE)
        ps = tl.load(where + x.heads * WIDTH, mask=mask, other=0).to(WIDE)
        return tl.fma(c, pc, negative(s * ps)), tl.fma(s, pc, c * ps)
    else:
        return c, s


@triton.jit
def _filled(like, NUMBER: tl.constexpr):
    """A constant in the dtype of ``like``: Triton would round a Python float to float32."""
    return tl.full(like.shape, NUMBER, like.dtype)


@triton.jit
def _polynomial(x, NUMBERS: tl.constexpr, COUNT: tl.constexpr):
    p = _filled(x, NUMBERS[0])
    for i in tl.static_range(1, COUNT):
        p = tl.fma(p, x, _filled(x, NUMBERS[i]))
    return p


@triton.jit
def decay_of(x, WIDE: tl.constexpr):
    """``exp(-|x|)`` of a float32 in ``WIDE``; zero in float32 where ``|x|`` is large."""
    if tl.float64 == WIDE:
        a = tl.minimum(tl.abs(x), 150.0).to(tl.float64)
        # Near this number, floats are integers, and the lower bits of the sum are those of n.
        whole = _filled(a, 6755399441055744.0)
        shifted = tl.fma(a, _filled(a, 1.4426950408889634), whole)
        r = tl.fma(shifted - whole, _filled(a, 0.6931471805599453), a * -1)
        p = _polynomial(r, _EXP_64, 8).to(tl.int64, bitcast=True)
        return (p - (shifted.to(tl.int64, bitcast=True) << 52)).to(tl.float64, bitcast=True)
    else:
        # A GPU's exp2 has no subnormal results, a product has.
        root = tl.exp2(tl.abs(x) * -0.7213475204444817)
        return root * root


@triton.jit
def softplus(x, decay):
    """``max(x, 0) + log1p(decay)``, where ``decay`` is :func:`decay_of` ``x``."""
    wide: tl.constexpr = decay.dtype == tl.float64
    p = _polynomial(decay, _LOG_64, 12) if wide else _polynomial(decay, _LOG_32, 7)
    positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL).to(decay.dtype)
    return positive + tl.fma(decay * decay, p, decay)


@triton.jit
def softplus_slope(x, decay):
    """The derivative of softplus; NaN where ``x`` is."""
    one = _filled(decay, 1.0)
    return tl.where(x < 0, decay, tl.where(x >= 0, one, x.to(decay.dtype))) / (one + decay)


@triton.jit
def _forward(
    x, y, phases, table, batch, length,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    # Programs that run together share table rows.
    b = (program % batch).to(INDEX)
    t = (program // batch).to(INDEX) + tl.arange(0, 1)
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(INDEX)
    channel = tl.arange(0, BLOCK_D)[None, None, :]
    present = (h < x.heads)[None, :, None] & (channel < WIDTH)
    v = tl.load(rows_at(x, b, t, h) + channel, mask=present, other=0).to(tl.float32)
    c, s, _ = load_tables(table, b, t, t < length, channel, channel < WIDTH, WIDE)
    c, s = _turned(c, s, phases, x, h, channel, present, WIDTH, WIDE)
    size = softplus(v, decay_of(v, WIDE))
    to = rows_at(y, b, t, h) + channel
    element: tl.constexpr = y.at.dtype.element_ty
    tl.store(to, (size * c).to(element), mask=present)
    tl.store(to + WIDTH, (size * s).to(element), mask=present)


@triton.jit
def _backward(
    g, x, dx, shares, phases, table, batch, length,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(INDEX)
    channel = tl.arange(0, BLOCK_D)[None, None, :]
    present = (h < x.heads)[None, :, None] & (channel < WIDTH)
    total = tl.zeros((1, BLOCK_H, BLOCK_D), tl.float64)
    # A program takes every `programs`-th token, so that neighbours read neighbouring memory.
    for token in range(program, batch * length, programs):
        b = (token % batch).to(INDEX)
        t = (token // batch).to(INDEX) + tl.arange(0, 1)
        c, s, _ = load_tables(table, b, t, t < length, channel, channel < WIDTH, WIDE)
        c, s = _turned(c, s, phases, x, h, channel, present, WIDTH, WIDE)
        v = tl.load(rows_at(x, b, t, h) + channel, mask=present, other=0).to(tl.float32)
        above = rows_at(g, b, t, h) + channel
        p = tl.load(above, mask=present, other=0).to(WIDE)
        q = tl.load(above + WIDTH, mask=present, other=0).to(WIDE)
        decay = decay_of(v, WIDE)
        back = softplus_slope(v, decay) * tl.fma(p, c, q * s)
        to = rows_at(dx, b, t, h) + channel
        tl.store(to, back.to(dx.at.dtype.element_ty), mask=present)
        if phases is not None:
            total += (softplus(v, decay) * tl.fma(q, c, negative(p * s))).to(tl.float64)
    if phases is not None:
        mine = shares + (program * x.heads + h[None, :, None]) * WIDTH + channel
        tl.store(mine, total, mask=present)
