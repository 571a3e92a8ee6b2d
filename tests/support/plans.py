"""Calls of ops by their plans, which Python carries out: on a GPU, or in Triton's interpreter."""

import torch

from posenc.ops.attention.op import attend_backward_op, attend_op
from posenc.ops.plan import Target, plan_of


def planned(op, *call):
    """The results of a call, a tuple of tensors."""
    from posenc.ops import execute

    return execute.run(op, op.call(*call), None)


def planned_attention(q, k, v, call):
    """The output, the log-sum-exp and the pruned ranges of the call of an attention."""
    return planned(attend_op, q, k, v, *call.arguments())


def planned_gradients(g, g_lse, saved, call, to_values):
    """The gradients of q, k, v and the bias's numbers, from the inputs and results ``saved``."""
    call = call._replace(to_values=to_values and call.values is not None)
    dq, dk, dv, to = planned(attend_backward_op, g, g_lse, *saved, *call.arguments())
    return dq, dk, dv, to if call.to_values else None


H200 = Target("nvidia", (9, 0), 132)


def plan_for(op, *call, target=H200):
    """The plan of a call, whose tensors may be of any device."""
    with torch.no_grad():
        return plan_of(op, op.call(*call), target)
