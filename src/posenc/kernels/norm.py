"""RMSNorm of queries and keys, fused with their rotation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from posenc._contract import checks
from posenc._contract.sharding import is_sharded, replicate_like
from posenc._contract.tracing import in_transform, is_exporting, is_plain
from posenc.kernels import c, ops, reference, triton
from posenc.kernels.ops import LIBRARY
from posenc.kernels.sharded import shardable
from posenc.kernels.spec import Norm, Rows, Spec

_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor cos, Tensor sin, Tensor? positions, SymInt start, "
    "bool interleaved, bool interleaved_out, SymInt column, bool transposed, "
    "float eps, float shift, bool whole"
)
LIBRARY.define(f"norm_rotate({_ARGUMENTS}) -> Tensor")
LIBRARY.define(f"norm_rotate_backward(Tensor g, {_ARGUMENTS}) -> (Tensor, Tensor)")
_forward = torch.ops.posenc.norm_rotate.default
_backward = torch.ops.posenc.norm_rotate_backward.default


def norm_rotate(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec, norm: Norm
) -> Tensor:
    """Normalise and rotate ``x`` of ``[B, H, T, D]`` into a new tensor.

    One pass over memory where Triton or C run, and one for the gradient; a compiler on the CPU is
    given torch's operations, which it fuses.

    Args:
        x: ``[B, H, T, D]``.
        weight: ``[D]``, or ``[H * D]`` for a norm over all heads.
        cos: ``[R, P]`` or ``[B, R, P]``.
        sin: As ``cos``.
        rows: Which table row each token takes.
        spec: Which channels form pairs, and which way they spec.
        norm: What kind of RMSNorm.
    """
    if is_sharded(x):
        cos, sin, rows = shardable(x, cos, sin, rows)
        weight = replicate_like(x, weight)
    kernel = _kernel(x)
    to_tables = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    if kernel is None or to_tables or forward_ad._current_level >= 0:
        return reference.norm_rotate(x, weight, cos, sin, rows, spec, norm)
    if kernel is triton:
        x, weight = x.resolve_neg(), weight.resolve_neg()
        x = x if x.stride(-1) == 1 else x.contiguous()
    result: Tensor
    how = cos, sin, rows, spec, norm
    if is_plain(x, weight, cos, sin):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            result = _NormRotate.apply(x, weight, how)
        else:
            result = kernel.norm_rotate(x, weight, *how)
    elif (
        kernel is triton
        and torch.compiler.is_compiling()
        and not (is_exporting() or in_transform(x))
    ):
        result = _forward(x, weight, cos, sin, rows.positions, rows.start, *spec, *norm)
    else:
        result = reference.norm_rotate(x, weight, *how)
    return result


def _kernel(x: Tensor) -> Any:
    """The implementation that runs on the device of ``x``, if one does."""
    if x.is_cuda:
        return triton if triton.installed else None
    return c if x.is_cpu and c.available else None


class _NormRotate(torch.autograd.Function):
    """The norm and its gradient, each in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: tuple[Any, ...]) -> Tensor:
        cos, sin, rows, *ctx.rest = how
        ctx.save_for_backward(x, weight, cos, sin, rows.positions)
        ctx.start = rows.start
        result: Tensor = _kernel(x).norm_rotate(x, weight, *how)
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        *tensors, positions = ctx.saved_tensors
        # A gradient that is differentiated again, either way, or batched, is torch's.
        plain = is_plain(g) and not torch.is_grad_enabled() and forward_ad._current_level < 0
        kernel = _kernel(g) if plain else reference
        rows = Rows(ctx.start, positions)
        return *kernel.norm_rotate_backward(g, *tensors, rows, *ctx.rest), None


def _split(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    cos, sin, positions, start, *rest = arguments
    return cos, sin, Rows(start, positions), Spec(*rest[:4]), Norm(*rest[4:])


def _check(xs: tuple[Tensor, ...], weight: Tensor, how: tuple[Any, ...]) -> None:
    """As `ops.check`, for one tensor or a gradient and it, and their weight."""
    who, x, (cos, sin, rows, spec, norm) = "posenc::norm_rotate", xs[-1], how
    ops.check(who, xs, cos, sin, rows, spec.column)
    wanted = x.shape[1] * x.shape[3] if norm.whole else x.shape[3]
    ops.check_devices(who, x, weight)
    if weight.shape != (wanted,) or weight.dtype not in checks.FLOAT_DTYPES:
        rule = f"weight must be floating, of shape ({wanted},)"
        got = ops.described(weight)
        raise ValueError(checks.message(who, rule, got, "One weight serves one channel."))
    if xs[0].shape != x.shape or xs[0].dtype != x.dtype:
        rule = f"a gradient must be {x.dtype} of shape {tuple(x.shape)}"
        got = ops.described(xs[0])
        raise ValueError(checks.message(who, rule, got, "Pass the gradient to the result."))


def _run_forward(x: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    how = _split(arguments)
    _check((x,), weight, how)
    return triton.norm_rotate(x if x.stride(-1) == 1 else x.contiguous(), weight, *how)


def _run_backward(g: Tensor, x: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    how = _split(arguments)
    _check((g, x), weight, how)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return triton.norm_rotate_backward(g, x, weight, *how)


LIBRARY.impl("norm_rotate", _run_forward, "CUDA")
LIBRARY.impl("norm_rotate_backward", _run_backward, "CUDA")


@torch.library.register_fake("posenc::norm_rotate", lib=LIBRARY)
def _(x: Tensor, *rest: Any) -> Tensor:
    ops.check_devices("posenc::norm_rotate", x, *rest)
    return torch.empty_like(x)


@torch.library.register_fake("posenc::norm_rotate_backward", lib=LIBRARY)
def _(g: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    ops.check_devices("posenc::norm_rotate_backward", g, x, weight, *rest)
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, cos, sin, positions, *ctx.rest = inputs
    ctx.save_for_backward(x, weight, cos, sin, positions)


def _back(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    to_x, to_weight = _backward(g, *ctx.saved_tensors, *ctx.rest)
    return (to_x, to_weight, *[None] * 11)


torch.library.register_autograd("posenc::norm_rotate", _back, setup_context=_keep, lib=LIBRARY)
