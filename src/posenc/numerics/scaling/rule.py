"""The base class of scaling rules."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from posenc._contract import checks
from posenc.numerics.values import ByValue


@dataclass(frozen=True, eq=False)
class Rule(ByValue):
    """Base class: a function from rates to scaled rates, with a gain of one unless overridden."""

    def __call__(self, rates: Tensor, base: float, seq_len: Tensor | None = None) -> Tensor:
        """Scaled rates.

        Args:
            rates: float64 of shape ``[P]``, fastest first.
            base: The base they were computed from.
            seq_len: For rules that depend on the length, a tensor ``[...]`` of lengths, such as one
                for each sequence; the result is then ``[..., 1, P]``.
        """
        raise NotImplementedError

    def gain(self, seq_len: Tensor | None = None) -> float | Tensor:
        """What cosines and sines are multiplied with."""
        return 1.0

    def at(self, seq_len: int | None) -> Rule:
        """The rule for a sequence of this length; None for one that fits the trained length."""
        return self

    def trained_length(self) -> int | None:
        """The longest sequence whose rule is ``at(None)``; None if the length does not matter."""
        return None

    def _check_positive(self, *names: str) -> None:
        for name in names:
            value = checks.positive_float(type(self).__name__, name, getattr(self, name))
            object.__setattr__(self, name, value)

    def _check_factor(self) -> None:
        """Refuse a factor below one: sequences get longer, never shorter."""
        self._check_positive("factor")
        factor: float = self.factor  # type: ignore[attr-defined]
        if factor < 1:
            way_out = "Pass how many times longer sequences may be, 4.0 for four times."
            checks.fail(type(self).__name__, "factor must be at least 1", factor, way_out)

    def _check_count(self, name: str) -> None:
        value = checks.integer(type(self).__name__, name, getattr(self, name))
        object.__setattr__(self, name, value)
