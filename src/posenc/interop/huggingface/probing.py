"""What comparing a model's functions with ours needs: errors, forms of tables, equality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Errors of a function that is called with arguments it was not made for.
FAILURES = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)

# A row with the numbers of its pairs in each form: doubled is 0 1 0 1, repeated is 0 0 1 1.
WIDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "doubled": lambda pairs: torch.cat((pairs, pairs), dim=-1),
    "repeated": lambda pairs: pairs.repeat_interleave(2, dim=-1),
    "single": lambda pairs: pairs,
    "complex": lambda pairs: pairs,
}


class NotUnderstood(Exception):
    """A function rotates in a way that none of ours does."""


class Known(NamedTuple):
    """A known rotating function: its variant and layout in words, and our function."""

    variant: str
    layout: str
    function: Callable[..., Any]


def same(got: Any, expected: Any, error: float = 1e-5) -> bool:
    """Whether two results have the same shapes and differ by at most ``error``."""
    if isinstance(expected, Tensor):
        alike = isinstance(got, Tensor) and got.shape == expected.shape
        return alike and torch.allclose(got, expected.to(got.dtype), rtol=0, atol=error)
    if expected is None or isinstance(got, Tensor) or got is None:
        return got is expected
    pairs = zip(got, expected, strict=False)
    return len(got) == len(expected) and all(same(a, b, error) for a, b in pairs)
