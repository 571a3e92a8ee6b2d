"""How fast each channel pair turns."""

from __future__ import annotations

import decimal
import math
import operator
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from posenc._contract.tracing import constant_under_compile, without_modes
from posenc.numerics.axes import Axes
from posenc.numerics.constants import constant
from posenc.numerics.scaling import Rule

_TAU = Decimal("6.283185307179586476925286766559005768394338798750211641949889184615632812572")


@dataclass(frozen=True, slots=True)
class Spectrum:
    r"""The rates of a table: all that decides its numbers apart from the positions.

    .. math:: \theta_i = b^{-2i/d}, \qquad i = 0, \dots, \lceil d/2 \rceil - 1

    Attributes:
        dim: :math:`d`, the channels. Odd for a sinusoid whose last sine has no cosine.
        base: :math:`b`.
        scaling: What is done to the rates; the table is multiplied with its gain.
        axes: Which coordinate each pair follows, where positions have several.
    """

    dim: int
    base: float = 10_000.0
    scaling: Rule | None = None
    axes: Axes | None = None

    def width(self) -> int:
        """:math:`d` of the rates that the axes choose from."""
        return self.dim if self.axes is None else self.axes.width(self.dim)

    def gain(self, seq_len: Tensor | None = None) -> float | Tensor:
        """What cosines and sines are multiplied with."""
        return 1.0 if self.scaling is None else self.scaling.gain(seq_len)


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
    return scaled_rates(Spectrum(dim, float(base))).clone()


def scaled_rates(
    spectrum: Spectrum, device: torch.device | None = None, seq_len: Tensor | None = None
) -> Tensor:
    """The rate of each pair, after its rule and in the order of its axes, float64 ``[P]``.

    A rule is applied in float64; without one each rate is correctly rounded. With lengths in a
    tensor ``[...]``, which rules may depend on, the rates are ``[..., 1, P]``. They are not to be
    written to.

    Examples:
        >>> from posenc.numerics.scaling import Linear
        >>> scaled_rates(Spectrum(4, scaling=Linear(2.0)))
        tensor([0.5000, 0.0050], dtype=torch.float64)
    """
    device = torch.device("cpu") if device is None else device
    if seq_len is None or spectrum.scaling is None:
        if torch.compiler.is_compiling():
            rates = _constant_rates(*_frozen(spectrum))
        else:
            rates = _rounded_rates(spectrum)
        return constant(rates, torch.float64, device)
    plain = scaled_rates(Spectrum(spectrum.width(), spectrum.base), device)
    scaled, axes = spectrum.scaling(plain, spectrum.base, seq_len), spectrum.axes
    if axes is None:
        return scaled
    return scaled[..., constant(axes.rate_index(spectrum.dim // 2), torch.int64, device)]


def turn_steps(spectrum: Spectrum) -> tuple[tuple[int, ...], tuple[float, ...]]:
    r"""Rates in units of :math:`2^{-64}` turns per position: whole units below a turn, and a rest.

    .. math:: 2^{64} \theta_i / 2\pi = \text{step}_i + \text{rest}_i, \quad |\text{rest}_i| \le 1/2

    Whole turns are left out, so ``step`` is in :math:`[0, 2^{64})` and ``position * step`` modulo
    :math:`2^{64}` is exact; ``rest`` is a correction worth at most ``position / 2**65`` turns.

    Examples:
        >>> steps, rests = turn_steps(Spectrum(2))
        >>> steps[0] / 2**64  # one radian, in turns
        0.15915494309189535
    """
    if torch.compiler.is_compiling():
        return _constant_steps(*_frozen(spectrum))
    return _turn_steps(spectrum)


def _frozen(part: Any) -> Any:
    """A description of ``part`` that torch.compile takes for a constant.

    hex() and index() fix numbers that torch.compile would otherwise leave open. A rule of a user's
    own stays as it is, since its fields are not known.

    Examples:
        >>> from posenc.numerics.scaling import Linear
        >>> _frozen(Linear(2.0))
        (<class 'posenc.numerics.scaling.fixed.Linear'>, ('hex', '0x1.0000000000000p+1'))
    """
    if part is None or isinstance(part, (bool, str)):
        return part
    if isinstance(part, tuple):
        return tuple([_frozen(item) for item in part])
    if isinstance(part, float):
        return "hex", part.hex()
    if isinstance(part, int):
        return operator.index(part)
    if type(part).__module__.startswith("posenc."):
        return type(part), *[_frozen(getattr(part, name)) for name in part.__match_args__]
    return part


def _thawed(part: Any) -> Any:
    """What :func:`_frozen` was given."""
    if not isinstance(part, tuple):
        return part
    if part[:1] == ("hex",):
        return float.fromhex(part[1])
    items = [_thawed(item) for item in part]
    return items[0](*items[1:]) if part and isinstance(part[0], type) else tuple(items)


@constant_under_compile
def _constant_rates(*frozen: Any) -> tuple[float, ...]:
    return _rounded_rates(_thawed(frozen))


@constant_under_compile
def _constant_steps(*frozen: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return _turn_steps(_thawed(frozen))


# Memoised on the whole description: 128 numbers each, and a few milliseconds to work out.
@lru_cache(maxsize=256)
def _rounded_rates(spectrum: Spectrum) -> tuple[float, ...]:
    plainest = Spectrum(spectrum.width(), spectrum.base)
    if spectrum == plainest:
        return tuple(float(rate) for rate in _exact_rates(spectrum))
    # A rule that depends on the length asks for these at every token.
    rates = list(_rounded_rates(plainest))
    rule = spectrum.scaling
    if rule is not None:
        # Numbers, whatever a tracer around this would make of tensors.
        with without_modes():
            plain = torch.tensor(rates, dtype=torch.float64, device="cpu")
            rates = rule(plain, spectrum.base).tolist()
        if not all(map(math.isfinite, rates)):
            problem = f"{rule} makes rates that are not finite, with base {spectrum.base}"
            raise ValueError(f"{problem}.\n  Pass a factor closer to 1.")
    axes = spectrum.axes
    return tuple(rates if axes is None else [rates[i] for i in axes.rate_index(spectrum.dim // 2)])


@lru_cache(maxsize=256)
def _turn_steps(spectrum: Spectrum) -> tuple[tuple[int, ...], tuple[float, ...]]:
    if spectrum.scaling is None:
        rates, axes = _exact_rates(Spectrum(spectrum.width(), spectrum.base)), spectrum.axes
        if axes is not None:
            rates = [rates[i] for i in axes.rate_index(spectrum.dim // 2)]
    else:
        rates = [Decimal(rate) for rate in _rounded_rates(spectrum)]
    # 60 digits hold 64 bits of turn, 53 of rest and a margin; a rate above 1 has whole turns too.
    digits = max(0, *(rate.adjusted() for rate in rates))
    with decimal.localcontext(decimal.Context(prec=60 + digits)):
        units = [rate * 2**64 / _TAU for rate in rates]
        whole = [int(unit.to_integral_value(decimal.ROUND_HALF_EVEN)) for unit in units]
        rests = tuple(float(unit - step) for unit, step in zip(units, whole, strict=True))
    return tuple(step % 2**64 for step in whole), rests


def _exact_rates(spectrum: Spectrum) -> list[Decimal]:
    pairs = (spectrum.dim + 1) // 2
    digits = max(0, -Decimal(spectrum.base).adjusted())
    with decimal.localcontext(decimal.Context(prec=60 + digits)):
        log_base = Decimal(spectrum.base).ln()
        return [(log_base * (-2 * i) / spectrum.dim).exp() for i in range(pairs)]
