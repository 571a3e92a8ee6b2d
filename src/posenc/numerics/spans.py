"""The keys that each query sees: a contiguous range, from a first to a last."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Ends: TypeAlias = tuple[Tensor, Tensor]
# Keys before a query's own that it sees, and keys after it.
Window: TypeAlias = tuple[int, int]


class Spans(NamedTuple):
    """For each query, the index of its own, first and last visible key, int64 ``[1 or B, Q]``.

    ``first`` and ``last`` never decrease along the queries; block masks rely on it.
    """

    own: Tensor
    first: Tensor
    last: Tensor


def spans(
    q_len: int,
    k_len: int,
    *,
    causal: bool,
    offset: int | Tensor,
    ends: Ends | None = None,
    window: Window | None = None,
    device: torch.device | str = "cpu",
) -> Spans:
    """The keys that each query sees; ``offset``, ``[]`` or ``[B]``, is the first query's own key.

    With ``ends``, from :func:`document_ends`, a query sees only its own document; with ``window``,
    only so many keys before its own and after it.
    """
    start = offset.reshape(-1, 1) if isinstance(offset, Tensor) else offset
    own = torch.arange(q_len, device=device)[None] + start
    first, last = torch.zeros_like(own), own if causal else torch.full_like(own, k_len - 1)
    if ends is not None and q_len:
        # Offsets on a device are checked asynchronously, so one out of range may get here: clamp.
        first, end = (gather_rows(x, own.clamp(0, k_len - 1)) for x in ends)
        last = torch.minimum(last, end)
    if window is not None:
        first, last = torch.maximum(first, own - window[0]), torch.minimum(last, own + window[1])
    return Spans(own, first, last)


def document_ends(ids: Tensor | None) -> Ends | None:
    """First and last index of each key's document, a run of equal ``ids`` along the last axis."""
    if ids is None:
        return None
    length = ids.shape[-1]
    index = torch.arange(length, device=ids.device).expand(ids.shape)
    change = ids[..., 1:] != ids[..., :-1]
    edge = torch.ones_like(ids[..., :1], dtype=torch.bool)
    first = index.masked_fill(~torch.cat((edge, change), -1), 0).cummax(-1).values
    last = index.masked_fill(~torch.cat((change, edge), -1), length)
    return first, last.flip(-1).cummin(-1).values.flip(-1)


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """The entries of ``table``, ``[K]`` or ``[1 or B, K]``, at ``rows``, ``[1 or B, Q]``."""
    table = torch.atleast_2d(table)
    sequences = len(rows) if len(table) == 1 else len(table)
    return table.expand(sequences, -1).gather(1, rows.expand(sequences, -1))
