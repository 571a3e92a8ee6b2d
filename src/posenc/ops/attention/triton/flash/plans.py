"""The plans of attention: which kind of bias a call has, and the walks that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from posenc.ops.attention.call import Call
from posenc.ops.attention.triton.flash import cope, fire, parts, slopes, sums, table, vectors
from posenc.ops.attention.triton.flash.walks import (
    NOTHING,
    PRUNE_FROM,
    STARTS,
    Gradient,
    Prepared,
    Walks,
    above_of,
    hooks,
    is_short,
    launch_backward,
    launch_few,
    launch_forward,
    walks_of,
    whole,
)
from posenc.ops.plan import Operand, Plan, Target


class NoBias(NamedTuple):
    """Attention without a bias."""

    hooks: Any


def _prepare_none(walks: Walks) -> Prepared:
    return Prepared(NoBias(hooks(parts.NO_HOOKS)), walks.number_tiles())


def _gradient_of_none(walks: Walks, prepared: Prepared, *_: Any) -> Gradient:
    return Gradient(prepared.bias)


class Kernels(NamedTuple):
    """What a kind of bias does on a GPU."""

    prepare: Callable[[Walks], Prepared]
    gradient_of: Callable[..., Gradient]
    # For few queries; None if the walk over all keys serves these too.
    prepare_few: Callable[[Walks], Prepared | None]


KINDS = {
    "without_bias": Kernels(_prepare_none, _gradient_of_none, _prepare_none),
    "slopes": Kernels(slopes.prepare, slopes.gradient_of, slopes.prepare),
    "table": Kernels(table.prepare, table.gradient_of, table.prepare_few),
    "sums": Kernels(sums.prepare, sums.gradient_of, sums.prepare),
    "vectors": Kernels(vectors.prepare, vectors.gradient_of, vectors.prepare_few),
    "network": Kernels(fire.prepare, fire.gradient_of, fire.prepare),
    # The keys of few queries are not split: gates are counted one after the other.
    "levels": Kernels(cope.prepare, cope.gradient_of, lambda walks: None),
}


def plan_forward(args: Any, call: Call, plan: Plan, target: Target) -> None:
    """Make the output, the log-sum-exp, and the pruned ranges of keys of a kind that prunes."""
    plan.least, plan.most = STARTS
    out, lse, *ranges = plan.results
    walks, kernels = walks_of(args, call, plan, target), KINDS[call.kind]
    if is_short(walks.q, walks.k) and (few := kernels.prepare_few(walks)) is not None:
        launch_few(walks, few.bias, out, lse)
    else:
        pruned = ranges[0] if prunes(walks.q, walks.k, call) else None
        launch_forward(walks, kernels.prepare(walks), out, lse, pruned)


def plan_backward(args: Any, call: Call, plan: Plan, target: Target) -> None:
    """Make the gradients of q, k, v and the bias."""
    dq, dk, dv, *to_bias = plan.results
    walks, kernels = walks_of(args, call, plan, target), KINDS[call.kind]
    prepared, above = kernels.prepare(walks), above_of(walks, args)
    gradient = Gradient(prepared.bias)
    if call.to_bias:
        to = dict(zip(call.bias._fields, to_bias, strict=False))
        gradient = kernels.gradient_of(walks, prepared, above, to)
    ranges = whole(plan, args.ranges) if prunes(walks.q, walks.k, call) else NOTHING
    launch_backward(walks, prepared.tiles, above, (dq, dk, dv), gradient, ranges)


def prunes(q: Operand, k: Operand, call: Call) -> bool:
    """Whether far keys are left out."""
    return call.prunes and k.shape[2] >= PRUNE_FROM and not is_short(q, k)
