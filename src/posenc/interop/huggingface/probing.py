"""Shared by all comparisons of a model's functions with ours: errors, table forms, equality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Exceptions of functions that are called with unsuitable arguments.
FAILURES = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)

# Expand one number per pair to each form: of 0 1, doubled makes 0 1 0 1, repeated 0 0 1 1.
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
    """Whether two results have the same shapes and differ by at most ``error``.

    A result in half precision, whatever its arguments are, may differ by its rounding too.
    """
    if isinstance(expected, Tensor):
        alike = isinstance(got, Tensor) and got.shape == expected.shape
        halved = expected.dtype in (torch.bfloat16, torch.float16)
        rounding = torch.finfo(expected.dtype).eps / 2 if halved else 0.0
        return alike and torch.allclose(expected.to(got.dtype), got, rtol=rounding, atol=error)
    if expected is None or isinstance(got, Tensor) or got is None:
        return got is expected
    pairs = zip(got, expected, strict=False)
    return len(got) == len(expected) and all(same(a, b, error) for a, b in pairs)
