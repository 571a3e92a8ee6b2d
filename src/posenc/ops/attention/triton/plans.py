"""The plans of attention: the kernels of each kind of bias."""

from __future__ import annotations

from typing import Any

from posenc.ops.attention.call import Call
from posenc.ops.attention.triton import attention, cope, terms
from posenc.ops.plan import Plan, Target

_OF_TERMS = {"vectors": terms, "network": terms, "levels": cope}


def plan_forward(args: Any, call: Call, plan: Plan, target: Target) -> None:
    """Make the output, the log-sum-exp, and the pruned ranges of keys of a kind that prunes."""
    if (kernels := _OF_TERMS.get(call.kind)) is not None:
        kernels.plan_forward(args, call, plan)
    else:
        attention.plan_forward(args, call, plan, target)


def plan_backward(args: Any, call: Call, plan: Plan, target: Target) -> None:
    """Make the gradients of q, k, v and the bias."""
    if (kernels := _OF_TERMS.get(call.kind)) is not None:
        kernels.plan_backward(args, call, plan)
    else:
        attention.plan_backward(args, call, plan, target)
