"""How fast each channel pair rotates."""

from __future__ import annotations

import decimal
import math
import operator
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.tracing import constant_under_compile, without_modes
from posenc.numerics.axes import Axes
from posenc.numerics.constants import constant
from posenc.numerics.scaling import Rule

_TAU = Decimal("6.283185307179586476925286766559005768394338798750211641949889184615632812572")
# Rates, steps and rests: see scaled_rates and turn_steps.
_Numbers: TypeAlias = tuple[tuple[float, ...], tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Spectrum:
    r"""The rates of a table: all that decides its numbers apart from the positions.

    .. math:: \theta_i = b^{-2i/d}, \qquad i = 0, \dots, \lceil d/2 \rceil - 1

    ``dim`` is :math:`d`, odd for a sinusoid whose last sine has no cosine; ``base`` is :math:`b`.
    ``freqs`` are other rates instead, those of each range of the axes one after the other.
    """

    dim: int
    base: float = 10_000.0
    scaling: Rule | None = None
    axes: Axes | None = None
    freqs: tuple[float, ...] | None = None

    def ranges(self) -> list[Spectrum]:
        """Plain spectra whose rates, scaled and in the order of the axes, are those of this one."""
        widths = (self.dim,) if self.axes is None else self.axes.widths(self.dim)
        if self.freqs is None:
            return [Spectrum(width, self.base) for width in widths]
        first, plain = 0, []
        for width in widths:
            part = self.freqs[first : first + width // 2]
            plain.append(Spectrum(width, self.base, freqs=part))
            first += width // 2
        return plain

    def rule_base(self) -> float:
        """The base that a scaling rule is told: NaN if the rates follow from none."""
        return self.base if self.freqs is None else math.nan

    def gain(self, seq_len: Tensor | None = None) -> float | Tensor:
        """The factor of cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.gain(seq_len)


def inverse_frequencies(dim: int, base: float = 10_000.0) -> Tensor:
    """The rates of ``Spectrum(dim, base)`` in radians per position, float64, as a new tensor.

    Rounding them to float32 here would cost 0.03 rad at position 1 000 000 (d = 128).
    """
    return scaled_rates(Spectrum(dim, float(base))).clone()


def pixel_frequencies(count: int, max_freq: float = 224.0, *, linear: bool = True) -> Tensor:
    r"""Rates for an image whose coordinates run from -1 to 1: equally spaced, or by equal ratios.

    .. math:: \theta_i = \pi \left(1 + \tfrac{i}{n - 1} \left(\tfrac{m}{2} - 1\right)\right)
        \qquad \text{or} \qquad \theta_i = \pi \left(\tfrac{m}{2}\right)^{i/(n - 1)}

    The slowest makes one turn from edge to edge, the fastest :math:`m / 2`. Computed in float64,
    for the argument ``inv_freq`` of `RoPE`.

    Args:
        count: :math:`n`: pairs of each coordinate, ``D / 2A`` for ``A`` coordinates.
        max_freq: :math:`m`: the pixels along a side; more than 2. timm has 224,
            rotary-embedding-torch 10.
        linear: True for the first formula (rotary-embedding-torch's ``"pixel"``, timm's
            ``linear_bands=True``), False for the second (timm's default).

    Returns:
        Rates of shape ``[count]`` in radians, slowest first.

    Examples:
        >>> pixel_frequencies(3, max_freq=10) / torch.pi
        tensor([1., 3., 5.], dtype=torch.float64)
        >>> pixel_frequencies(3, max_freq=32, linear=False) / torch.pi
        tensor([ 1.,  4., 16.], dtype=torch.float64)

    References:
        Jaegle et al., *Perceiver*, 2021, section 3.2 (the bands); the code of timm.
    """
    who = "pixel_frequencies"
    number = checks.integer(who, "count", count)
    most = checks.positive_float(who, "max_freq", max_freq) / 2
    if most <= 1:
        checks.fail(who, "max_freq must be above 2", max_freq, "Pass the pixels along a side.")
    share = torch.linspace(0, 1, number, dtype=torch.float64, device="cpu")
    bands = 1 + share * (most - 1) if checks.boolean(who, "linear", linear) else most**share
    return bands * math.pi


def scaled_rates(
    spectrum: Spectrum, device: torch.device | None = None, seq_len: Tensor | None = None
) -> Tensor:
    """The rate of each pair, scaled and in the order of the axes, float64 ``[P]``; read-only.

    Without a scaling rule each rate is correctly rounded. With ``seq_len``, ``[...]``, and a rule
    the rates are ``[..., 1, P]``.
    """
    device = torch.device("cpu") if device is None else device
    if seq_len is None or spectrum.scaling is None:
        return constant(_numbers(spectrum)[0], torch.float64, device)
    rule, axes = spectrum.scaling, spectrum.axes
    plain = [scaled_rates(each, device) for each in spectrum.ranges()]
    scaled = [rule(rates, spectrum.rule_base(), seq_len) for rates in plain]
    if axes is None:
        return scaled[0]
    order = constant(axes.rate_index(spectrum.dim // 2), torch.int64, device)
    return torch.cat(scaled, dim=-1)[..., order]


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
    return _numbers(spectrum)[1:]


def _numbers(spectrum: Spectrum) -> _Numbers:
    if torch.compiler.is_compiling():
        return _constant_numbers(*_frozen(spectrum))
    return _cached_numbers(spectrum)


def _frozen(part: Any) -> Any:
    """A description of ``part`` that torch.compile takes for a constant.

    hex() and index() make constants of numbers that torch.compile may treat as dynamic. A
    user-defined rule stays as it is, since its fields are not known.

    Examples:
        >>> from posenc.numerics.scaling import Linear
        >>> _frozen(Linear(2.0))
        (<class 'posenc.numerics.scaling.Linear'>, ('hex', '0x1.0000000000000p+1'))
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
        return type(part), *[_frozen(getattr(part, field.name)) for field in fields(part)]
    return part


def _thawed(part: Any) -> Any:
    """Undo :func:`_frozen`."""
    if not isinstance(part, tuple):
        return part
    if part[:1] == ("hex",):
        return float.fromhex(part[1])
    items = tuple([_thawed(item) for item in part])
    if not items or not isinstance(items[0], type):
        return items
    names = [field.name for field in fields(items[0])]
    return items[0](**dict(zip(names, items[1:], strict=True)))


@constant_under_compile
def _constant_numbers(*frozen: Any) -> _Numbers:
    return _cached_numbers(_thawed(frozen))


# An entry is about 192 numbers, and takes a few milliseconds to compute.
@lru_cache(maxsize=256)
def _cached_numbers(spectrum: Spectrum) -> _Numbers:
    rule = spectrum.scaling
    rates = [rate for each in spectrum.ranges() for rate in _exact_rates(each, rule)]
    if spectrum.axes is not None:
        rates = [rates[i] for i in spectrum.axes.rate_index(spectrum.dim // 2)]
    # 60 digits hold 64 bits of turn, 53 of rest and a margin; a rate above 1 has whole turns too.
    digits = max(0, *(rate.adjusted() for rate in rates))
    with decimal.localcontext(decimal.Context(prec=60 + digits)):
        units = [rate * 2**64 / _TAU for rate in rates]
        whole = [int(unit.to_integral_value(decimal.ROUND_HALF_EVEN)) for unit in units]
        rests = tuple(float(unit - step) for unit, step in zip(units, whole, strict=True))
    return tuple(map(float, rates)), tuple(step % 2**64 for step in whole), rests


def _exact_rates(plain: Spectrum, rule: Rule | None) -> list[Decimal]:
    """The rates of one range to 60 digits, or in float64 if a rule scales them."""
    width, base = plain.dim, plain.rule_base()
    if rule is None and plain.freqs is not None:
        return [Decimal(rate) for rate in plain.freqs]
    if rule is None:
        with decimal.localcontext(decimal.Context(prec=60)):
            log_base = Decimal(base).ln()
            return [(log_base * (-2 * i) / width).exp() for i in range((width + 1) // 2)]
    # Cached, because a rule that depends on the length needs them again at every token.
    unscaled = _cached_numbers(plain)[0]
    # Without modes: a fake tensor has no values to put into the list.
    with without_modes():
        rates = rule(torch.tensor(unscaled, dtype=torch.float64, device="cpu"), base).tolist()
    if len(rates) != len(unscaled) or not all(map(math.isfinite, rates)):
        rule_text = f"a rule must give a finite rate for each of the {len(unscaled)} pairs"
        hint = "Pass a factor closer to 1, or return as many rates as the rule is called with."
        got = f"{rule} with " + ("inv_freq" if plain.freqs else f"base {base}")
        checks.fail("scaling", rule_text, got, hint)
    return [Decimal(rate) for rate in rates]
