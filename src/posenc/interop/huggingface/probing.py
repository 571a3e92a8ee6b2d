"""Trying the functions of a model: what a try may raise, and when two answers are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What a function raises on arguments that it was not made for.
FAILURES = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)

# How a row of a table holds the numbers of its pairs.
WIDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "doubled": lambda pairs: torch.cat((pairs, pairs), dim=-1),
    "repeated": lambda pairs: pairs.repeat_interleave(2, dim=-1),
    "single": lambda pairs: pairs,
    "complex": lambda pairs: pairs,
}


class NotUnderstood(Exception):
    """A function that rotates, in a way that none of ours does."""


class Known(NamedTuple):
    """A rotating function that was recognised: its variant and layout in words, and ours."""

    variant: str
    layout: str
    function: Callable[..., Any]


def same(got: Any, expected: Any, error: float = 1e-5) -> bool:
    """Whether two answers have the same shape and differ by at most ``error``."""
    if isinstance(expected, Tensor):
        alike = isinstance(got, Tensor) and got.shape == expected.shape
        return alike and torch.allclose(got, expected.to(got.dtype), rtol=0, atol=error)
    if expected is None or isinstance(got, Tensor) or got is None:
        return got is expected
    pairs = zip(got, expected, strict=False)
    return len(got) == len(expected) and all(same(a, b, error) for a, b in pairs)
