"""The door to the one flash attention, until it is measured on a GPU and is the only one."""

from collections import OrderedDict

from posenc.ops import execute


def use_one_attention(put):
    """Let plans of attention be those of `triton.flash`; ``put`` sets an attribute."""
    from posenc.ops.attention.triton import plans
    from posenc.ops.attention.triton.flash import plans as flash

    put(plans, "plan_forward", flash.plan_forward)
    put(plans, "plan_backward", flash.plan_backward)
    put(execute, "_plans", OrderedDict())
