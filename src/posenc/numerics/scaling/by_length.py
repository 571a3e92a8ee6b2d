"""Rules that depend on the length of the sequence, and keep no state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.numerics.scaling.fixed import NTK, _PerPair, slow_pairs, with_larger_base
from posenc.numerics.scaling.rule import PublishedRule, Rule


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
    original_length: int

    def __call__(self, rates: Tensor, base: float, seq_len: Tensor | None = None) -> Tensor:
        """Scaled rates."""
        if seq_len is None:
            return rates
        ratio = (seq_len.to(torch.float64) / self.original_length)[..., None, None]
        return with_larger_base(rates, (self.factor * ratio - (self.factor - 1)).clamp(min=1))

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
        >>> rule = LongRoPE((1.0, 1.0), (1.0, 4.0), original_length=4096, factor=32.0)
        >>> rule.at(4096).factors, rule.at(4097).factors
        ((1.0, 1.0), (1.0, 4.0))
        >>> round(rule.gain(), 4)
        1.1902

    References:
        Ding et al., *LongRoPE*, 2024; the configs of Phi-3.
    """

    short_factor: tuple[float, ...]
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
        short = slow_pairs(rates, self.short_factor)
        if seq_len is None:
            return short
        long = slow_pairs(rates, self.long_factor)
        return torch.where((seq_len > self.original_length)[..., None, None], long, short)

    def gain(self, seq_len: Tensor | None = None) -> float | Tensor:
        """The factor of cosines and sines; without ``seq_len``, the one past the trained length."""
        if self.attention_factor is not None:
            long = self.attention_factor
        elif self.factor <= 1 or self.original_length == 1:
            long = 1.0
        else:
            long = math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        short = self.short_attention_factor
        if seq_len is None or short is None:
            return long
        is_long = (seq_len > self.original_length)[..., None, None]
        return torch.full_like(is_long, short, dtype=torch.float64).masked_fill(is_long, long)

    def at(self, seq_len: int | None) -> Rule:
        """The rule for a sequence of this length."""
        gain = self.gain()
        assert isinstance(gain, float)
        if seq_len is not None and seq_len > self.original_length:
            return _PerPair(self.long_factor, gain)
        short = self.short_attention_factor
        return _PerPair(self.short_factor, gain if short is None else short)

    def trained_length(self) -> int:
        """The longest sequence that takes the short factors."""
        return self.original_length
