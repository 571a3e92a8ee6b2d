"""PoPE and its gradient, as ops."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from posenc._contract import checks
from posenc._contract.sharding import is_sharded, replicate_like
from posenc._contract.tracing import is_recorded
from posenc.ops.op import Op, Start
from posenc.ops.plan import Plan, Target
from posenc.ops.rotation.reference import take, wider_dtype
from posenc.ops.rotation.rotation import (
    check_devices,
    check_rows,
    check_start,
    refuse,
    strided_like,
)
from posenc.ops.rotation.spec import TableRows, rows_of, shardable

_WHO = "posenc::polar"
# From here on softplus(x) is x, in float64 too; torch's own threshold, 20, is off by 2e-9.
_LINEAR = 37.0


def polar(x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: TableRows) -> Tensor:
    r"""Each channel as a vector of length softplus(x), at the angle of its position.

    .. math:: x \mapsto (\mu \cos(\phi + \delta),\; \mu \sin(\phi + \delta)),
              \qquad \mu = \ln(1 + e^x)

    ``x`` is ``[B, H, T, D]``; ``cos`` and ``sin`` are ``[R, D]`` or ``[B, R, D]``, and ``delta`` is
    ``[H, D]``, or None for zero. The result is ``[B, H, T, 2 D]``, contiguous, all cosines before
    all sines. All is computed in float64 for float32, and in float32 for half precision, and
    rounded once. Gradients reach ``x`` and ``delta``, and the tables too.
    """
    if is_sharded(x):
        cos, sin, rows = shardable(x, cos, sin, rows)
        return by_operations(x, replicate_like(x, delta), cos, sin, rows)
    if is_recorded(cos, sin):
        return by_operations(x, delta, cos, sin, rows)
    result: Tensor = polar_op(x, delta, cos, sin, rows.positions, rows.start)
    return result


def by_operations(
    x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: TableRows
) -> Tensor:
    """:func:`polar` in plain torch operations."""
    wide = x.to(wider_dtype(x))
    c, s = _turned(wide, delta, cos, sin, rows)
    size = F.softplus(wide, threshold=_LINEAR)
    return torch.cat((size * c, size * s), dim=-1).to(x.dtype)


def backward_by_operations(
    g: Tensor, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: TableRows
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`polar` with respect to ``x`` and ``delta``; ``g`` is incoming.

    Without ``delta`` the second is empty: an op cannot return None in place of a tensor.
    """
    wide = x.to(wider_dtype(x))
    c, s = _turned(wide, delta, cos, sin, rows)
    a, b = g.to(wide.dtype).tensor_split(2, dim=-1)
    to_x = (wide.sigmoid() * (a * c + b * s)).to(x.dtype)
    if delta is None:
        return to_x, x.new_empty(0)
    size = F.softplus(wide, threshold=_LINEAR)
    return to_x, (size * (b * c - a * s)).sum((0, 2)).to(delta.dtype)


