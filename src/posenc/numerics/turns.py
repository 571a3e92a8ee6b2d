"""Turns of continuous coordinates: products modulo one, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posenc._contract.sharding import replicate_like
from posenc.numerics.constants import constant
from posenc.numerics.frequencies import Spectrum, turn_steps

# Numbers of at most 24 bits: the product of two is exact in float64.
_SHORT = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.int8, torch.uint8)
)
# The lower 27 bits of a float64's fraction, and digits of whole numbers.
_LOWER = 2**27 - 1
_DIGIT = 2**22


def turns(x: Tensor, rates: Tensor) -> Tensor:
    r"""``x * rates``, broadcast, less whole turns: float64, between -6 and 6.

    Both are cut into parts of at most 27 bits, whose products are exact; whole turns are taken
    from each product before they are summed. The error is below 2.3e-15 turns for any integers
    and floats whose product is below :math:`2^{52}` turns. Gradients pass to both.

    Examples:
        >>> turns(torch.tensor([10**18 + 1]), torch.tensor([0.25]))
        tensor([0.2500], dtype=torch.float64)
    """
    return _summed(_parts(x), _parts(replicate_like(x, rates)))


def angles_of_floats(positions: Tensor, spectrum: Spectrum) -> Tensor:
    r""":math:`p\,\theta_i` less whole turns for floating positions: float64 ``[..., P]``.

    The rates, which are at most 1, are cut into digits of 22 bits and a rest, so that an angle is
    as exact as that of a whole position.
    """
    at, (steps, rests) = positions.unsqueeze(-1), turn_steps(spectrum)
    last = [(step & (2**20 - 1)) + rest for step, rest in zip(steps, rests, strict=True)]
    digits = (
        tuple([(step >> 42) * 2.0**-22 for step in steps]),
        tuple([((step >> 20) & (_DIGIT - 1)) * 2.0**-44 for step in steps]),
        tuple([units * 2.0**-64 for units in last]),
    )
    rates = [replicate_like(at, constant(d, torch.float64, at.device)) for d in digits]
    return _summed(_parts(at), rates).mul_(math.tau)


def angles_of_mixtures(x: Tensor, matrix: Tensor) -> Tensor:
    r""":math:`2\pi B x` less whole turns: ``[..., A]`` and ``[F, A]`` to float64 ``[..., F]``."""
    total = turns(x[..., 0, None], matrix[:, 0])
    for axis in range(1, matrix.shape[1]):
        total.add_(turns(x[..., axis, None], matrix[:, axis]))
    return total.mul_(math.tau)


def _summed(xs: list[Tensor], rates: list[Tensor]) -> Tensor:
    """The sum of all products, less whole turns of each."""
    pairs = [(a, b) for a in xs for b in rates]
    # In place: for many points, new memory costs more than the arithmetic.
    total = (pairs[0][0] * pairs[0][1]).frac_()
    for a, b in pairs[1:]:
        total.add_((a * b).frac_())
    return total


def _parts(x: Tensor) -> list[Tensor]:
    """float64 numbers that add up to ``x``; the last part passes its gradient."""
    if x.dtype in _SHORT:
        return [x.to(torch.float64)]
    if x.dtype is torch.float64:
        high = (x.detach().view(torch.int64) & ~_LOWER).view(torch.float64)
        return [high, x - high]
    low = x & (_DIGIT - 1)
    if x.dtype is torch.int32:
        return [low.to(torch.float64), (x - low).to(torch.float64)]
    middle = (x - low) & (_DIGIT**2 - 1)
    return [part.to(torch.float64) for part in (low, middle, x - low - middle)]
