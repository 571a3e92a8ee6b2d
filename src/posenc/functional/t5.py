"""The buckets of distances of T5's bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posenc._contract import checks


def t5_buckets(
    distance: Tensor, num_buckets: int = 32, max_distance: int = 128, *, causal: bool = False
) -> Tensor:
    r"""The bucket of each distance :math:`n = i - j` between query :math:`i` and key :math:`j`.

    .. math::
        \begin{cases} n & n < e \\
        \min\!\left(e + \left\lfloor \frac{\ln(n / e)}{\ln(m / e)}\,(b - e) \right\rfloor,
        b - 1\right) & n \ge e \end{cases}

    for :math:`b` buckets, :math:`e = b / 2` of them for one distance each, and :math:`m` the
    ``max_distance``. If causal, later keys are in bucket zero; otherwise half of the buckets are
    for :math:`|n|` of later keys, after those of earlier ones. The logarithm is computed in
    float32, as published, because the floor decides at whole powers.

    Args:
        distance: An integer tensor.
        num_buckets: All buckets; even, unless causal.
        max_distance: The distance from which all are in one bucket.
        causal: Whether later keys need no buckets.

    Returns:
        An int64 tensor with the shape of ``distance``.

    Examples:
        >>> t5_buckets(torch.tensor([0, 1, 20, 500, -1]))
        tensor([ 0,  1, 10, 15, 17])

    References:
        Raffel et al., *Exploring the Limits of Transfer Learning*, 2020, section 2.1.
    """
    who = "t5_buckets"
    if not isinstance(distance, Tensor) or distance.dtype not in checks.INT_DTYPES:
        rule, got = "distance must be an integer tensor", checks.describe(distance)
        checks.fail(who, rule, got, "Pass int64 indices of queries minus those of keys.", TypeError)
    check_buckets(who, num_buckets, max_distance, causal=causal)
    count = num_buckets if causal else num_buckets // 2
    far = distance.long().clamp(min=0) if causal else distance.long().abs()
    exact = count // 2
    # The logarithm of zero is not used, but must be a number that can be an integer.
    ratio = (far.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    large = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
    bucket = torch.where(far < exact, far, large)
    return bucket if causal else bucket + count * (distance < 0)


def check_buckets(who: str, num_buckets: int, max_distance: int, *, causal: bool) -> None:
    """Refuse numbers for which the formula has no value."""
    least = 2 if checks.boolean(who, "causal", causal) else 4
    buckets = checks.integer(who, "num_buckets", num_buckets, least=least)
    if buckets % 2 and not causal:
        rule = "num_buckets must be even, half of them for each side"
        checks.fail(who, rule, buckets, f"Pass {buckets + 1}, or causal=True.")
    exact = buckets // least
    if checks.integer(who, "max_distance", max_distance) <= exact:
        rule = f"max_distance must be above {exact}, the distances with a bucket of their own"
        checks.fail(who, rule, max_distance, "Pass fewer buckets, or LearnedBias instead.")
