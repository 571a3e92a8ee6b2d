"""The rotation as PyTorch ops, for everything that is not a plain eager call.

``posenc::rotate`` and ``posenc::rotate_qk`` return new tensors, and their gradient is the op
itself, transposed; ``posenc::rotate_`` writes into its tensor and has none. ``posenc::norm_rotate``
exists on CUDA, where a compiler could not fuse the norm with the rotation by itself.

Kernels trust their arguments, and anyone can call an op, so the ops check them first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.overlap import check_no_internal_overlap, copy_if_overlapping
from posenc.kernels import dispatch, triton
from posenc.kernels.spec import Norm, RowOutOfRange, Rows, unflatten

_LIBRARY = torch.library.Library("posenc", "DEF")


def define_op(
    name: str,
    schema: str,
    impl: Callable[..., Any],
    fake: Callable[..., Any],
    keep: Callable[..., None] | None = None,
    back: Callable[..., Any] | None = None,
    key: str = "CompositeExplicitAutograd",
) -> Any:
    """Define ``posenc::name``, and return its overload.

    Args:
        name: The op.
        schema: Its arguments and results, as ``"(Tensor x) -> Tensor"``.
        impl: Computes them.
        fake: Makes results of the right shape, dtype and strides.
        keep: ``setup_context`` of its gradient, if it has one.
        back: ``backward`` of its gradient.
        key: The dispatch key that ``impl`` is for.
    """
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, impl, key)
    torch.library.register_fake(f"posenc::{name}", fake, lib=_LIBRARY)
    if back is not None:
        torch.library.register_autograd(f"posenc::{name}", back, setup_context=keep, lib=_LIBRARY)
    return getattr(torch.ops.posenc, name).default


def _check(who: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse arguments with which a kernel would read or write out of bounds; unflatten them.

    Values of positions are left to the kernels, which check each before it is used.
    """
    xs, cos, sin, rows, spec = unflatten(arguments)
    x, (start, positions) = xs[0], rows
    shape, table = x.shape, cos.shape
    _check_devices(who, *xs, cos, sin, positions)
    for t in xs:
        other = t.shape
        if len(other) != 4 or t.dtype not in checks.FLOAT_DTYPES:
            rule = "tensors must be floating, of shape (B, H, T, D)"
            raise ValueError(checks.message(who, rule, _described(t), "Convert or reshape them."))
        if t is not x and (other[0] != shape[0] or other[2:] != shape[2:]):
            rule = "q and k must agree in batch, length and head_dim"
            got = f"{_described(x)} and {_described(t)}"
            way_out = "Pass tensors that differ in their head counts at most."
            raise ValueError(checks.message(who, rule, got, way_out))
    batch, _, length, width = shape
    if (
        table != sin.shape
        or not (len(table) == 2 or (len(table) == 3 and table[0] == batch))
        or not 2 <= 2 * table[-1] <= width
        or cos.dtype not in checks.FLOAT_DTYPES
        or sin.dtype not in checks.FLOAT_DTYPES
    ):
        rule = f"cos and sin must be (R, P) or ({batch}, R, P), with 1 <= P <= {width // 2}"
        got = f"{_described(cos)} and {_described(sin)} for {_described(x)}"
        way_out = "Pass floating tables of one shape, with a column for each pair of channels."
        raise ValueError(checks.message(who, rule, got, way_out))
    held, rest = table[-2], width - 2 * table[-1]
    if spec.first_channel not in (0, rest):
        rule, way_out = f"first_channel must be 0 or {rest}", "Rotate the first or last channels."
        raise ValueError(checks.message(who, rule, spec.first_channel, way_out))
    if positions is None:
        if start < 0 or start + length > held:
            raise RowOutOfRange(start if start < 0 else start + length - 1, held)
        return xs, cos, sin, rows, spec
    ids = positions.shape
    if (
        len(ids) != 2
        or ids[0] not in (1, batch)
        or ids[1] not in (1, length)
        or positions.dtype != torch.int64
    ):
        rule = f"positions must be int64 of shape (1 or {batch}, 1 or {length})"
        got = f"{_described(positions)} for {_described(x)}"
        way_out = "Pass a row for each token, or for the first of each sequence."
        raise ValueError(checks.message(who, rule, got, way_out))
    if not 0 <= start <= held:
        raise RowOutOfRange(start, held)
    return xs, cos, sin, rows, spec


