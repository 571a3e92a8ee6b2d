"""The way in: a plain call goes straight to its kernel, everything else through the ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from posenc._contract.sharding import is_sharded
from posenc._contract.tracing import in_transform, is_exporting, is_plain
from posenc.kernels import backend, ops, reference
from posenc.kernels.sharded import shardable
from posenc.kernels.spec import Rows, Spec

Rotation = Callable[[Tensor, Tensor, Tensor, Rows, Spec], Tensor]


# What a program is exported with: torch's own operations, unless its format has a rotation.
_exported: Rotation = reference.rotate


@contextmanager
def exported_as(rotation: Rotation) -> Iterator[None]:
    """Export programs with ``rotation`` for the time being; arguments as `reference.rotate`."""
    global _exported
    before, _exported = _exported, rotation
    try:
        yield
    finally:
        _exported = before


def rotate(xs: list[Tensor], cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> list[Tensor]:
    """Rotate one tensor, or queries and keys, ``[B, H, T, D]`` each, into new tensors.

    At decode the dispatcher costs more than the rotation, so a call that records no gradient
    goes to the kernel by the shortest way.

    Args:
        xs: One or two tensors of one device.
        cos: ``[R, P]`` or ``[B, R, P]``.
        sin: As ``cos``.
        rows: Which table row each token takes.
        spec: Which channels form pairs, and which way they spec.
    """
    if not is_plain(*xs, cos, sin):
        # An exported program must run where this package is not installed, and torch.func and
        # forward mode have rules for torch's own operations alone.
        if forward_ad._current_level >= 0 or in_transform(*xs):
            return [reference.rotate(x, cos, sin, rows, spec) for x in xs]
        if is_exporting():
            return [_exported(x, cos, sin, rows, spec) for x in xs]
        if any(is_sharded(x) for x in xs):
            return [_rotate_sharded(x, cos, sin, rows, spec) for x in xs]
        return _through_op(xs, cos, sin, rows, spec)
    if forward_ad._current_level >= 0:
        return [reference.rotate(x, cos, sin, rows, spec) for x in xs]
    return rotate_plain(xs, cos, sin, rows, spec)


def rotate_plain(
    xs: list[Tensor], cos: Tensor, sin: Tensor, rows: Rows, spec: Spec
) -> list[Tensor]:
    """As :func:`rotate`, for a call that is known to be plain and not one of forward mode."""
    if torch.is_grad_enabled():
        if cos.requires_grad or sin.requires_grad:
            return [backend.like(x, reference.rotate(x, cos, sin, rows, spec)) for x in xs]
        if xs[0].requires_grad or xs[-1].requires_grad:
            return list(_Rotate.apply((cos, sin, rows, spec), *xs))
    return backend.rotate(xs, cos, sin, rows, spec)


def rotate_(xs: list[Tensor], cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> None:
    """Rotate each of ``xs`` where it stands; arguments as :func:`rotate`.

    Where a derivative is recorded the result is worked out beside it and copied, so that autograd
    sees, and may refuse, the write.
    """
    to_tables = cos.requires_grad or sin.requires_grad
    recorded = torch.is_grad_enabled() and (
        to_tables or xs[0].requires_grad or xs[-1].requires_grad
    )
    recorded = recorded or forward_ad._current_level >= 0
    if not recorded and is_plain(*xs, cos, sin):
        backend.rotate_(xs, cos, sin, rows, spec)
        torch.autograd.graph.increment_version(xs)
    elif recorded or in_transform(*xs):
        # A gradient to the tables needs what stood here before.
        sources = [x.clone() for x in xs] if to_tables else xs
        ys = rotate(sources, cos, sin, rows, spec)
        if len(xs) == 2 and is_plain(*xs):
            # Views that autograd will not have written, it refuses before anything is.
            xs[1][:0].zero_()
        for x, y in zip(xs, ys, strict=True):
            x.copy_(y)
    elif is_exporting():
        for x in xs:
            x.copy_(_exported(x, cos, sin, rows, spec))
    else:
        for x in xs:
            tables = shardable(x, cos, sin, rows) if is_sharded(x) else (cos, sin, rows)
            ops.rotate_(x, *tables[:2], *ops.flat(tables[2], spec))


def _through_op(xs: list[Tensor], cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> list[Tensor]:
    op = ops.rotate if len(xs) == 1 else ops.rotate_qk
    ys = op(*xs, cos, sin, *ops.flat(rows, spec))
    return [ys] if len(xs) == 1 else list(ys)


def _rotate_sharded(x: Tensor, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> Tensor:
    to_tables = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    cos, sin, rows = shardable(x, cos, sin, rows)
    if to_tables:
        return reference.rotate(x, cos, sin, rows, spec)
    result: Tensor = ops.rotate(x, cos, sin, *ops.flat(rows, spec))
    return result


class _Rotate(torch.autograd.Function):
    """The op's gradient, at a third of its dispatch."""

    @staticmethod
    def forward(ctx: Any, how: tuple[Tensor, Tensor, Rows, Spec], *xs: Tensor) -> Any:
        cos, sin, rows, spec = how
        ctx.save_for_backward(cos, sin, rows.positions)
        ctx.start, ctx.spec = rows.start, spec
        ys = tuple(backend.rotate(xs, *how))
        if len(ys) == 2 and not all(ctx.needs_input_grad[1:]):
            # A cache that one of them is written to would hold on to the graph of the other.
            ctx.mark_non_differentiable(ys[0] if ctx.needs_input_grad[2] else ys[1])
        return ys

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        cos, sin, positions = ctx.saved_tensors
        how = cos, sin, Rows(ctx.start, positions), ctx.spec.transpose()
        recorded = torch.is_grad_enabled() or forward_ad._current_level >= 0
        if recorded or not is_plain(*gradients, cos, sin):
            return (None, *rotate(list(gradients), *how))
        return (None, *backend.rotate(gradients, *how))
