r"""Scaling rules: how a model trained on one length rotates slower for a longer one.

A rule takes the rates :math:`\theta_i = b^{-2i/d}` of the pairs, in float64, and returns the
scaled rates; ``gain()`` is the factor of cosines and sines. Rules are frozen and hashable: a rule
is part of the key of every table made with it. `at` returns the rule for a sequence of some length;
most rules do not depend on the length and return themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.numerics.constants import ByValue, constant

__all__ = ["NTK", "DynamicNTK", "Linear", "Llama3", "LongRoPE", "Proportional", "Rule", "YaRN"]


@dataclass(frozen=True, eq=False)
class Rule(ByValue):
    """Base class: a function from rates to scaled rates, with a gain of one unless overridden."""

    def __call__(self, rates: Tensor, base: float, seq_len: Tensor | None = None) -> Tensor:
        """Scaled rates.

        Args:
            rates: float64 of shape ``[P]``, fastest first.
            base: The base they were computed from; NaN if they are a `RoPE`'s ``inv_freq``.
            seq_len: For rules that depend on the length, a tensor ``[...]`` of lengths, such as one
                for each sequence; the result is then ``[..., 1, P]``. If None, the rates are those
                up to the trained length, and so is :meth:`gain`.
        """
        raise NotImplementedError

    def gain(self, seq_len: Tensor | None = None) -> float | Tensor:
        """The factor of cosines and sines."""
        return 1.0

    def at(self, seq_len: int | None) -> Rule:
        """The rule for a sequence of this length; None for one that fits the trained length."""
        return self

    def trained_length(self) -> int | None:
        """The longest sequence whose rule is ``at(None)``; None if the length does not matter."""
        return None


_CHECKS: dict[Any, Callable[..., Any]] = {
    "float": checks.positive_float,
    "float | None": partial(checks.optional, checks.positive_float),
    "int": checks.integer,
    "bool": checks.boolean,
}


@dataclass(frozen=True, eq=False)
class PublishedRule(Rule):
    """A rule whose fields are checked by their types; numbers must be positive."""

    least_factor: ClassVar[float] = 1.0  # sequences get longer, never shorter

    def __post_init__(self) -> None:
        who = type(self).__name__
        for field in fields(self):
            if field.type in _CHECKS:
                value = _CHECKS[field.type](who, field.name, getattr(self, field.name))
                object.__setattr__(self, field.name, value)
        factor: float = self.factor  # type: ignore[attr-defined]
        if factor < self.least_factor:
            hint = "Pass how many times longer sequences may be, 4.0 for four times."
            checks.fail(who, "factor must be at least 1", factor, hint)


@dataclass(frozen=True, eq=False)
class Linear(PublishedRule):
    r"""Position interpolation: every pair rotates slower by ``factor``.

    .. math:: \theta_i \mapsto \theta_i / s

    If ``factor < 1``, pairs rotate faster: ``Linear(1 / math.tau)`` is for positions in turns.

    Examples:
        >>> Linear(2.0)(torch.tensor([1.0, 0.5]), 4.0)
        tensor([0.5000, 0.2500])

    References:
        Chen et al., *Extending Context Window of Large Language Models via Position
        Interpolation*, 2023.
    """

    factor: float
    least_factor: ClassVar[float] = 0.0  # images may count coordinates in other units

    def __call__(self, rates: Tensor, base: float, seq_len: Tensor | None = None) -> Tensor:
        """Scaled rates."""
        return rates / self.factor


@dataclass(frozen=True, eq=False)
class NTK(PublishedRule):
    r"""A larger base: the slowest pair is slower by ``factor``, the fastest as before.

    .. math:: b \mapsto b\,s^{d/(d-2)}, \qquad \theta_i \mapsto \theta_i\, s^{-2i/(d-2)}

    Examples:
        >>> NTK(4.0)(torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64), 8.0)
        tensor([1.0000, 0.2500, 0.0625], dtype=torch.float64)

    References:
        bloc97, *NTK-Aware Scaled RoPE*, 2023; Peng et al., *YaRN*, 2023, definition 1.
    """

    factor: float

    def __call__(self, rates: Tensor, base: float, seq_len: Tensor | None = None) -> Tensor:
        """Scaled rates."""
        return _with_larger_base(rates, self.factor)


@dataclass(frozen=True, eq=False)
class YaRN(PublishedRule):
    r"""Slow the slow pairs by ``factor``, leave the fast ones, blend linearly in the pair index.

    .. math::
        \theta_i \mapsto (1 - \gamma_i)\,\theta_i + \gamma_i\,\theta_i / s, \qquad
        \gamma_i = \text{clamp}\left(\frac{i - l}{h - l}, 0, 1\right), \qquad
        l, h = \frac{d \ln(M / 2\pi\beta)}{2 \ln b}

    with :math:`l` at ``beta_fast`` turns over the trained length, rounded down and at least 0, and
    :math:`h` at ``beta_slow``, rounded up and at most :math:`d - 1`.

    Args:
        factor: :math:`s`: how many times longer the sequences may be.
        original_length: :math:`M`, the length the model was trained on.
        attention_factor: The gain, which cos and sin are multiplied with. If None it is
            :math:`m(\text{mscale}) / m(\text{mscale\_all\_dim})` where both are given and not
            zero, and :math:`m(1)` otherwise, with :math:`m(x) = 0.1\,x \ln s + 1`.
        mscale: See ``attention_factor``; DeepSeek's checkpoints have it.
        mscale_all_dim: See ``attention_factor``.
        beta_fast: Pairs with more turns than this over :math:`M` stay as they are.
        beta_slow: Pairs with fewer turns than this over :math:`M` are slowed all the way.
        truncate: Whether :math:`l` and :math:`h` are rounded to whole pairs.

    Examples:
        >>> rates = torch.tensor([1.0, 0.1, 0.01, 0.001])
        >>> YaRN(4.0, original_length=2048)(rates, 10_000.0)
        tensor([1.0000e+00, 1.0000e-01, 6.2500e-03, 2.5000e-04])
        >>> round(YaRN(4.0, original_length=2048).gain(), 4)
        1.1386

    References:
        Peng et al., *YaRN: Efficient Context Window Extension of Large Language Models*, 2023,
        section 3.4, and the authors' code.
    """

    factor: float
    _: KW_ONLY
    original_length: int
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("mscale", "mscale_all_dim"):
            # Published configs write 0 for "not used".
            object.__setattr__(self, name, getattr(self, name) or None)
        super().__post_init__()
        if self.beta_fast < self.beta_slow:
            rule = f"beta_fast must be at least beta_slow={self.beta_slow}"
            checks.fail("YaRN", rule, self.beta_fast, "Exchange them.")

    def __call__(self, rates: Tensor, base: float, seq_len: Tensor | None = None) -> Tensor:
        """Scaled rates."""
        pairs = rates.shape[-1]
        low, high = self.blend_range(2 * pairs, base)
        index = torch.arange(pairs, dtype=torch.float64, device=rates.device)
        blend = ((index - low) / (high - low)).clamp(0, 1).to(rates.dtype)
        return rates * (1 - blend) + rates / self.factor * blend

    def blend_range(self, dim: int, base: float) -> tuple[float, float]:
        """First pair that is slowed at all, and first that is slowed all the way."""
        if math.isnan(base):
            rule, hint = "inv_freq must be None, because YaRN needs a base", "Use Llama3 instead."
            checks.fail("YaRN", rule, "inv_freq", hint)

        def pair_with(turns: float) -> float:
            length = math.log(self.original_length) - math.log(turns) - math.log(math.tau)
            return dim * length / (2 * math.log(base))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high if high != low else high + 0.001

    def gain(self, seq_len: Tensor | None = None) -> float:
        """The factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._gain(self.mscale) / self._gain(self.mscale_all_dim)
        return self._gain(1.0)

    def _gain(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True, eq=False)