def _check_devices(who: str, x: Tensor, *others: Any) -> None:
    """Refuse tensors of several devices: beside a meta tensor, a result would stay unwritten."""
    device = x.device
    for other in others:
        if isinstance(other, Tensor) and other.device != device:
            rule, got = "tensors must be on one device", f"{device} and {other.device}"
            raise ValueError(checks.message(who, rule, got, "Move them to one."))


def _described(x: Tensor) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}"


def _rotate(*arguments: Any) -> Tensor:
    return dispatch.run(*_check("posenc::rotate", arguments))[0]


def _rotate_qk(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, k = dispatch.run(*_check("posenc::rotate_qk", arguments))
    return q, k


def _rotate_(*arguments: Any) -> None:
    (x,), cos, sin, (start, positions), spec = _check("posenc::rotate_", arguments)
    check_no_internal_overlap("posenc::rotate_", x)
    # Positions are checked before they are used: nothing may be written over them in between.
    cos, sin, *ids = copy_if_overlapping([x], cos, sin, *([] if positions is None else [positions]))
    dispatch.run_([x], cos, sin, Rows(start, *ids), spec)
    torch.autograd.graph.increment_version(x)


def _fake(name: str, count: int) -> Callable[..., Any]:
    """Results like the first ``count`` arguments of an op."""

    def fake(*arguments: Any) -> Any:
        _check_devices(f"posenc::{name}", *arguments)
        made = tuple([torch.empty_like(x) for x in arguments[:count]])
        return made[0] if count == 1 else made or None

    return fake


_HOW = (
    "Tensor cos, Tensor sin, Tensor? positions, SymInt start, "
    "bool interleaved, bool interleaved_out, SymInt first_channel, bool transposed"
)
_RULES = dispatch._Rotate.keep, dispatch._Rotate.backward
rotate = define_op("rotate", f"(Tensor x, {_HOW}) -> Tensor", _rotate, _fake("rotate", 1), *_RULES)
rotate_qk = define_op(
    "rotate_qk",
    f"(Tensor q, Tensor k, {_HOW}) -> (Tensor, Tensor)",
    _rotate_qk,
    _fake("rotate_qk", 2),
    *_RULES,
)
rotate_ = define_op("rotate_", f"(Tensor(a!) x, {_HOW}) -> ()", _rotate_, _fake("rotate_", 0))


def _check_norm(gradients: Sequence[Tensor], x: Tensor, weight: Tensor, how: Any) -> Any:
    """As :func:`_check`; the arguments of `dispatch.run_norm` and its backward, without a g."""
    who, norm = "posenc::norm_rotate", Norm(*how[8:])
    _, cos, sin, rows, spec = _check(who, (x, *how[:8]))
    _check_devices(who, x, weight, *gradients)
    wanted = x.shape[1] * x.shape[3] if norm.all_heads else x.shape[3]
    if weight.shape != (wanted,) or weight.dtype not in checks.FLOAT_DTYPES:
        rule, way_out = f"weight must be floating, of shape ({wanted},)", "Pass one per channel."
        raise ValueError(checks.message(who, rule, _described(weight), way_out))
    for g in gradients:
        if g.shape != x.shape or g.dtype != x.dtype:
            rule, way_out = f"a gradient must be {_described(x)}", "Pass that to the result."
            raise ValueError(checks.message(who, rule, _described(g), way_out))
    return x, weight, cos, sin, rows, spec, norm


def _norm_rotate(x: Tensor, weight: Tensor, *how: Any) -> Tensor:
    return dispatch.run_norm(triton, *_check_norm((), x, weight, how))


def _norm_backward(g: Tensor, x: Tensor, weight: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    return dispatch.run_norm_backward(triton, g, *_check_norm((g,), x, weight, how))


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, cos, sin, positions, *ctx.kinds = inputs
    ctx.save_for_backward(x, weight, cos, sin, positions)


def _back_norm(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    return (*norm_rotate_backward(g, *ctx.saved_tensors, *ctx.kinds), *[None] * 11)


_NORM = f"Tensor x, Tensor weight, {_HOW}, float eps, float shift, bool all_heads"
norm_rotate = define_op(
    "norm_rotate",
    f"({_NORM}) -> Tensor",
    _norm_rotate,
    _fake("norm_rotate", 1),
    keep=_keep_norm,
    back=_back_norm,
    key="CUDA",
)
norm_rotate_backward = define_op(
    "norm_rotate_backward",
    f"(Tensor g, {_NORM}) -> (Tensor, Tensor)",
    _norm_backward,
    lambda g, *arguments: _fake("norm_rotate_backward", 2)(*arguments),
    key="CUDA",
)
