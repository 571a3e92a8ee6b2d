"""ALiBi attention through FlexAttention, compiled: the bound, the block mask and the kernel."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posenc.attention.blocks import BLOCK, block_mask
from posenc.attention.mods import bias_mod, pair_mod
from posenc.attention.windows import needed
from posenc.kernels import triton
from posenc.numerics.spans import Ends

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


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    offset: Tensor,
    ends: Ends | None,
    bound: Tensor | None,
    scale: float,
    *,
    aligned: bool,
    causal: bool,
    windowed: bool,
    grad: bool,
    inlined: bool = False,
) -> Tensor:
    """Attention as one graph; what it takes is checked.

    Everything that the kernel reads beside ``q``, ``k`` and ``v`` is a tensor from outside: the
    decoding kernel of torch 2.11 does not compile with one made in the graph.

    Args:
        q: ``[B, H, Q, D]``.
        k: ``[B, Hk, K, D]``.
        v: ``[B, Hk, K, Dv]``.
        slopes: float32 ``[H]`` or ``[B, H]``.
        offset: Key of the first query, int32 ``[]`` or ``[B]``.
        ends: First and last key of each key's document, ``[K]`` or ``[B, K]``.
        bound: Of the scores, ``[1 or B, 1 or H]``; None computes one for each query.
        scale: Of the scores.
        aligned: Whether the offset is ``K - Q``, so that a query's own key is a slice.
        causal: Whether a query sees only keys up to its own.
        windowed: Whether far keys are left out.
        grad: Whether a backward pass may follow.
        inlined: Whether this is part of a larger graph, which makes the tensors itself.
    """
    from torch.nn.attention.flex_attention import flex_attention

    queries, keys = q.shape[2], k.shape[2]
    start = keys - queries if aligned else offset
    seen, low, high = needed(
        q, k, slopes, start, ends, bound, scale, causal=causal, windowed=windowed
    )
    sees = pair_mod(offset, ends, causal)
    mask = block_mask(seen, low, high, keys, sees, block=BLOCK, grad=grad)
    score_mod = bias_mod(slopes, offset, causal=causal)
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True} if inlined else None
    gqa = q.shape[1] != k.shape[1]
    return flex_attention(
        q, k, v, score_mod, mask, scale=scale, enable_gqa=gqa, kernel_options=options
    )


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    # fullgraph: past the recompile limit an error comes, not the uncompiled L × L.
    return torch.compile(attend, fullgraph=True)


# Kinds of call that did not compile, so that nobody waits for it again.
_refused: set[object] = set()


def attend_compiled(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **flags: Any) -> Tensor | None:
    """:func:`attend`, compiled; None and a warning where the compiler gives up.

    A short query gets FlexAttention's decoding kernel. If that does not compile, the other one
    is tried, which costs more and takes everything.
    """
    if torch.compiler.is_compiling():
        return attend(q, k, v, *rest, **flags, inlined=True)
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    shape = q.shape[2] < BLOCK, q.shape[3], v.shape[3], q.shape[1] // k.shape[1]
    for inlined in (False, True):
        kind = q.dtype, shape, tuple(flags.items()), inlined
        if kind in _refused:
            continue
        try:
            # Each kind of call is a graph of its own: causal or not, documents, gradients.
            with config.patch(recompile_limit=LIMIT):
                return _compiled()(q, k, v, *rest, **flags, inlined=inlined)
        except TorchDynamoException as error:
            _refused.add(kind)
            reason = [*str(error).strip().splitlines(), type(error).__name__][0]
        except FailOnRecompileLimitHit:
            reason = f"there are {LIMIT} graphs already"
        if inlined:
            start = "FlexAttention did not compile, and attention runs in chunks instead"
            warnings.warn(f"{start}: {reason}", RuntimeWarning, stacklevel=4)
    return None
