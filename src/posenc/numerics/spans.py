"""Which keys a query sees: a run of them, from a first to a last."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Ends: TypeAlias = tuple[Tensor, Tensor]


class Spans(NamedTuple):
    """For each query its own key, and the first and the last key it sees, int64 ``[1 or B, Q]``.

    ``first`` and ``last`` never fall along the queries. Everything below relies on it.
    """

    at: Tensor
    first: Tensor
    last: Tensor


def spans(
    q_len: int,
    k_len: int,
    *,
    causal: bool,
    offset: int | Tensor,
    ends: Ends | None = None,
    device: torch.device | str = "cpu",
) -> Spans:
    """Keys that each query sees.

    Args:
        q_len: Queries ``Q``.
        k_len: Keys ``K``.
        causal: Whether a query sees only keys up to its own.
        offset: Key of the first query; a tensor ``[]`` or ``[B]`` may differ by sequence.
        ends: First and last key of each key's document, as :func:`run_ends` gives them; a
            query sees its own document alone.
        device: Where the result lives.

    Examples:
        >>> ends = run_ends(torch.tensor([5, 5, 7, 7]))
        >>> for row in spans(2, 4, causal=True, offset=2, ends=ends):
        ...     print(row)
        tensor([[2, 3]])
        tensor([[2, 2]])
        tensor([[2, 3]])
    """
    start = offset.reshape(-1, 1) if isinstance(offset, Tensor) else offset
    at = torch.arange(q_len, device=device)[None] + start
    first, last = torch.zeros_like(at), at if causal else torch.full_like(at, k_len - 1)
    if ends is not None and q_len:
        # A wrong offset is refused elsewhere; here it must not read past the end.
        first, end = (pick(x, at.clamp(0, k_len - 1)) for x in ends)
        last = torch.minimum(last, end)
    return Spans(at, first, last)


def run_ends(ids: Tensor) -> Ends:
    """First and last index of the run of equal ``ids`` that each one is in, along the last axis.

    Examples:
        >>> run_ends(torch.tensor([4, 4, 9, 4]))
        (tensor([0, 0, 2, 3]), tensor([1, 1, 2, 3]))
    """
    length = ids.shape[-1]
    index = torch.arange(length, device=ids.device).expand(ids.shape)
    change = ids[..., 1:] != ids[..., :-1]
    edge = torch.ones_like(ids[..., :1], dtype=torch.bool)
    first = index.masked_fill(~torch.cat((edge, change), -1), 0).cummax(-1).values
    ends = index.masked_fill(~torch.cat((change, edge), -1), length)
    return first, ends.flip(-1).cummin(-1).values.flip(-1)


def pick(table: Tensor, rows: Tensor) -> Tensor:
    """Entries ``rows``, ``[1 or B, Q]``, of a ``table``, ``[K]`` or ``[1 or B, K]``.

    Examples:
        >>> pick(torch.tensor([5, 6, 7]), torch.tensor([[2], [0]]))
        tensor([[7],
                [5]])
    """
    table = table if table.dim() == 2 else table[None]
    sequences = max(len(table), len(rows))
    return table.expand(sequences, -1).gather(1, rows.expand(sequences, -1))
