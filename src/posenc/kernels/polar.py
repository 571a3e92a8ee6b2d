"""PoPE and its gradient, as ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.sharding import is_sharded, replicate_like
from posenc._contract.tracing import is_recorded
from posenc.kernels import reference, reference_polar
from posenc.kernels.backends import kernel_for
from posenc.kernels.op import Op
from posenc.kernels.rotation import check_devices, check_rows, dense, has_dense_rows, refuse
from posenc.kernels.spec import Rows, shardable


def polar(x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows) -> Tensor:
    """PoPE of ``x`` in a new, contiguous tensor; see `reference_polar.polar`.

    Gradients reach ``x`` and ``delta``, and the tables too.
    """
    if is_sharded(x):
        cos, sin, rows = shardable(x, cos, sin, rows)
        return reference_polar.polar(x, replicate_like(x, delta), cos, sin, rows)
    if is_recorded(cos, sin):
        return reference_polar.polar(x, delta, cos, sin, rows)
    result: Tensor = polar_op(x, delta, cos, sin, rows.positions, rows.start)
    return result


def run(x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows) -> Tensor:
    """Run the kernel without autograd."""
    kernel = _kernel_for(x)
    if kernel is reference:
        return reference_polar.polar(x, delta, cos, sin, rows)
    y = torch.empty((*x.shape[:3], 2 * x.shape[3]), dtype=x.dtype, device=x.device)
    if y.numel():
        x = x if has_dense_rows(x) else dense(x)
        kernel.polar_into(x, y, _phases(kernel, delta, x), cos, sin, rows)
    return y


def run_backward(
    g: Tensor, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `polar` with respect to ``x`` and ``delta``; ``g`` is incoming."""
    kernel, dx = _kernel_for(x), torch.empty_like(x)
    if kernel is reference or x.numel() == 0:
        return reference_polar.polar_backward(g, x, delta, cos, sin, rows)
    g = g if has_dense_rows(g) else dense(g)
    usual = has_dense_rows(x, dx)
    made = dx if usual else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x if usual else dense(x)
    phases = _phases(kernel, delta, x)
    to_delta = kernel.polar_backward_into(g, x, made, phases, cos, sin, rows)
    return made if usual else dx.copy_(made), None if delta is None else to_delta.to(delta.dtype)


def _kernel_for(x: Tensor) -> Any:
    # Triton's softplus is not exact enough for float64.
    return reference if x.dtype is torch.float64 and not x.is_cpu else kernel_for(x)


def _phases(kernel: Any, delta: Tensor | None, x: Tensor) -> Any:
    return None if delta is None else kernel.phases_of(delta.detach().resolve_neg(), x)


def _rows_of(cos: Tensor, sin: Tensor, positions: Tensor | None, start: int) -> tuple[Any, ...]:
    if positions is not None and positions.dim() == 1:
        positions = positions[None]
    if cos.dim() == 3 and cos.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    return cos, sin, Rows(start, positions)


def _checked(who: str, x: Tensor, delta: Tensor | None, *how: Any) -> tuple[Any, ...]:
    """Refuse arguments with which a kernel would access memory out of bounds."""
    cos, sin, positions, start = how
    check_devices(who, x, delta, cos, sin, positions)
    if x.dim() != 4 or x.dtype not in checks.FLOAT_DTYPES:
        refuse(who, "x must be floating, (B, H, T, D)", x)
    _, heads, _, width = x.shape
    check_rows(who, x, cos, sin, positions, start)
    if cos.shape[-1] != width:
        refuse(who, f"cos and sin must have {width} columns", cos, sin)
    if delta is not None and (
        delta.shape != (heads, width) or delta.dtype not in checks.FLOAT_DTYPES
    ):
        refuse(who, f"delta must be floating, ({heads}, {width})", delta)
    return x, delta, *_rows_of(*how)


def _run(*arguments: Any) -> Tensor:
    return run(*_checked("posenc::polar", *arguments))


def _run_backward(g: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    who = "posenc::polar_backward"
    x, delta, *how = _checked(who, *arguments)
    if g.shape != (*x.shape[:3], 2 * x.shape[3]) or g.dtype != x.dtype or g.device != x.device:
        refuse(who, "the gradient must be that of the result", g, x)
    to_x, to_delta = run_backward(g, x, delta, *how)
    # An op cannot return None in place of a tensor.
    return to_x, x.new_empty(0) if to_delta is None else to_delta


def _fake(x: Tensor, *arguments: Any) -> Tensor:
    check_devices("posenc::polar", x, *arguments)
    return x.new_empty((*x.shape[:3], 2 * x.shape[3]))


def _fake_backward(g: Tensor, x: Tensor, delta: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    to_delta = x.new_empty(0) if delta is None else delta.new_empty(delta.shape)
    return torch.empty_like(x), to_delta


def _operations(x: Tensor, delta: Tensor | None, *how: Any) -> Tensor:
    return reference_polar.polar(x, delta, *_rows_of(*how))


def _backward_operations(g: Tensor, x: Tensor, delta: Tensor | None, *how: Any) -> Any:
    to_x, to_delta = reference_polar.polar_backward(g, x, delta, *_rows_of(*how))
    return to_x, x.new_empty(0) if to_delta is None else to_delta


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
