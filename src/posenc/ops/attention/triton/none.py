"""Attention without a bias."""

from __future__ import annotations

from typing import Any, NamedTuple

from posenc.ops.attention.triton.walks import Gradient, Prepared, Walks, hooks


class Nothing(NamedTuple):
    """A bias that adds nothing."""

    hooks: Any


HOOKS = hooks()


def prepare(walks: Walks) -> Prepared:
    """Nothing is prepared."""
    return Prepared(Nothing(HOOKS), walks.number_tiles())


prepare_few = prepare


def gradient_of(walks: Walks, prepared: Prepared, *_: Any) -> Gradient:
    """There is none."""
    return Gradient(prepared.bias)
