"""ALiBi's slope of each head."""

from __future__ import annotations

import torch
from torch import Tensor


def head_slopes(num_heads: int, bias_max: float = 8.0, *, plain: bool = False) -> Tensor:
    r"""Slope of each head in float64, in the paper's order.

    For ``n`` heads, a power of two, :math:`m_h = 2^{-B h / n}` with :math:`h = 1, \dots, n`.
    For other counts, with ``c`` the power of two below ``n``: the slopes of ``c`` heads, then
    every second slope of ``2c`` heads, from the first, until there are ``n``.

    Args:
        num_heads: Heads, positive.
        bias_max: :math:`B`: the last head's slope is :math:`2^{-B}`.
        plain: Use the plain sequence :math:`2^{-B h / n}` for every ``n``.

    Returns:
        float64 of shape ``[H]``.

    Examples:
        >>> head_slopes(3)
        tensor([0.0625, 0.0039, 0.2500], dtype=torch.float64)
        >>> head_slopes(3, plain=True)
        tensor([0.1575, 0.0248, 0.0039], dtype=torch.float64)

    References:
        Press et al., *Train Short, Test Long*, 2022, section 3 and the authors' code.
    """
    whole = num_heads if plain else 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-bias_max * h / whole) for h in range(1, whole + 1)]
    odd = range(1, 2 * (num_heads - whole), 2)
    slopes += [2.0 ** (-bias_max * h / (2 * whole)) for h in odd]
    return torch.tensor(slopes, dtype=torch.float64, device="cpu")
