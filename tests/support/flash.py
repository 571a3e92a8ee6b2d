"""The door to the one flash attention, until it is measured on a GPU and is the only one."""

from collections import OrderedDict

from posenc.ops import execute


def use_one_attention(put, target):
    """Let plans of attention be those of `triton.flash`; ``put`` sets an attribute."""
    from posenc.ops.attention.triton import attention, cope, terms
    from posenc.ops.attention.triton.flash import plans

    put(attention, "plan_forward", plans.plan_forward)
    put(attention, "plan_backward", plans.plan_backward)
    for module in (terms, cope):
        put(module, "plan_forward", lambda *given: plans.plan_terms_forward(*given, target))
        put(module, "plan_backward", lambda *given: plans.plan_terms_backward(*given, target))
    put(execute, "_plans", OrderedDict())
