"""The rotation as PyTorch ops, for everything that is not a plain eager call.

``posenc::rotate`` and ``posenc::rotate_qk`` return new tensors, and their gradient is the op
itself, transposed; ``posenc::rotate_`` writes into its tensor and has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc.kernels import backend, reference
from posenc.kernels.spec import Rows, Turn

LIBRARY = torch.library.Library("posenc", "DEF")
_TABLES = "Tensor cos, Tensor sin, Tensor? positions, SymInt start"
_TURN = "bool interleaved, bool interleaved_out, SymInt column, bool transposed"
LIBRARY.define(f"rotate(Tensor x, {_TABLES}, {_TURN}) -> Tensor")
LIBRARY.define(f"rotate_qk(Tensor q, Tensor k, {_TABLES}, {_TURN}) -> (Tensor, Tensor)")
LIBRARY.define(f"rotate_(Tensor(a!) x, {_TABLES}, {_TURN}) -> ()")

rotate = torch.ops.posenc.rotate.default
rotate_qk = torch.ops.posenc.rotate_qk.default
rotate_ = torch.ops.posenc.rotate_.default


def flat(rows: Rows, turn: Turn) -> tuple[Any, ...]:
    """Arguments of an op that follow the tables."""
    return (rows.positions, rows.start, *turn)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Any, start: int, *turn: Any) -> Tensor:
    return backend.rotate([x], cos, sin, Rows(start, positions), Turn(*turn))[0]


def _rotate_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Any, start: int, *turn: Any
) -> tuple[Tensor, Tensor]:
    a, b = backend.rotate([q, k], cos, sin, Rows(start, positions), Turn(*turn))
    return a, b


def _rotate_inplace(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Any, start: int, *turn: Any
) -> None:
    backend.rotate_([x], cos, sin, Rows(start, positions), Turn(*turn))


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
    return torch.empty_like(x)


@torch.library.register_fake("posenc::rotate_qk", lib=LIBRARY)
def _(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


@torch.library.register_fake("posenc::rotate_", lib=LIBRARY)
def _(x: Tensor, *rest: Any) -> None:
    return None


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
    ctx.turn = Turn(interleaved, interleaved_out, column, transposed)


def _back(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    cos, sin, positions, *xs = ctx.saved_tensors
    rows, turn = Rows(ctx.start, positions), ctx.turn
    op = rotate if ctx.count == 1 else rotate_qk
    back = op(*gradients, cos, sin, *flat(rows, turn.back()))
    to_tables: tuple[Any, Any] = (None, None)
    if ctx.for_tables:
        shares = [
            reference.table_gradients(x, g, cos, sin, rows, turn)
            for x, g in zip(xs, gradients, strict=True)
        ]
        to_tables = (sum(c for c, _ in shares), sum(s for _, s in shares))
    to_xs = (back,) if ctx.count == 1 else back
    return (*to_xs, *to_tables, None, None, None, None, None, None)


torch.library.register_autograd("posenc::rotate", _back, setup_context=_keep, lib=LIBRARY)
torch.library.register_autograd("posenc::rotate_qk", _back, setup_context=_keep, lib=LIBRARY)
