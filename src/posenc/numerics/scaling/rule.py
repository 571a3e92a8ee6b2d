"""The base classes of scaling rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar

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
            base: The base they were computed from; NaN if they are a `RoPE`'s ``inv_freq``.
            seq_len: For rules that depend on the length, a tensor ``[...]`` of lengths, such as one
                for each sequence; the result is then ``[..., 1, P]``.
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
