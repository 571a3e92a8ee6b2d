"""PoPE and its gradient, as ops."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posenc._contract import checks
from posenc._contract.sharding import is_sharded, replicate_like
from posenc._contract.tracing import is_recorded
from posenc.kernels import reference
from posenc.kernels.backends import kernel_for
from posenc.kernels.op import Op
from posenc.kernels.reference import take, wider_dtype
from posenc.kernels.rotation import (
    check_devices,
    check_rows,
    on_dense_rows,
    refuse,
    with_dense_rows,
)
from posenc.kernels.spec import Rows, shardable, unflatten_rows

_WHO = "posenc::polar"
# From here on softplus(x) is x, in float64 too; torch's own threshold, 20, is off by 2e-9.
_LINEAR = 37.0


def polar(x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows) -> Tensor:
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


def by_operations(x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows) -> Tensor:
    """:func:`polar` in plain torch operations."""
    wide = x.to(wider_dtype(x))
    c, s = _turned(wide, delta, cos, sin, rows)
    size = F.softplus(wide, threshold=_LINEAR)
    return torch.cat((size * c, size * s), dim=-1).to(x.dtype)


def backward_by_operations(
    g: Tensor, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows
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
    wide: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the tokens of ``wide``, in its dtype, at angles larger by ``delta``."""
    c, s = (take(table, rows, wide.shape[2]).to(wide.dtype) for table in (cos, sin))
    if delta is None:
        return c, s
    phase = delta[:, None].to(torch.float32 if delta.device.type == "mps" else torch.float64)
    pc, ps = phase.cos().to(wide.dtype), phase.sin().to(wide.dtype)
    return c * pc - s * ps, s * pc + c * ps


def _kernel_for(x: Tensor) -> Any:
    # Triton's softplus is not exact enough for float64.
    return reference if x.dtype is torch.float64 or x.numel() == 0 else kernel_for(x)


def _phases(kernel: Any, delta: Tensor | None, x: Tensor) -> Any:
    return None if delta is None else kernel.phases_of(delta.detach().resolve_neg(), x)


def _checked(x: Tensor, delta: Tensor | None, *how: Any) -> tuple[Any, ...]:
    """Refuse arguments with which a kernel would access memory out of bounds."""
    cos, sin, positions, start = how
    check_devices(_WHO, x, delta, cos, sin, positions)
    if x.dim() != 4 or x.dtype not in checks.FLOAT_DTYPES:
        refuse(_WHO, "x must be floating, (B, H, T, D)", x)
    _, heads, _, width = x.shape
    check_rows(x, cos, sin, positions, start)
    if cos.shape[-1] != width:
        refuse(_WHO, f"cos and sin must have {width} columns", cos, sin)
    if delta is not None and (
        delta.shape != (heads, width) or delta.dtype not in checks.FLOAT_DTYPES
    ):
        refuse(_WHO, f"delta must be floating, ({heads}, {width})", delta)
    return unflatten_rows((x, delta, *how))


def _run(*arguments: Any) -> Tensor:
    x, delta, cos, sin, rows = _checked(*arguments)
    kernel = _kernel_for(x)
    if kernel is reference:
        return by_operations(x, delta, cos, sin, rows)
    y = torch.empty((*x.shape[:3], 2 * x.shape[3]), dtype=x.dtype, device=x.device)
    x = with_dense_rows(x)
    kernel.polar_into(x, y, _phases(kernel, delta, x), cos, sin, rows)
    return y


def _run_backward(g: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    x, delta, cos, sin, rows = _checked(*arguments)
    if g.shape != (*x.shape[:3], 2 * x.shape[3]) or g.dtype != x.dtype or g.device != x.device:
        refuse(_WHO, "the gradient must be that of the result", g, x)
    kernel = _kernel_for(x)
    if kernel is reference:
        return backward_by_operations(g, x, delta, cos, sin, rows)
    g, phases = with_dense_rows(g), _phases(kernel, delta, x)

    def run(x: Tensor, dx: Tensor) -> Any:
        return kernel.polar_backward_into(g, x, dx, phases, cos, sin, rows)

    dx, to_delta = on_dense_rows(x, run)
    return dx, x.new_empty(0) if delta is None else to_delta.to(delta.dtype)


def _fake(x: Tensor, *arguments: Any) -> Tensor:
    check_devices(_WHO, x, *arguments)
    return x.new_empty((*x.shape[:3], 2 * x.shape[3]))


def _fake_backward(g: Tensor, x: Tensor, delta: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    to_delta = x.new_empty(0) if delta is None else delta.new_empty(delta.shape)
    return torch.empty_like(x), to_delta


def _operations(*arguments: Any) -> Tensor:
    return by_operations(*unflatten_rows(arguments))


def _backward_operations(*arguments: Any) -> Any:
    return backward_by_operations(*unflatten_rows(arguments))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.start = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    _, delta, *_ = tensors = ctx.saved_tensors
    # A gradient that is differentiated again consists of torch operations.
    op = _backward_operations if torch.is_grad_enabled() else polar_backward_op
    to_x, to_delta = op(g, *tensors, ctx.start)
    return to_x, None if delta is None else to_delta, None, None, None, None


_HOW = "Tensor x, Tensor? delta, Tensor cos, Tensor sin, Tensor? positions, SymInt start"
polar_op = Op(
    "polar",
    f"({_HOW}) -> Tensor",
    _run,
    _operations,
    _fake,
    save=_save,
    backward=_backward,
    repeats=True,
)
polar_backward_op = Op(
    "polar_backward",
    f"(Tensor g, {_HOW}) -> (Tensor, Tensor)",
    _run_backward,
    _backward_operations,
    _fake_backward,
    repeats=True,
)
