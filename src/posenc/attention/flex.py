"""ALiBi attention by FlexAttention: the bound, the block mask and the kernel in one graph."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posenc._contract.tracing import dynamo
from posenc.attention.blocks import BLOCK, block_mask
from posenc.attention.mods import as_int32, bias_mod, visible_mod
from posenc.attention.pruning import Plan, needed_keys
from posenc.kernels import triton

# Graphs that may be compiled before a call falls back to chunks.
LIMIT = 64


def can_run(q: Tensor, v: Tensor) -> bool:
    """Whether FlexAttention has a kernel for these: CUDA, no float64, heads of 16 and wider."""
    return (
        q.device.type == "cuda"
        and q.dtype != torch.float64
        and min(q.shape[-1], v.shape[-1]) >= 16
        and min(q.shape[:3]) > 0
        and triton.installed
    )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, offset: Tensor, plan: Plan, *, grad: bool, general: bool
) -> Tensor:
    """Attention as one graph, with the int32 ``offset`` of the first query.

    ``grad`` says that a backward pass may follow. ``general`` takes FlexAttention's general kernel
    for short queries too: the decoding kernel of torch 2.11 does not compile in a larger graph,
    where slopes and offset may be made in the graph.
    """
    from torch.nn.attention.flex_attention import flex_attention

    keys = k.shape[2]
    seen, low, high = needed_keys(q, k, offset, plan)
    sees = visible_mod(offset, plan.ends, plan.causal)
    mask = block_mask(seen, low, high, keys, sees, block=BLOCK, grad=grad)
    score_mod = bias_mod(plan.slopes, offset, plan.causal)
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True} if general else None
    gqa = q.shape[1] != k.shape[1]
    return flex_attention(
        q, k, v, score_mod, mask, scale=plan.scale, enable_gqa=gqa, kernel_options=options
    )


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    # With fullgraph, the recompile limit raises; without, the call would run eagerly, in L × L.
    return torch.compile(_attend, fullgraph=True)


# Kinds of calls that did not compile, so that each kind is tried once.
_refused: set[object] = set()


def attend(q: Tensor, k: Tensor, v: Tensor, start: int | Tensor, plan: Plan) -> Tensor | None:
    """Compiled attention; None and a warning if neither kernel compiles.

    Short queries get FlexAttention's decoding kernel, or, if that does not compile, the general
    one, which is slower for them.
    """
    offset = as_int32(start, q.device)
    plan = Plan(plan.slopes.float(), *plan[1:])
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if torch.compiler.is_compiling():
        return _attend(q, k, v, offset, plan, grad=grad, general=True)
    config, exc = dynamo()
    shape = q.shape[2] < BLOCK, q.shape[3], v.shape[3], q.shape[1] // k.shape[1]
    for general in (False, True):
        kind = q.dtype, shape, plan.causal, plan.prune, plan.aligned, grad, general
        if kind in _refused:
            continue
        try:
            # Each combination of causal, documents, gradients and so on is a graph.
            with config.patch(recompile_limit=LIMIT):
                return _compiled()(q, k, v, offset, plan, grad=grad, general=general)
        except exc.TorchDynamoException as error:
            _refused.add(kind)
            reason = [*str(error).strip().splitlines(), type(error).__name__][0]
        except exc.FailOnRecompileLimitHit:
            reason = f"there are {LIMIT} graphs already"
        if general:
            problem = "FlexAttention did not compile, and attention runs in chunks instead"
            warnings.warn(f"{problem}: {reason}", RuntimeWarning, stacklevel=4)
    return None