class Llama3(PublishedRule):
    r"""Slow the slow pairs by ``factor``, leave the fast ones, blend between.

    .. math:: \theta_i \mapsto (1 - \kappa_i)\,\theta_i / s + \kappa_i\,\theta_i, \qquad
        \kappa_i = \text{clamp}\left(\frac{M\theta_i/2\pi - l}{h - l}, 0, 1\right)

    Args:
        factor: :math:`s`.
        original_length: :math:`M`, the length the model was trained on.
        low_freq_factor: :math:`l`: pairs with fewer turns over :math:`M` are slowed fully.
        high_freq_factor: :math:`h`: pairs with more turns stay as they are. If it equals
            ``low_freq_factor``, nothing is blended: pairs at or above it stay.

    Examples:
        >>> Llama3(8.0, original_length=8192)(torch.tensor([1.0, 0.002, 0.0001]), 5e5)
        tensor([1.0000e+00, 1.1878e-03, 1.2500e-05])

    References:
        Grattafiori et al., *The Llama 3 Herd of Models*, 2024, and the authors' code.
    """

    factor: float
    _: KW_ONLY
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor < self.low_freq_factor:
            rule = f"high_freq_factor must be at least low_freq_factor={self.low_freq_factor}"
            checks.fail("Llama3", rule, self.high_freq_factor, "Swap the two.")

    def __call__(self, rates: Tensor, base: float, seq_len: Tensor | None = None) -> Tensor:
        """Scaled rates."""
        turns = rates * (self.original_length / math.tau)
        band = self.high_freq_factor - self.low_freq_factor
        if band == 0:
            return torch.where(turns < self.low_freq_factor, rates / self.factor, rates)
        keep = ((turns - self.low_freq_factor) / band).clamp(0, 1)
        return rates / self.factor * (1 - keep) + rates * keep


