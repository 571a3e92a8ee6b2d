"""Where the queries are among the keys, as users say it: checked in words."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks
from posenc.numerics.spans import Spans, Window, document_ends, spans
from posenc.ops.attention.biases import RunningSum, Slopes


class Places(NamedTuple):
    """Where the queries are among the keys, and which keys they see, all checked."""

    queries: int
    keys: int
    causal: bool
    start: int | Tensor  # key index of the first query, [] or [B]
    ids: Tensor | None  # of the keys' documents, [K] or [B, K]
    window: Window | None
    device: torch.device | str
    batched: bool  # whether any argument has a batch axis

    def spans(self) -> Spans:
        """The keys that each query sees."""
        how: Any = {"causal": self.causal, "window": self.window, "device": self.device}
        ends = document_ends(self.ids)
        return spans(self.queries, self.keys, offset=self.start, ends=ends, **how)


def check_places(
    who: str,
    bias: object,
    q_len: int,
    k_len: int | None,
    causal: bool,
    query_offset: int | Tensor | None,
    document_ids: Tensor | None,
    window: int | tuple[int, int] | None,
    device: torch.device | str,
    batch: int | None = None,
    **others: Tensor | None,
) -> Places:
    """Check what attention, matrices and mods take alike.

    A checked bias and ``others`` must agree with the rest on the number of sequences, ``batch`` if
    that is known.
    """
    queries, keys = qk_checks.check_lengths(who, q_len, k_len)
    checks.boolean(who, "causal", causal)
    start = qk_checks.check_query_offset(who, query_offset, queries, keys, device)
    ids = qk_checks.check_key_ids(who, "document_ids", document_ids, keys, device)
    given: Any = {"query_offset": start, "document_ids": ids, **others}
    if isinstance(bias, Slopes):
        given["slopes"] = bias.values
    elif isinstance(bias, RunningSum) and bias.values.dim() == 3:
        given["sums"] = bias.values.flatten(1)
    batched = qk_checks.check_batches(who, batch, **given)
    sides = qk_checks.check_window(who, window)
    return Places(queries, keys, causal, start, ids, sides, device, batched)