def _turned(
    wide: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: TableRows
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the tokens of ``wide``, in its dtype, at angles larger by ``delta``."""
    c, s = (take(table, rows, wide.shape[2]).to(wide.dtype) for table in (cos, sin))
    if delta is None:
        return c, s
    phase = delta[:, None].to(torch.float32 if delta.device.type == "mps" else torch.float64)
    pc, ps = phase.cos().to(wide.dtype), phase.sin().to(wide.dtype)
    return c * pc - s * ps, s * pc + c * ps


class PolarCall(NamedTuple):
    """PoPE of one tensor."""

    x: Tensor
    delta: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    start: Start


class PolarBackwardCall(NamedTuple):
    """The gradients of :class:`PolarCall` for its tensor and its phases."""

    g: Tensor
    x: Tensor
    delta: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    start: Start


def _check(call: PolarCall | PolarBackwardCall) -> None:
    """Refuse a call with which a kernel would access memory out of bounds, but for its start."""
    x, delta, cos, sin = call.x, call.delta, call.cos, call.sin
    check_devices(_WHO, *call)
    if x.dim() != 4 or x.dtype not in checks.FLOAT_DTYPES:
        refuse(_WHO, "x must be floating, (B, H, T, D)", x)
    _, heads, _, width = x.shape
    check_rows(x, cos, sin, call.positions)
    if cos.shape[-1] != width:
        refuse(_WHO, f"cos and sin must have {width} columns", cos, sin)
    if delta is not None and (
        delta.shape != (heads, width) or delta.dtype not in checks.FLOAT_DTYPES
    ):
        refuse(_WHO, f"delta must be floating, ({heads}, {width})", delta)
    if isinstance(call, PolarBackwardCall):
        g = call.g
        if g.shape != (*x.shape[:3], 2 * width) or g.dtype != x.dtype:
            refuse(_WHO, "the gradient must be that of the result", g, x)


def _check_here(call: PolarCall | PolarBackwardCall) -> None:
    _check(call)
    check_start(call.start, call.cos.shape[-2], call.x.shape[2], call.positions)


def _operations(call: PolarCall) -> tuple[Tensor, ...]:
    rows = rows_of(call.cos, call.sin, call.positions, call.start)
    return (by_operations(call.x, call.delta, *rows),)


def _backward_operations(call: PolarBackwardCall) -> tuple[Tensor, ...]:
    rows = rows_of(call.cos, call.sin, call.positions, call.start)
    return backward_by_operations(call.g, call.x, call.delta, *rows)


def _run(call: PolarCall) -> tuple[Tensor, ...]:
    _check_here(call)
    return _operations(call)


def _run_backward(call: PolarBackwardCall) -> tuple[Tensor, ...]:
    _check_here(call)
    to_x, to_delta = _backward_operations(call)
    return strided_like(to_x, call.x), to_delta


def _plan(call: PolarCall, plan: Plan, target: Target) -> None:
    from posenc.ops.rotation.triton import polar as kernels

    _check(call)
    kernels.plan_polar(call, plan, target)


def _plan_backward(call: PolarBackwardCall, plan: Plan, target: Target) -> None:
    from posenc.ops.rotation.triton import polar as kernels

    _check(call)
    kernels.plan_polar_backward(call, plan, target)


def _results(call: PolarCall) -> tuple[Tensor, ...]:
    check_devices(_WHO, *call)
    return (call.x.new_empty((*call.x.shape[:3], 2 * call.x.shape[3])),)


def _results_backward(call: PolarBackwardCall) -> tuple[Tensor, ...]:
    x, delta = call.x, call.delta
    to_delta = x.new_empty(0) if delta is None else delta.new_empty(delta.shape)
    return torch.empty_like(x), to_delta


def _save(ctx: Any, call: PolarCall, results: tuple[Tensor, ...]) -> None:
    ctx.start = call.start
    ctx.save_for_backward(call.x, call.delta, call.cos, call.sin, call.positions)


def _backward(ctx: Any, g: Tensor) -> dict[str, Tensor | None]:
    x, delta, cos, sin, positions = ctx.saved_tensors
    call = PolarBackwardCall(g, x, delta, cos, sin, positions, ctx.start)
    # A gradient that is differentiated again consists of torch operations.
    again = torch.is_grad_enabled()
    to_x, to_delta = _backward_operations(call) if again else polar_backward_op.quick(*call)
    return {"x": to_x, "delta": None if delta is None else to_delta}


def _has_kernel(call: PolarCall | PolarBackwardCall) -> bool:
    # Triton's softplus is not exact enough for float64.
    return call.x.dtype is not torch.float64


polar_op = Op(
    "polar",
    PolarCall,
    _results,
    1,
    _run,
    _operations,
    plan=_plan,
    has_plan=_has_kernel,
    save=_save,
    backward=_backward,
)
polar_backward_op = Op(
    "polar_backward",
    PolarBackwardCall,
    _results_backward,
    2,
    _run_backward,
    _backward_operations,
    plan=_plan_backward,
    has_plan=_has_kernel,
)
