"""The plans of attention: the walks that a call takes, and what its bias does in them."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from posenc.ops.attention.biases.kind import axes_of
from posenc.ops.attention.call import Call
from posenc.ops.attention.triton.walks import (
    NOTHING,
    STARTS,
    Gradient,
    above_of,
    launch_backward,
    launch_few,
    launch_forward,
    walks_of,
    whole,
)
from posenc.ops.plan import Plan, Target


@functools.cache
def kernels_of(kind: Any) -> Any:
    """The module that says what a kind of bias does on a GPU: it has the name of the kind's file.

    ``prepare(walks)`` returns the bias as kernels get it, and ``prepare_few(walks)`` for few
    queries, or None if the walk over all keys serves these too. ``gradient_of(walks, prepared,
    above, results)`` gives it the places of its gradient.
    """
    return importlib.import_module(kind.__module__.replace(".biases.", ".triton."))


def plan_forward(args: Any, call: Call, plan: Plan, target: Target) -> None:
    """Make the output, the log-sum-exp, and the pruned ranges of keys of a kind that prunes."""
    plan.least, plan.most = STARTS
    out, lse, *ranges = plan.results
    kind: Any = type(call.bias)
    walks, kernels = walks_of(args, call, plan, target), kernels_of(kind)
    if walks.is_short and (few := kernels.prepare_few(walks)) is not None:
        launch_few(walks, few.bias, out, lse)
    else:
        pruned = ranges[0] if walks.prunes else None
        launch_forward(walks, kernels.prepare(walks), out, lse, pruned)


def plan_backward(args: Any, call: Call, plan: Plan, target: Target) -> None:
    """Make the gradients of q, k, v and the bias."""
    dq, dk, dv, *to_bias = plan.results
    kind: Any = type(call.bias)
    walks, kernels = walks_of(args, call, plan, target), kernels_of(kind)
    prepared, above = kernels.prepare(walks), above_of(walks, args)
    gradient = Gradient(prepared.bias)
    if call.to_bias:
        to = dict(zip(axes_of(kind), to_bias, strict=True))
        gradient = kernels.gradient_of(walks, prepared, above, to)
    ranges = whole(plan, args.ranges) if walks.prunes else NOTHING
    launch_backward(walks, prepared.tiles, above, (dq, dk, dv), gradient, ranges)
