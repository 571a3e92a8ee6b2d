"""ALiBi attention through FlexAttention, compiled: the bound, the block mask and the kernel."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posenc.attention.blocks import BLOCK, block_mask
from posenc.attention.mods import bias_mod, span_mod
from posenc.attention.windows import needed


def can_run(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether FlexAttention has a kernel for these: CUDA, no float64, heads of 16 and wider."""
    return (
        q.device.type == "cuda"
        and q.dtype != torch.float64
        and min(q.shape[-1], v.shape[-1]) >= 16
        and min(q.shape[:3]) > 0
        and _has_triton()
    )


@functools.cache
def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return bool(has_triton())


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    offset: Tensor | None,
    documents: Tensor | None,
    bound: Tensor | None,
    scale: float,
    *,
    causal: bool,
    windowed: bool,
    grad: bool,
) -> Tensor:
    """Attention as one graph; what it takes is checked.

    Args:
        q: ``[B, H, Q, D]``.
        k: ``[B, Hk, K, D]``.
        v: ``[B, Hk, K, Dv]``.
        slopes: float32 ``[H]`` or ``[B, H]``.
        offset: Key of the first query, ``[]`` or ``[B]``; None puts the last at the last.
        documents: Ids ``[K]`` or ``[B, K]``.
        bound: Of the scores, ``[1 or B, 1 or H]``; None computes one for each query.
        scale: Of the scores.
        causal: Whether a query sees only keys up to its own.
        windowed: Whether far keys are left out.
        grad: Whether a backward pass may follow.
    """
    from torch.nn.attention.flex_attention import flex_attention

    queries, keys = q.shape[2], k.shape[2]
    start = keys - queries if offset is None else offset
    seen, low, high = needed(
        q, k, slopes, start, documents, bound, scale, causal=causal, windowed=windowed
    )
    mask = block_mask(seen, low, high, keys, span_mod(seen), block=BLOCK, grad=grad)
    if offset is None:
        offset = torch.full((), keys - queries, dtype=torch.int32, device=q.device)
    score_mod = bias_mod(slopes, offset, causal=causal)
    gqa = q.shape[1] != k.shape[1]
    return flex_attention(q, k, v, score_mod, mask, scale=scale, enable_gqa=gqa)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    # fullgraph: past the recompile limit an error comes, not the uncompiled L × L.
    return torch.compile(attend, fullgraph=True)


def attend_compiled(*args: Any, **flags: Any) -> Tensor | None:
    """:func:`attend`, compiled; None where the compiler gives up, with a warning."""
    if torch.compiler.is_compiling():
        return attend(*args, **flags)
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        return _compiled()(*args, **flags)
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        reason = str(error).strip().splitlines()
        warnings.warn(
            "FlexAttention did not compile, and attention runs in chunks instead: "
            + (reason[0] if reason else type(error).__name__),
            RuntimeWarning,
            stacklevel=4,
        )
        return None
