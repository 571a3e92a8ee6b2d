"""ALiBi attention in one call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from posenc.attention.biased import attend
from posenc.attention.biases import Slopes


def alibi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    query_offset: int | Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    prune: bool = True,
    backend: str | None = None,
) -> Tensor:
    r"""Attention with ALiBi, without an ``L × L`` matrix and without far keys.

    .. math:: \sum_j \text{softmax}_j(s\, q_i \cdot k_j - m\,|i - j|)\, v_j

    Far keys are pruned where their weights together are provably below the rounding of the output;
    see ``docs/alibi.md``. Gradients reach ``slopes``, ``(H,)`` or ``(B, H)``, too. Other arguments,
    and the result, are those of :func:`biased_attention`.

    Examples:
        >>> import torch
        >>> from posenc.functional import alibi_slopes
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> alibi_attention(q, k, v, alibi_slopes(8)).shape
        torch.Size([1, 8, 512, 64])
    """
    how: Any = {"causal": causal, "scale": scale, "query_offset": query_offset}
    how |= {"document_ids": document_ids, "window": window}
    how |= {"attn_mask": attn_mask, "dropout_p": dropout_p, "prune": prune, "backend": backend}
    return attend("alibi_attention", q, k, v, Slopes(slopes), **how)[0]
