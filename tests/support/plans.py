"""Calls of ops by their plans, which Python carries out: on a GPU, or in Triton's interpreter."""

import torch

from posenc.ops.attention.op import OPS, arguments
from posenc.ops.plan import Target, plan_of


def planned(op, *call):
    """The results of a call, a tuple of tensors."""
    from posenc.ops import execute

    return execute.run(op, op.call(*call), None)


def planned_attention(q, k, v, call):
    """The output, the log-sum-exp, and the ranges of keys of a kind that prunes."""
    return planned(OPS[type(call.bias)].forward, q, k, v, *arguments(call))


def planned_gradients(g, g_lse, saved, call, to_bias):
    """The gradients of q, k, v and the bias, from the inputs and results ``saved``."""
    q, k, v, *results = saved
    given = g, g_lse, *results, q, k, v, *arguments(call._replace(to_bias=to_bias))
    gradients = planned(OPS[type(call.bias)].backward, *given)
    return gradients if to_bias else gradients[:3]


H200 = Target("nvidia", (9, 0), 132)


def plan_for(op, *call, target=H200):
    """The plan of a call, whose tensors may be of any device."""
    with torch.no_grad():
        return plan_of(op, op.call(*call), target)
