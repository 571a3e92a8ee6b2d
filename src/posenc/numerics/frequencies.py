"""How fast each channel pair turns."""

from __future__ import annotations

import decimal
import operator
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

import torch
from torch import Tensor

# Enough for 64 bits of turn, 53 bits of residual and a safe margin.
_CONTEXT = decimal.Context(prec=60)
_TAU = Decimal("6.283185307179586476925286766559005768394338798750211641949889184615632812572")


@dataclass(frozen=True, slots=True)
class Spectrum:
    r"""The rates of a table: all that decides its numbers apart from the positions.

    .. math:: \theta_i = b^{-2i/d}, \qquad i = 0, \dots, \lceil d/2 \rceil - 1

    Attributes:
        dim: :math:`d`, the channels. Odd for a sinusoid whose last sine has no cosine.
        base: :math:`b`.
    """

    dim: int
    base: float = 10_000.0


def inverse_frequencies(dim: int, base: float = 10_000.0) -> Tensor:
    r"""Turning rate of each channel pair in radians per position, fastest first.

    .. math:: \theta_i = b^{-2i/d}, \qquad i = 0, \dots, d/2 - 1

    Stays in float64, each rate correctly rounded. Rounding the rates to float32 here would
    cost 0.03 rad at position 1 000 000 (d = 128).

    Args:
        dim: Channels to rotate, positive. An odd count has one more rate, for the last sine.
        base: :math:`b` above. Raising it slows every pair but the first.

    Returns:
        Rates of shape ``[P]`` with ``P = (dim + 1) // 2``.

    Examples:
        >>> inverse_frequencies(4)
        tensor([1.0000, 0.0100], dtype=torch.float64)

    References:
        Su et al., *RoFormer*, 2021, section 3.2.2.
    """
    rates = [float(rate) for rate in _exact_rates(Spectrum(dim, base))]
    return torch.tensor(rates, dtype=torch.float64)


def turn_steps(spectrum: Spectrum) -> tuple[tuple[int, ...], tuple[float, ...]]:
    r"""Rates in units of :math:`2^{-64}` turns per position: whole units, and what is left.

    .. math:: 2^{64} \theta_i / 2\pi = \text{step}_i + \text{rest}_i, \quad |\text{rest}_i| \le 1/2

    ``position * step`` in int64 wraps at exactly one turn, so it loses nothing at any position;
    ``rest`` is a float64 correction worth at most ``position / 2**65`` turns.

    Examples:
        >>> steps, rests = turn_steps(Spectrum(2))
        >>> steps[0] / 2**64  # one radian, in turns
        0.15915494309189535
    """
    # index() and hex() settle numbers that torch.compile would otherwise leave open.
    return _constant_steps(operator.index(spectrum.dim), spectrum.base.hex())


def _constant_steps(dim: int, base: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return _turn_steps(Spectrum(dim, float.fromhex(base)))


# What torch.compiler.assume_constant_result does, without importing the compiler for it.
_constant_steps._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Memoised on the whole description: 128 numbers each, and a few milliseconds to work out.
@lru_cache(maxsize=256)
def _turn_steps(spectrum: Spectrum) -> tuple[tuple[int, ...], tuple[float, ...]]:
    rates = _exact_rates(spectrum)
    with decimal.localcontext(_CONTEXT):
        units = [rate * 2**64 / _TAU for rate in rates]
        whole = [int(unit.to_integral_value(decimal.ROUND_HALF_EVEN)) for unit in units]
        rests = tuple(float(unit - step) for unit, step in zip(units, whole, strict=True))
    # A step of half a turn or more (base < 1) is stored as the negative it wraps to.
    return tuple((step + 2**63) % 2**64 - 2**63 for step in whole), rests


def _exact_rates(spectrum: Spectrum) -> list[Decimal]:
    pairs = (spectrum.dim + 1) // 2
    with decimal.localcontext(_CONTEXT):
        log_base = Decimal(spectrum.base).ln()
        return [(log_base * (-2 * i) / spectrum.dim).exp() for i in range(pairs)]
