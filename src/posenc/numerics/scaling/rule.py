"""What every scaling rule is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from posenc._contract import checks
from posenc.numerics.values import ByValue


@dataclass(frozen=True, eq=False)
class Rule(ByValue):
    """What every rule is: a function of the rates, with a gain of one unless it says otherwise."""

    def __call__(self, rates: Tensor, base: float, seq_len: Tensor | None = None) -> Tensor:
        """Scaled rates.

        Args:
            rates: float64 of shape ``[P]``, fastest first.
            base: The base they were made of.
            seq_len: Length that a graph finds out, or one for each sequence, ``[...]``, for rules
                that depend on it; the rates are then ``[..., 1, P]``.
        """
        raise NotImplementedError

    def gain(self, seq_len: Tensor | None = None) -> float | Tensor:
        """What cosines and sines are multiplied with."""
        return 1.0

    def at(self, seq_len: int | None) -> Rule:
        """The rule for a sequence of this length; None for one that fits the trained length."""
        return self

    def trained_length(self) -> int | None:
        """The longest sequence that :meth:`at` treats as None; None if it treats all alike."""
        return None

    def _positive(self, *names: str) -> None:
        for name in names:
            value = checks.positive_float(type(self).__name__, name, getattr(self, name))
            object.__setattr__(self, name, value)

    def _stretch(self) -> None:
        """Refuse a factor below one: sequences get longer, never shorter."""
        self._positive("factor")
        factor: float = self.factor  # type: ignore[attr-defined]
        if factor < 1:
            way_out = "Pass how many times longer sequences may be, 4.0 for four times."
            checks.fail(type(self).__name__, "factor must be at least 1", factor, way_out)

    def _count(self, name: str) -> None:
        value = checks.integer(type(self).__name__, name, getattr(self, name))
        object.__setattr__(self, name, value)
