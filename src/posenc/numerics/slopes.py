"""ALiBi's slope of each head, and the distance from which a head's keys may be pruned."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def head_slopes(num_heads: int, bias_max: float = 8.0, *, geometric: bool = False) -> Tensor:
    """The numbers of :func:`slope_numbers` as a tensor ``[H]``, in float64."""
    numbers = slope_numbers(num_heads, bias_max, geometric=geometric)
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def slope_numbers(
    num_heads: int, bias_max: float = 8.0, *, geometric: bool = False
) -> tuple[float, ...]:
    r"""Slope of each head, in the paper's order.

    For ``n`` heads, a power of two, :math:`m_h = 2^{-B h / n}` with :math:`h = 1, \dots, n`;
    ``geometric`` takes that for every ``n``. For other counts the paper's code has, with ``c`` the
    power of two below ``n``, the slopes of ``c`` heads, then every second slope of ``2c`` heads.

    Examples:
        >>> slope_numbers(3)
        (0.0625, 0.00390625, 0.25)
        >>> slope_numbers(2, 4.0)
        (0.25, 0.0625)

    References:
        Press et al., *Train Short, Test Long*, 2022, section 3 and the authors' code.
    """
    n = num_heads if geometric else 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-bias_max * h / n) for h in range(1, n + 1)]
    slopes += [2.0 ** (-bias_max * h / (2 * n)) for h in range(1, 2 * (num_heads - n), 2)]
    return tuple(slopes)


def window_length(
    slopes: Tensor, gap: Tensor | float, keys: int, dtype: torch.dtype, *, causal: bool = True
) -> Tensor:
    r"""Distance from which keys may be pruned from the softmax, in tokens.

    With a query's own key among those it sees, and no score more than :math:`g` above that
    key's, the keys at distance :math:`w` and more have together at most the weight

    .. math:: \delta \le s \, e^{g - m w} \min\!\left(K, \frac{1}{1 - e^{-m}}\right)

    for ``s`` sides, one if ``causal``. Here :math:`\delta \le \epsilon / 8`, with :math:`\epsilon`
    the spacing of ``dtype`` at one, so the output moves by less than half an ulp at the largest
    value it averages; ``docs/alibi.md`` has the proof.

    Nothing is pruned where the slope is not above zero, or ``gap``, :math:`g`, is not finite.

    Returns:
        :math:`w`, whole numbers from 1 to ``keys``, :math:`K`, in the dtype of ``slopes``.

    Examples:
        >>> slopes = head_slopes(4)
        >>> window_length(slopes, 20.0, 32_768, torch.bfloat16)
        tensor([ 114.,  476., 1991., 8315.], dtype=torch.float64)
    """
    sides = 1 if causal else 2
    spare = math.log(8 * sides / torch.finfo(dtype).eps)
    count = (-torch.expm1(-slopes)).clamp(min=1 / max(keys, 1)).log().neg()
    # The factor covers the roundings of this line in float32.
    distance = ((gap + spare + count) / slopes * (1 + 2**-20)).ceil()
    # A comparison with NaN is false, so a head without a bound keeps every key.
    bounded = (slopes > 0) & (distance < keys)
    return torch.where(bounded, distance, torch.full_like(distance, keys)).clamp(min=1)
