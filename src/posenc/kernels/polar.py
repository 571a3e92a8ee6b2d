"""PoPE: the choice of the kernel, its gradient, and the ops.

As in `dispatch.py`, a plain eager call runs its kernel directly, and torch.compile and dispatch
modes call the op. Everything else is torch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.sharding import is_sharded, replicate_like
from posenc._contract.tracing import in_forward_mode, in_transform, is_exporting, is_plain
from posenc.kernels import ops, reference, reference_polar
from posenc.kernels.dispatch import dense, has_dense_rows, kernel_for
from posenc.kernels.spec import Rows, shardable


def polar(x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows) -> Tensor:
    """PoPE of ``x`` in a new, contiguous tensor; see `reference_polar.polar`.

    Gradients reach ``x`` and ``delta``, and the tables too.
    """
    if is_sharded(x):
        cos, sin, rows = shardable(x, cos, sin, rows)
        return reference_polar.polar(x, replicate_like(x, delta), cos, sin, rows)
    learned = () if delta is None else (delta,)
    recorded = torch.is_grad_enabled()
    if in_forward_mode() or (recorded and (cos.requires_grad or sin.requires_grad)):
        return reference_polar.polar(x, delta, cos, sin, rows)
    if is_plain(x, cos, sin, *learned):
        if recorded and (x.requires_grad or (delta is not None and delta.requires_grad)):
            return _Polar.apply(x, delta, cos, sin, rows)  # type: ignore[no-any-return]
        return run(x, delta, cos, sin, rows)
    if in_transform(x) or is_exporting():
        return reference_polar.polar(x, delta, cos, sin, rows)
    result: Tensor = torch.ops.posenc.polar.default(x, delta, cos, sin, rows.positions, rows.start)
    return result


def run(x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows) -> Tensor:
    """Run the kernel without autograd."""
    kernel = _kernel_for(x)
    if kernel is reference:
        return reference_polar.polar(x, delta, cos, sin, rows)
    y = torch.empty((*x.shape[:3], 2 * x.shape[3]), dtype=x.dtype, device=x.device)
    if y.numel():
        x = x if has_dense_rows(x) else dense(x)
        kernel.polar_into(x, y, _phases(delta), cos, sin, rows)
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
    to_delta = kernel.polar_backward_into(g, x, made, _phases(delta), cos, sin, rows)
    return made if usual else dx.copy_(made), None if delta is None else to_delta.to(delta.dtype)


def _kernel_for(x: Tensor) -> Any:
    # Triton's softplus is not exact enough for float64.
    return reference if x.dtype is torch.float64 and not x.is_cpu else kernel_for(x)


def _phases(delta: Tensor | None) -> Tensor | None:
    return None if delta is None else reference_polar.phases_of(delta.detach().resolve_neg())


class _Polar(torch.autograd.Function):
    """PoPE and its gradient, each in one pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows
    ) -> Tensor:
        ctx.save_for_backward(x, delta, cos, sin, rows.positions)
        ctx.start = rows.start
        return run(x, delta, cos, sin, rows)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        *tensors, positions = ctx.saved_tensors
        # A gradient that is differentiated again, or batched, consists of torch operations.
        plain = is_plain(g) and not torch.is_grad_enabled() and not in_forward_mode()
        how = (g, *tensors, Rows(ctx.start, positions))
        found = run_backward(*how) if plain else reference_polar.polar_backward(*how)
        return *found, None, None, None


def _checked(who: str, x: Tensor, delta: Tensor | None, *how: Any) -> tuple[Any, ...]:
    """Refuse arguments with which a kernel would access memory out of bounds."""
    cos, sin, positions, start = how
    ops.check_devices(who, x, delta, cos, sin, positions)
    if x.dim() != 4 or x.dtype not in checks.FLOAT_DTYPES:
        ops.refuse(who, "x must be floating, (B, H, T, D)", x)
    batch, heads, _, width = x.shape
    if (
        cos.shape != sin.shape
        or not (cos.dim() == 2 or (cos.dim() == 3 and cos.shape[0] == batch))
        or cos.shape[-1] != width
        or not {cos.dtype, sin.dtype} <= checks.FLOAT_DTYPES
    ):
        ops.refuse(who, f"cos and sin must be floating, (R, {width}) or (B, R, {width})", cos, sin)
    if delta is not None and (
        delta.shape != (heads, width) or delta.dtype not in checks.FLOAT_DTYPES
    ):
        ops.refuse(who, f"delta must be floating, ({heads}, {width})", delta)
    ops.check_rows(who, x, cos.shape[-2], Rows(start, positions))
    return x, delta, cos, sin, Rows(start, positions)


def _op(*arguments: Any) -> Tensor:
    return run(*_checked("posenc::polar", *arguments))


def _op_backward(g: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    who = "posenc::polar_backward"
    x, delta, *how = _checked(who, *arguments)
    if g.shape != (*x.shape[:3], 2 * x.shape[3]) or g.dtype != x.dtype or g.device != x.device:
        ops.refuse(who, "the gradient must be that of the result", g, x)
    to_x, to_delta = run_backward(g, x, delta, *how)
    # An op cannot return None in place of a tensor.
    return to_x, x.new_empty(0) if to_delta is None else to_delta


def _fake(x: Tensor, *arguments: Any) -> Tensor:
    ops.check_devices("posenc::polar", x, *arguments)
    return x.new_empty((*x.shape[:3], 2 * x.shape[3]))


def _fake_backward(g: Tensor, x: Tensor, delta: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    to_delta = x.new_empty(0) if delta is None else delta.new_empty(delta.shape)
    return torch.empty_like(x), to_delta


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.start = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    _, delta, *_ = tensors = ctx.saved_tensors
    to_x, to_delta = torch.ops.posenc.polar_backward.default(g, *tensors, ctx.start)
    return to_x, None if delta is None else to_delta, None, None, None, None


_HOW = "Tensor x, Tensor? delta, Tensor cos, Tensor sin, Tensor? positions, SymInt start"
ops.define_op("polar", f"({_HOW}) -> Tensor", _op, _fake, _save, _backward)
ops.define_op(
    "polar_backward", f"(Tensor g, {_HOW}) -> (Tensor, Tensor)", _op_backward, _fake_backward
)
