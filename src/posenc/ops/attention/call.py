"""The checked arguments of an attention: which keys a query sees, and numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc.numerics.spans import Spans, Window, spans
from posenc.ops.attention.biases import PRUNED, Fields

# Bits of the argument `flags` of the ops.
CAUSAL, PRUNE, CHUNKED, TO_BIAS = 1, 2, 4, 8


class Call(NamedTuple):
    """The checked arguments of an attention, in addition to q, k and v.

    In a block of a longer sequence the queries' key indices are past the keys, or below zero.
    """

    bias: Fields  # as the op of its kind has it; NoBias for one that is computed by rows
    starts: Tensor | None  # key index of the first query, int64 [1 or B]; `start` if None
    first: Tensor | None  # first and last key of each key's document, int64 [1 or B, K]
    last: Tensor | None
    start: int
    scale: float
    causal: bool
    # Whether far keys are left out. If false, `first` and `last` at a query's key may be the ends
    # of any range, as in `biased.attend_ranges`; if true, they are those of a document.
    prune: bool
    window: Window | None = None  # keys before a query's own that it sees, and keys after it
    padding: Tensor | None = None  # one for each key that is not hidden, uint8 [1 or B, K]
    chunked: bool = False  # whether Triton's kernels are left out
    to_bias: bool = False  # whether the backward pass computes the gradients of the bias

    @classmethod
    def of(
        cls,
        bias: Fields,
        *,
        start: int | Tensor,
        scale: float,
        causal: bool,
        prune: bool = False,
        first: Tensor | None = None,
        last: Tensor | None = None,
        window: Window | None = None,
        padding: Tensor | None = None,
    ) -> Call:
        """The call of checked arguments."""
        starts, begin = (start.reshape(-1), 0) if isinstance(start, Tensor) else (None, start)
        return cls(bias, starts, first, last, begin, scale, causal, prune, window, padding)

    @property
    def prunes(self) -> bool:
        """Whether far keys are left out."""
        return self.prune and isinstance(self.bias, PRUNED)

    def spans(self, queries: int, keys: int, device: torch.device) -> Spans:
        """The keys that each query sees."""
        offset = self.start if self.starts is None else self.starts
        ends = None if self.first is None or self.last is None else (self.first, self.last)
        how: Any = {"causal": self.causal, "window": self.window, "device": device}
        return spans(queries, keys, offset=offset, ends=ends, **how)
