"""ALiBi's slope of each head, and the distance from which a head's keys may be pruned."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def head_slopes(num_heads: int, bias_max: float = 8.0, *, geometric: bool = False) -> Tensor:
    r"""Slope of each head in float64, in the paper's order.

    For ``n`` heads, a power of two, :math:`m_h = 2^{-B h / n}` with :math:`h = 1, \dots, n`.
    For other counts, with ``c`` the power of two below ``n``: the slopes of ``c`` heads, then
    every second slope of ``2c`` heads, from the first, until there are ``n``.

    Args:
        num_heads: Heads, positive.
        bias_max: :math:`B`: the last head's slope is :math:`2^{-B}`.
        geometric: Use the one geometric sequence :math:`2^{-B h / n}` for every ``n``.

    Returns:
        float64 of shape ``[H]``.

    Examples:
        >>> head_slopes(3)
        tensor([0.0625, 0.0039, 0.2500], dtype=torch.float64)
        >>> head_slopes(3, geometric=True)
        tensor([0.1575, 0.0248, 0.0039], dtype=torch.float64)

    References:
        Press et al., *Train Short, Test Long*, 2022, section 3 and the authors' code.
    """
    n = num_heads if geometric else 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-bias_max * h / n) for h in range(1, n + 1)]
    slopes += [2.0 ** (-bias_max * h / (2 * n)) for h in range(1, 2 * (num_heads - n), 2)]
    return torch.tensor(slopes, dtype=torch.float64, device="cpu")


def window_length(
    slopes: Tensor, gap: Tensor | float, keys: int, dtype: torch.dtype, *, causal: bool = True
) -> Tensor:
    r"""Distance from which keys may be pruned from the softmax, in tokens.

    With a query's own key among those it sees, and no score more than :math:`g` above that
    key's, the keys at distance :math:`w` and more have together at most the weight

    .. math:: \delta \le s \, e^{g - m w} \min\!\left(K, \frac{1}{1 - e^{-m}}\right)

    for ``s`` sides. Here :math:`\delta \le \epsilon / 8`, with :math:`\epsilon` the spacing of
    ``dtype`` at one, so the output moves by less than half an ulp at the largest value it
    averages; ``docs/alibi.md`` has the proof.

    Args:
        slopes: :math:`m`. Where it is not above zero, nothing is pruned.
        gap: :math:`g`, to broadcast with ``slopes``. Where it is not finite, nothing is pruned.
        keys: ``K``, which bounds how many are pruned.
        dtype: Of the output.
        causal: Whether keys are on one side of the query only.

    Returns:
        :math:`w`, whole numbers from 1 to ``keys`` in the dtype of ``slopes``.

    Examples:
        >>> slopes = head_slopes(4)
        >>> window_length(slopes, 20.0, 32_768, torch.bfloat16)
        tensor([ 114.,  476., 1991., 8315.], dtype=torch.float64)
        >>> window_length(slopes, 20.0, 1_000, torch.bfloat16)
        tensor([ 114.,  476., 1000., 1000.], dtype=torch.float64)
    """
    sides = 1 if causal else 2
    spare = math.log(8 * sides / torch.finfo(dtype).eps)
    count = (-torch.expm1(-slopes)).clamp(min=1 / max(keys, 1)).log().neg()
    # The factor covers the roundings of this line in float32.
    distance = ((gap + spare + count) / slopes * (1 + 2**-20)).ceil()
    # A comparison with NaN is false, so a head without a bound keeps every key.
    bounded = (slopes > 0) & (distance < keys)
    return torch.where(bounded, distance, torch.full_like(distance, keys)).clamp(min=1)