@dataclass(frozen=True, eq=False)
class Proportional(PublishedRule):
    r"""Rotate the fastest fraction of the pairs, and leave the others as they are.

    .. math:: \theta_i \mapsto \theta_i / s \text{ for } i < \lfloor p\,d/2 \rfloor,
        \text{ else } 0

    Unlike with a partial ``rotary_dim``, the exponents are over the whole width, and in the half
    layout the channels that do not rotate are in the middle.

    Args:
        fraction: :math:`p`, from 0 to 1.
        factor: :math:`s`.

    Examples:
        >>> Proportional(0.5)(torch.tensor([1.0, 0.5, 0.25, 0.125]), 16.0)
        tensor([1.0000, 0.5000, 0.0000, 0.0000])

    References:
        The configs of Gemma 4.
    """

    fraction: float
    _: KW_ONLY
    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fraction > 1:
            rule = "fraction must be at most 1"
            checks.fail("Proportional", rule, self.fraction, "Pass 1.0 to rotate every pair.")

    def __call__(self, rates: Tensor, base: float, seq_len: Tensor | None = None) -> Tensor:
        """Scaled rates."""
        pairs = rates.shape[-1]
        rotated = torch.arange(pairs, device=rates.device) < int(self.fraction * 2 * pairs // 2)
        return torch.where(rotated, rates / self.factor, 0.0)


@dataclass(frozen=True, eq=False)
class DynamicNTK(PublishedRule):
    r"""NTK with a factor that grows with the sequence, and is one up to the trained length.

    .. math:: s' = s\,L/M - (s - 1), \qquad L = \max(\text{seq\_len}, M)

    Args:
        factor: :math:`s`.
        original_length: :math:`M`, the length the model was trained on.

    Examples:
        >>> DynamicNTK(2.0, original_length=100).at(300)
        NTK(factor=5.0)
        >>> DynamicNTK(2.0, original_length=100).at(80)
        NTK(factor=1.0)

    References:
        emozilla, *Dynamically Scaled RoPE*, 2023; Peng et al., *YaRN*, 2023, section 3.3.
    """

    factor: float
    _: KW_ONLY
    original_length: int

    def __call__(self, rates: Tensor, base: float, seq_len: Tensor | None = None) -> Tensor:
        """Scaled rates."""
        if seq_len is None:
            return rates
        ratio = (seq_len.to(torch.float64) / self.original_length)[..., None, None]
        return _with_larger_base(rates, (self.factor * ratio - (self.factor - 1)).clamp(min=1))

    def at(self, seq_len: int | None) -> Rule:
        """The rule for a sequence of this length."""
        if seq_len is None or seq_len <= self.original_length:
            return NTK(1.0)
        return NTK(self.factor * seq_len / self.original_length - (self.factor - 1))

    def trained_length(self) -> int:
        """The longest sequence that leaves the rates as they were."""
        return self.original_length


@dataclass(frozen=True, eq=False)
class LongRoPE(PublishedRule):
    r"""A factor found by search for each pair, and another past the trained length.

    .. math:: \theta_i \mapsto \theta_i / \lambda_i, \qquad \lambda = \text{long\_factor}
        \text{ if seq\_len} > M \text{ else short\_factor}

    Args:
        short_factor: :math:`\lambda` of each pair up to the trained length.
        long_factor: :math:`\lambda` of each pair past it.
        original_length: :math:`M`, the length the model was trained on.
        factor: :math:`s`, how many times longer the sequences may be.
        attention_factor: The gain; :math:`\sqrt{1 + \ln s / \ln M}` if None.
        short_attention_factor: The gain up to the trained length (PhiMoE's ``short_mscale``);
            ``attention_factor`` if None.

    Examples:
        >>> rule = LongRoPE((1.0, 1.0), long_factor=(1.0, 4.0), original_length=4096, factor=32.0)
        >>> rule.at(4096).factors, rule.at(4097).factors
        ((1.0, 1.0), (1.0, 4.0))
        >>> round(rule.gain(), 4)
        1.1902

    References:
        Ding et al., *LongRoPE*, 2024; the configs of Phi-3.
    """

    short_factor: tuple[float, ...]
    _: KW_ONLY
    long_factor: tuple[float, ...]
    original_length: int
    factor: float = 1.0
    attention_factor: float | None = None
    short_attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            if isinstance(values, Tensor):
                values = values.tolist()
            if not isinstance(values, (list, tuple)) or not values:
                rule, got = f"{name} must be a list of numbers", checks.describe(values)
                checks.fail("LongRoPE", rule, got, "Pass one for each pair.", TypeError)
            numbers = [checks.positive_float("LongRoPE", name, value) for value in values]
            object.__setattr__(self, name, tuple(numbers))
        if len(self.short_factor) != len(self.long_factor):
            rule = "short_factor and long_factor must be equally long"
            got = f"{len(self.short_factor)} and {len(self.long_factor)}"
            checks.fail("LongRoPE", rule, got, "Pass one for each pair.")
        super().__post_init__()

    def __call__(self, rates: Tensor, base: float, seq_len: Tensor | None = None) -> Tensor:
        """Scaled rates."""
        short = _slow_pairs(rates, self.short_factor)
        if seq_len is None:
            return short
        long = _slow_pairs(rates, self.long_factor)
        return torch.where((seq_len > self.original_length)[..., None, None], long, short)

    def gain(self, seq_len: Tensor | None = None) -> float | Tensor:
        """The factor of cosines and sines; without ``seq_len``, that up to the trained length."""
        short, long = self._gains()
        if seq_len is None or short == long:
            return short
        is_long = (seq_len > self.original_length)[..., None, None]
        return torch.full_like(is_long, short, dtype=torch.float64).masked_fill(is_long, long)

    def _gains(self) -> tuple[float, float]:
        """The gain up to the trained length, and past it."""
        if self.attention_factor is not None:
            long = self.attention_factor
        elif self.factor <= 1 or self.original_length == 1:
            long = 1.0
        else:
            long = math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        short = self.short_attention_factor
        return long if short is None else short, long

    def at(self, seq_len: int | None) -> Rule:
        """The rule for a sequence of this length."""
        short, long = self._gains()
        if seq_len is not None and seq_len > self.original_length:
            return _PerPair(self.long_factor, long)
        return _PerPair(self.short_factor, short)

    def trained_length(self) -> int:
        """The longest sequence that takes the short factors."""
        return self.original_length


@dataclass(frozen=True, eq=False)
class _PerPair(Rule):
    """LongRoPE at one length: each pair slowed by a factor of its own."""

    factors: tuple[float, ...]
    attention_factor: float = 1.0

    def __call__(self, rates: Tensor, base: float, seq_len: Tensor | None = None) -> Tensor:
        """Scaled rates."""
        return _slow_pairs(rates, self.factors)

    def gain(self, seq_len: Tensor | None = None) -> float:
        """The factor of cosines and sines."""
        return self.attention_factor


def _slow_pairs(rates: Tensor, factors: tuple[float, ...]) -> Tensor:
    """Rates divided by a factor for each pair."""
    if len(factors) != rates.shape[-1]:
        rule = f"short_factor and long_factor must have {rates.shape[-1]} numbers"
        checks.fail("LongRoPE", rule, len(factors), "Pass one for each rotated pair.")
    return rates / constant(factors, torch.float64, rates.device)


def _with_larger_base(rates: Tensor, factor: float | Tensor) -> Tensor:
    """Rates whose slowest is slower by ``factor``, and whose fastest is as before."""
    pairs = rates.shape[-1]
    exponents = torch.arange(pairs, dtype=torch.float64, device=rates.device)
    return rates * factor ** (exponents / -max(pairs - 1, 1))
