"""What every scaling rule is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posenc._contract import checks

# A length that is known, that is being traced, or that each sequence has its own of.
Length = int | torch.SymInt | Tensor


@dataclass(frozen=True, slots=True)
class Rule:
    """What every rule is: a function of the rates, with a gain of one unless it says otherwise."""

    def __call__(self, rates: Tensor, base: float) -> Tensor:
        """Rates to turn by.

        Args:
            rates: float64 of shape ``[P]``, fastest first.
            base: The base they were made of.
        """
        raise NotImplementedError

    def gain(self) -> float:
        """What cosines and sines are multiplied with."""
        return 1.0

    def at(self, seq_len: Length | None) -> Rule:
        """The rule for a sequence of this length; None for one that fits the trained length."""
        return self

    def is_fixed(self) -> bool:
        """Whether its numbers are known, and not tensors that a length was put into."""
        return True

    def trained_length(self) -> int | None:
        """The longest sequence that :meth:`at` treats as None; None if it treats all alike."""
        return None

    def _positive(self, *names: str) -> None:
        for name in names:
            value = checks.positive_float(type(self).__name__, name, getattr(self, name))
            object.__setattr__(self, name, value)

    def _count(self, name: str) -> None:
        value = checks.integer(type(self).__name__, name, getattr(self, name))
        object.__setattr__(self, name, value)
