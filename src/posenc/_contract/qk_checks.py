"""Checks of where queries stand among the keys, and of the slopes between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.checks import message
from posenc._contract.tracing import in_transform, is_readable


def lengths(who: str, q_len: Any, k_len: Any) -> tuple[int, int]:
    """Queries and keys; the queries are the last of the keys, so there are at least as many."""
    queries = checks.integer(who, "q_len", q_len, least=0)
    keys = queries if k_len is None else checks.integer(who, "k_len", k_len, least=0)
    if keys < queries:
        rule = f"k_len must be at least q_len={queries}"
        raise ValueError(message(who, rule, keys, "Queries are the last of the keys."))
    return queries, keys


def slopes(who: str, values: Any) -> Tensor:
    """``values`` if they are a floating tensor ``(H,)`` or ``(B, H)``."""
    checks.float_tensor(who, "slopes", values)
    checks.rank(who, "slopes", values, (1, 2), "(H,) or (B, H)")
    return values  # type: ignore[no-any-return]


def offset(
    who: str, value: Any, queries: int, keys: int, device: torch.device | str
) -> int | Tensor:
    """Key of the first query: an int, or an int64 tensor ``()`` or ``(B,)`` on ``device``.

    None puts the last query at the last key. A query without a key of its own is refused, on a
    device by an assertion that nobody waits for.
    """
    if value is None:
        return keys - queries
    if isinstance(value, (list, tuple)):
        rule = "offset must be an int, or an integer tensor of shape () or (B,)"
        raise TypeError(message(who, rule, checks.describe(value), "Pass torch.tensor(offset)."))
    if not isinstance(value, Tensor):
        start = checks.integer(who, "offset", value, least=0)
        if start > keys - queries:
            rule = f"offset must be at most k_len - q_len = {keys - queries}"
            raise ValueError(message(who, rule, start, "Every query has a key of its own."))
        return start
    if value.dtype not in checks.INT_DTYPES:
        rule = "offset must be an int, or an integer tensor"
        raise TypeError(message(who, rule, checks.describe(value), "Call offset.long() first."))
    checks.rank(who, "offset", value, (0, 1), "() or (B,)")
    if is_readable(value):
        for end in value.aminmax() if value.numel() else ():
            offset(who, int(end), queries, keys, device)
    elif not in_transform(value):
        inside = (value >= 0) & (value <= keys - queries)
        rule = f"{who}: offset must be in [0, k_len - q_len]."
        torch._assert_async(inside.all(), rule)
    return value.to(device=device, dtype=torch.int64)


def ids(who: str, name: str, value: Any, keys: int, device: torch.device | str) -> Tensor | None:
    """One whole number for each key, int64 ``(K,)`` or ``(B, K)`` on ``device``, or None."""
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.dtype not in checks.INT_DTYPES:
        rule, way_out = f"{name} must be an integer tensor", "Pass an int64 tensor."
        if isinstance(value, Tensor) and value.dtype is torch.bool:
            way_out = f"Of a mask of real keys make torch.where({name}, 0, -1)."
        raise TypeError(message(who, rule, checks.describe(value), way_out))
    if value.dim() not in (1, 2) or value.shape[-1] != keys:
        rule = f"{name} must have shape ({keys},) or (B, {keys})"
        got = f"shape {tuple(value.shape)}"
        raise ValueError(message(who, rule, got, "Give one to each key, cached ones too."))
    return value.to(device=device, dtype=torch.int64)


def check_batch(who: str, name: str, x: Tensor | int | None, ranks: int, wanted: int) -> None:
    """Refuse a tensor whose leading axis of ``ranks`` is neither 1 nor the batch size."""
    if isinstance(x, Tensor) and x.dim() == ranks and x.shape[0] not in (1, wanted):
        rule = f"{name} must be for 1 or {wanted} sequences"
        got = f"shape {tuple(x.shape)}"
        raise ValueError(message(who, rule, got, "Give one row to each sequence."))


def check_batches(who: str, *parts: tuple[str, Tensor | int | None, int]) -> bool:
    """Whether any of ``parts`` has a row for each sequence; refuse those that differ in how many.

    Each is a name, what was given, and how many axes that has if the first is of sequences.
    """
    sizes = [x.shape[0] for _, x, ranks in parts if isinstance(x, Tensor) and x.dim() == ranks]
    if sizes:
        for name, x, ranks in parts:
            check_batch(who, name, x, ranks, max(sizes))
    return bool(sizes)
