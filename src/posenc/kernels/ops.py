"""The rotation as PyTorch ops, for everything that is not a plain eager call.

``posenc::rotate`` and ``posenc::rotate_qk`` return new tensors, and their gradient is the op
itself, transposed; ``posenc::rotate_`` writes into its tensor and has none.

Kernels trust what they are given, and anyone can call an op: the ops check it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.overlap import copy_if_overlapping, has_internal_overlap
from posenc.kernels import backend, reference
from posenc.kernels.spec import RowOutOfRange, Rows, Spec

LIBRARY = torch.library.Library("posenc", "DEF")
_TABLES = "Tensor cos, Tensor sin, Tensor? positions, SymInt start"
_TURN = "bool interleaved, bool interleaved_out, SymInt column, bool transposed"
LIBRARY.define(f"rotate(Tensor x, {_TABLES}, {_TURN}) -> Tensor")
LIBRARY.define(f"rotate_qk(Tensor q, Tensor k, {_TABLES}, {_TURN}) -> (Tensor, Tensor)")
LIBRARY.define(f"rotate_(Tensor(a!) x, {_TABLES}, {_TURN}) -> ()")

rotate = torch.ops.posenc.rotate.default
rotate_qk = torch.ops.posenc.rotate_qk.default
rotate_ = torch.ops.posenc.rotate_.default


def flat(rows: Rows, spec: Spec) -> tuple[Any, ...]:
    """Arguments of an op that follow the tables."""
    return (rows.positions, rows.start, *spec)


def check(
    who: str, xs: Sequence[Tensor], cos: Tensor, sin: Tensor, rows: Rows, column: int
) -> None:
    """Refuse arguments of an op that a kernel would read or write beyond the ends of.

    Values of positions are left to the kernels, which look at each before it is used.

    Args:
        who: The op, for the error.
        xs: What is to be rotated, ``[B, H, T, D]`` each.
        cos: ``[R, P]`` or ``[B, R, P]``.
        sin: As ``cos``.
        rows: Which table row each token takes.
        column: First channel that is rotated.
    """
    x, (start, positions) = xs[0], rows
    shape, table = x.shape, cos.shape
    check_devices(who, *xs, cos, sin, positions)
    for t in xs:
        other = t.shape
        if len(other) != 4 or t.dtype not in checks.FLOAT_DTYPES:
            rule = "tensors must be floating, of shape (B, H, T, D)"
            raise ValueError(checks.message(who, rule, described(t), "Convert or reshape them."))
        if t is not x and (other[0] != shape[0] or other[2:] != shape[2:]):
            rule = "q and k must agree in batch, length and head_dim"
            got = f"{described(x)} and {described(t)}"
            raise ValueError(checks.message(who, rule, got, "Only the head counts may differ."))
    batch, _, length, width = shape
    if (
        table != sin.shape
        or not (len(table) == 2 or (len(table) == 3 and table[0] == batch))
        or not 2 <= 2 * table[-1] <= width
        or cos.dtype not in checks.FLOAT_DTYPES
        or sin.dtype not in checks.FLOAT_DTYPES
    ):
        rule = f"cos and sin must be (R, P) or ({batch}, R, P), with 1 <= P <= {width // 2}"
        got = f"{described(cos)} and {described(sin)} for {described(x)}"
        way_out = "Pass floating tables of one shape, with a column for each pair of channels."
        raise ValueError(checks.message(who, rule, got, way_out))
    held, rest = table[-2], width - 2 * table[-1]
    if column != 0 and column != rest:
        rule = f"column must be 0 or {rest}"
        raise ValueError(checks.message(who, rule, column, "Rotate the first or last channels."))
    if positions is None:
        if start < 0 or start + length > held:
            raise RowOutOfRange(start if start < 0 else start + length - 1, held)
        return
    ids = positions.shape
    if (
        len(ids) != 2
        or ids[0] not in (1, batch)
        or ids[1] not in (1, length)
        or positions.dtype != torch.int64
    ):
        rule = f"positions must be int64 of shape (1 or {batch}, 1 or {length})"
        got = f"{described(positions)} for {described(x)}"
        way_out = "Give a row to each token, or to the first of each sequence."
        raise ValueError(checks.message(who, rule, got, way_out))
    if not 0 <= start <= held:
        raise RowOutOfRange(start, held)


def check_devices(who: str, x: Tensor, *others: Any) -> None:
    """Refuse tensors of several devices: beside a meta tensor, a result would stay unwritten."""
    device = x.device
    for other in others:
        if isinstance(other, Tensor) and other.device != device:
            rule, got = "tensors must be on one device", f"{device} and {other.device}"
            raise ValueError(checks.message(who, rule, got, "Move them to one."))


def described(x: Tensor) -> str:
    """A tensor in the words of an error."""
    return f"{x.dtype} of shape {tuple(x.shape)}"


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Any, start: int, *spec: Any) -> Tensor:
    rows, how = Rows(start, positions), Spec(*spec)
    check("posenc::rotate", (x,), cos, sin, rows, how.column)
    return backend.rotate([x], cos, sin, rows, how)[0]


def _rotate_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Any, start: int, *spec: Any
) -> tuple[Tensor, Tensor]:
    rows, how = Rows(start, positions), Spec(*spec)
    check("posenc::rotate_qk", (q, k), cos, sin, rows, how.column)
    a, b = backend.rotate([q, k], cos, sin, rows, how)
    return a, b


def _rotate_inplace(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Any, start: int, *spec: Any
) -> None:
    who, how = "posenc::rotate_", Spec(*spec)
    check(who, (x,), cos, sin, Rows(start, positions), how.column)
    if has_internal_overlap(x):
        rule = "a tensor must not share memory with itself to be written in place"
        got = f"strides {x.stride()}"
        raise ValueError(checks.message(who, rule, got, "Call contiguous() first."))
    # Positions are looked at before they are used: nothing may be written over them in between.
    cos, sin, *ids = copy_if_overlapping([x], cos, sin, *([] if positions is None else [positions]))
    backend.rotate_([x], cos, sin, Rows(start, *ids), how)


for _name, _run in (
    ("rotate", _rotate),
    ("rotate_qk", _rotate_qk),
    ("rotate_", _rotate_inplace),
):
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")


def _seen_by_autograd(keys: Any, x: Tensor, *rest: Any) -> None:
    with torch._C._AutoDispatchBelowADInplaceOrView():
        rotate_.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, x, *rest)
    torch.autograd.graph.increment_version(x)


LIBRARY.impl("rotate_", _seen_by_autograd, "ADInplaceOrView", with_keyset=True)


@torch.library.register_fake("posenc::rotate", lib=LIBRARY)
def _(x: Tensor, *rest: Any) -> Tensor:
    check_devices("posenc::rotate", x, *rest)
    return torch.empty_like(x)


@torch.library.register_fake("posenc::rotate_qk", lib=LIBRARY)
def _(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    check_devices("posenc::rotate_qk", q, k, *rest)
    return torch.empty_like(q), torch.empty_like(k)


@torch.library.register_fake("posenc::rotate_", lib=LIBRARY)
def _(x: Tensor, *rest: Any) -> None:
    check_devices("posenc::rotate_", x, *rest)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *xs, cos, sin, positions, start, interleaved, interleaved_out, column, transposed = inputs
    ctx.count = len(xs)
    # The rotation is linear: only a gradient to the tables needs what was rotated.
    ctx.for_tables = ctx.needs_input_grad[len(xs)] or ctx.needs_input_grad[len(xs) + 1]
    if len(xs) == 2 and not ctx.for_tables and not all(ctx.needs_input_grad[:2]):
        # A cache that one of them is written to would hold on to the graph of the other.
        ctx.mark_non_differentiable(output[0] if ctx.needs_input_grad[1] else output[1])
    ctx.save_for_backward(cos, sin, positions, *(xs if ctx.for_tables else ()))
    ctx.start = start
    ctx.spec = Spec(interleaved, interleaved_out, column, transposed)


def _back(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    cos, sin, positions, *xs = ctx.saved_tensors
    rows, spec = Rows(ctx.start, positions), ctx.spec
    op = rotate if ctx.count == 1 else rotate_qk
    back = op(*gradients, cos, sin, *flat(rows, spec.transpose()))
    to_tables: tuple[Any, Any] = (None, None)
    if ctx.for_tables:
        shares = [
            reference.table_gradients(x, g, cos, sin, rows, spec)
            for x, g in zip(xs, gradients, strict=True)
        ]
        to_tables = (sum(c for c, _ in shares), sum(s for _, s in shares))
    to_xs = (back,) if ctx.count == 1 else back
    return (*to_xs, *to_tables, None, None, None, None, None, None)


torch.library.register_autograd("posenc::rotate", _back, setup_context=_keep, lib=LIBRARY)
torch.library.register_autograd("posenc::rotate_qk", _back, setup_context=_keep, lib=LIBRARY)
