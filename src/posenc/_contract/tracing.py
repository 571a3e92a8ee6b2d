"""When a call is an ordinary eager one, so that values may be read and state may be kept."""

from __future__ import annotations

import torch
from torch import Tensor


def is_plain(x: Tensor) -> bool:
    """Whether ``x`` holds its own numbers: no compiler, transform, mode or subclass around it.

    Only then may a module store a table it built for ``x``: a traced, batched or fake table
    would outlive the trace it belongs to.
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and not in_transform(x)
    )


def in_transform(x: Tensor) -> bool:
    """Whether torch.func (vmap, jvp, grad) is at work, whose tensors have no values to look at."""
    if torch.compiler.is_compiling():
        return False
    # The second is what torch.autograd.grad(is_grads_batched=True) still uses.
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._functorch.is_legacy_batchedtensor(x)
    )


def is_readable(x: Tensor) -> bool:
    """Whether the values of ``x`` can be looked at now without waiting on a device."""
    return x.device.type == "cpu" and is_plain(x)
