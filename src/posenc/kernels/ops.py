"""The rotation as PyTorch ops, for everything that is not a plain eager call.

The gradient of ``posenc::rotate`` and ``posenc::rotate_qk`` is the transposed op;
``posenc::rotate_`` works in place and has no gradient. ``posenc::norm_rotate`` exists on CUDA only,
where torch.compile does not fuse the norm with the rotation.

Kernels do not check their arguments, and anyone can call an op, so the ops check them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.overlap import check_no_internal_overlap
from posenc.kernels import dispatch, triton
from posenc.kernels.spec import Norm, RowOutOfRange, Rows, unflatten

_LIBRARY = torch.library.Library("posenc", "DEF")


def define_op(
    name: str,
    schema: str,
    impl: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    key: str = "CompositeExplicitAutograd",
) -> Any:
    """Define ``posenc::name`` with ``impl`` for the dispatch key ``key``; return its overload."""
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, impl, key)
    torch.library.register_fake(f"posenc::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"posenc::{name}", backward, setup_context=setup_context, lib=_LIBRARY
        )
    return getattr(torch.ops.posenc, name).default


def refuse(who: str, rule: str, *tensors: Any) -> NoReturn:
    """Raise an error that shows ``tensors``."""
    shown = [f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in tensors if isinstance(t, Tensor)]
    way_out = "Call the functions of posenc.functional, which explain their arguments."
    checks.fail(who, rule, " and ".join(shown), way_out)


def check_rotation(who: str, arguments: tuple[Any, ...], *others: Tensor) -> tuple[Any, ...]:
    """Unflatten the arguments; refuse those with which a kernel would access memory out of bounds.

    The kernels check the values of positions. ``others`` are tensors for the same device.
    """
    *xs, cos, sin, rows, spec = unflatten(arguments)
    x = xs[0]
    check_devices(who, *xs, cos, sin, rows.positions, *others)
    for t in xs:
        agrees = t.dim() == 4 and (t.shape[0], *t.shape[2:]) == (x.shape[0], *x.shape[2:])
        if not agrees or t.dtype not in checks.FLOAT_DTYPES:
            refuse(who, "tensors must be floating, (B, H, T, D), and differ only in H", *xs)
    (batch, _, _, width), table = x.shape, cos.shape
    if (
        table != sin.shape
        or not (len(table) == 2 or (len(table) == 3 and table[0] == batch))
        or not 2 <= 2 * table[-1] <= width
        or cos.dtype not in checks.FLOAT_DTYPES
        or sin.dtype not in checks.FLOAT_DTYPES
    ):
        rule = f"cos and sin must be floating, (R, P) or ({batch}, R, P), 1 <= P <= {width // 2}"
        refuse(who, rule, cos, sin, x)
    table_rows, unrotated = table[-2], width - 2 * table[-1]
    if spec.first_channel not in (0, unrotated):
        refuse(who, f"first_channel must be 0 or {unrotated}, not {spec.first_channel}", cos, x)
    check_rows(who, x, table_rows, rows)
    return xs, cos, sin, rows, spec


def check_rows(who: str, x: Tensor, table_rows: int, rows: Rows) -> None:
    """Refuse rows of the tokens of ``x`` outside a table; positions are checked by the kernels."""
    (batch, _, length, _), (start, positions) = x.shape, rows
    end = start + length if positions is None else start
    if start < 0 or end > table_rows:
        raise RowOutOfRange(start if start < 0 else max(start, end - 1), table_rows)
    if positions is not None and (
        positions.dim() != 2
        or positions.shape[0] not in (1, batch)
        or positions.shape[1] not in (1, length)
        or positions.dtype != torch.int64
    ):
        refuse(who, f"positions must be int64, (1 or {batch}, 1 or {length})", positions, x)


def check_devices(who: str, *tensors: Any) -> None:
    """Refuse tensors on several devices; if one is meta, the result would stay unwritten."""
    if len({t.device for t in tensors if isinstance(t, Tensor)}) > 1:
        refuse(who, "tensors must be on one device", *tensors)


def _rotate(*arguments: Any) -> Tensor:
    return dispatch.run(*check_rotation("posenc::rotate", arguments))[0]


def _rotate_qk(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(dispatch.run(*check_rotation("posenc::rotate_qk", arguments)))


def _rotate_(*arguments: Any) -> None:
    (x,), cos, sin, rows, spec = check_rotation("posenc::rotate_", arguments)
    check_no_internal_overlap("posenc::rotate_", x)
    dispatch.run_([x], cos, sin, rows, spec)
    torch.autograd.graph.increment_version(x)


def fake_like(name: str, count: int) -> Callable[..., Any]:
    """The fake implementation of an op whose results are like its first ``count`` arguments."""

    def fake(*arguments: Any) -> Any:
        check_devices(f"posenc::{name}", *arguments)
        made = tuple([torch.empty_like(x) for x in arguments[:count]])
        return made[0] if count == 1 else made or None

    return fake


HOW = (
    "Tensor cos, Tensor sin, Tensor? positions, SymInt start, "
    "bool interleaved, bool interleaved_out, SymInt first_channel, bool transposed"
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    dispatch._Rotate.save(ctx, unflatten(inputs), output)


_RULES = _save, dispatch._Rotate.backward
rotate = define_op(
    "rotate", f"(Tensor x, {HOW}) -> Tensor", _rotate, fake_like("rotate", 1), *_RULES
)
rotate_qk = define_op(
    "rotate_qk",
    f"(Tensor q, Tensor k, {HOW}) -> (Tensor, Tensor)",
    _rotate_qk,
    fake_like("rotate_qk", 2),
    *_RULES,
)
rotate_ = define_op("rotate_", f"(Tensor(a!) x, {HOW}) -> ()", _rotate_, fake_like("rotate_", 0))


def _check_norm(gradients: Sequence[Tensor], x: Tensor, weight: Tensor, how: Any) -> Any:
    """As :func:`check_rotation`, for the arguments of `norm_rotate` and its incoming gradient."""
    who, norm = "posenc::norm_rotate", Norm(*how[8:])
    _, cos, sin, rows, spec = check_rotation(who, (x, *how[:8]), weight, *gradients)
    check_weight(who, weight, x, norm.all_heads)
    if any(g.shape != x.shape or g.dtype != x.dtype for g in gradients):
        refuse(who, "a gradient must be of its tensor's shape and dtype", *gradients, x)
    return x, weight, cos, sin, rows, spec, norm


def check_weight(who: str, weight: Tensor, x: Tensor, all_heads: bool) -> None:
    """Refuse a weight that a kernel would read out of bounds."""
    channels = x.shape[1] * x.shape[3] if all_heads else x.shape[3]
    if weight.shape != (channels,) or weight.dtype not in checks.FLOAT_DTYPES:
        refuse(who, f"weight must be floating, ({channels},)", weight, x)


def _norm_rotate(x: Tensor, weight: Tensor, *how: Any) -> Tensor:
    return dispatch.run_norm(triton, *_check_norm((), x, weight, how))


def _norm_backward(g: Tensor, x: Tensor, weight: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    return dispatch.run_norm_backward(triton, g, *_check_norm((g,), x, weight, how))


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.others = *inputs[:5], inputs[5:]
    ctx.save_for_backward(*tensors)


def _op_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    return (*norm_rotate_backward(g, *ctx.saved_tensors, *ctx.others), *[None] * 11)


_NORM = f"Tensor x, Tensor weight, {HOW}, float eps, float shift, bool all_heads"
norm_rotate = define_op(
    "norm_rotate",
    f"({_NORM}) -> Tensor",
    _norm_rotate,
    fake_like("norm_rotate", 1),
    _save_norm,
    _op_backward,
    key="CUDA",
)
norm_rotate_backward = define_op(
    "norm_rotate_backward",
    f"(Tensor g, {_NORM}) -> (Tensor, Tensor)",
    _norm_backward,
    lambda g, *arguments: fake_like("norm_rotate_backward", 2)(*arguments),
    key="CUDA",
)
