"""ALiBi attention in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from posenc.attention.biased import AttentionOptions, attend
from posenc.attention.biases import Slopes

if TYPE_CHECKING:
    from typing_extensions import Unpack


def alibi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    *,
    causal: bool = True,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    r"""Attention with ALiBi, without an ``L × L`` matrix and without far keys.

    .. math:: \sum_j \text{softmax}_j(s\, q_i \cdot k_j - m\,|i - j|)\, v_j

    Far keys are pruned where their weights together are provably below the rounding of the output;
    see ``docs/alibi.md``. Gradients reach ``slopes`` too.

    Args:
        q: ``(B, H, Q, D)``.
        k: ``(B, Hk, K, D)`` with ``H`` a multiple of ``Hk`` and ``K`` at least ``Q``.
        v: ``(B, Hk, K, Dv)``.
        slopes: ``(H,)`` or ``(B, H)``.
        causal: Whether a query sees only keys up to its own.
        **options: ``scale``, ``query_offset``, ``document_ids``, ``window``, ``attn_mask``,
            ``dropout_p``, ``prune`` and ``backend``, as in :func:`biased_attention`.

    Returns:
        ``(B, H, Q, Dv)`` in the dtype of ``q``.

    Examples:
        >>> import torch
        >>> from posenc.functional import alibi_slopes
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> alibi_attention(q, k, v, alibi_slopes(8)).shape
        torch.Size([1, 8, 512, 64])
    """
    who = "alibi_attention"
    return attend(who, q, k, v, Slopes(slopes), causal=causal, **options)[0]
