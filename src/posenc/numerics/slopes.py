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
    """The slopes that :func:`posenc.functional.alibi_slopes` describes, as floats."""
    n = num_heads if geometric else 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-bias_max * h / n) for h in range(1, n + 1)]
    slopes += [2.0 ** (-bias_max * h / (2 * n)) for h in range(1, 2 * (num_heads - n), 2)]
    return tuple(slopes)


def window_length(
    slopes: Tensor, gap: Tensor | float, keys: int, dtype: torch.dtype, *, causal: bool = True
) -> Tensor:
    r"""Distance :math:`w` from which keys may be pruned, whole numbers in the dtype of ``slopes``.

    If a query sees its own key, and no score is more than ``gap``, :math:`g`, above that key's,
    then all keys at distance :math:`w` and more have together at most the weight

    .. math:: \delta \le s \, e^{g - m w} \min\!\left(K, \frac{1}{1 - e^{-m}}\right)

    for ``s`` sides, one if ``causal``. This :math:`w` makes :math:`\delta \le \epsilon / 8`, with
    :math:`\epsilon` the spacing of ``dtype`` at one: the output changes by less than half an ulp
    of the largest value it averages (proof in ``docs/alibi.md``). Where the slope is not above
    zero, or the gap not finite, :math:`w = K`, and nothing is pruned.
    """
    sides = 1 if causal else 2
    spare = math.log(8 * sides / torch.finfo(dtype).eps)
    count = (-torch.expm1(-slopes)).clamp(min=1 / max(keys, 1)).log().neg()
    # The factor covers the roundings of this line in float32.
    distance = ((gap + spare + count) / slopes * (1 + 2**-20)).ceil()
    # A comparison with NaN is false, so a head without a bound keeps every key.
    bounded = (slopes > 0) & (distance < keys)
    return torch.where(bounded, distance, torch.full_like(distance, keys)).clamp(min=1)
