"""The plans of attention: which kind of bias a call has, and the walks that it takes."""

from __future__ import annotations

from typing import Any, NamedTuple

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


PREPARE = {
    "none": _prepare_none,
    "slopes": slopes.prepare,
    "table": table.prepare,
    "sums": sums.prepare,
}
# For few queries a table is read as it is.
PREPARE_FEW = {**PREPARE, "table": table.prepare_few}
GRADIENTS = {
    "slopes": slopes.gradient_of,
    "table": table.gradient_of,
    "sums": sums.gradient_of,
}


def plan_forward(given: Any, call: Any, plan: Plan, target: Target) -> None:
    """Make the output, the log-sum-exp, and the pruned ranges of keys, if they are pruned."""
    plan.least, plan.most = STARTS
    out, lse, ranges = plan.results
    walks = walks_of(given, call, plan, target)
    if is_short(walks.q, walks.k):
        launch_few(walks, PREPARE_FEW[call.kind](walks).bias, out, lse)
    else:
        prepared = PREPARE[call.kind](walks)
        is_pruned = prunes(walks.q, walks.k, call)
        launch_forward(walks, prepared, out, lse, ranges if is_pruned else None)


def plan_backward(given: Any, call: Any, plan: Plan, target: Target) -> None:
    """Make the gradients of q, k, v and the bias's numbers."""
    *results, to = plan.results
    walks = walks_of(given, call, plan, target)
    prepared, above = PREPARE[call.kind](walks), above_of(walks, given)
    gradient = Gradient(prepared.bias)
    if call.to_values and call.values is not None:
        gradient = GRADIENTS[call.kind](walks, prepared, to)
    ranges = whole(plan, given.ranges) if prunes(walks.q, walks.k, call) else NOTHING
    launch_backward(walks, prepared.tiles, above, results, gradient, ranges)


def prunes(q: Operand, k: Operand, call: Any) -> bool:
    """Whether far keys are left out."""
    wanted = call.prune and call.kind in ("slopes", "sums")
    return wanted and k.shape[2] >= PRUNE_FROM and not is_short(q, k)


def _terms_kind(given: Any) -> Any:
    if given.levels is not None:
        return cope
    return vectors if given.network is None else fire


def plan_terms_forward(given: Any, call: Any, plan: Plan, target: Target) -> None:
    """Make the output and the log-sum-exp of vectors, a network or levels."""
    plan.least, plan.most = STARTS
    out, lse = plan.results
    walks, kind = walks_of(given, call, plan, target), _terms_kind(given)
    if is_short(walks.q, walks.k) and _has_few(walks, given):
        launch_few(walks, kind.prepare_few(walks, given).bias, out, lse)
    else:
        launch_forward(walks, kind.prepare(walks, given), out, lse, None)


def _has_few(walks: Walks, given: Any) -> bool:
    """Whether the keys of few queries may be split: CoPE counts them one after the other."""
    rows = walks.q.shape[1] // walks.k.shape[1] * walks.q.shape[2]
    # Vectors for keys are read for each query.
    return given.levels is None and (given.for_keys is None or rows <= 8)


def plan_terms_backward(given: Any, call: Any, plan: Plan, target: Target) -> None:
    """Make the gradients of q, k, v, and of what the kind of bias has."""
    walks, kind = walks_of(given, call, plan, target), _terms_kind(given)
    prepared, above = kind.prepare(walks, given), above_of(walks, given)
    gradient = kind.gradient_of(walks, prepared, above, plan.results)
    launch_backward(walks, prepared.tiles, above, plan.results[:3], gradient, NOTHING)
