"""Checks of queries, keys and slopes, and of where the queries are among the keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.checks import message
from posenc._contract.tracing import device_assert, in_transform, is_readable


def check_lengths(who: str, q_len: Any, k_len: Any) -> tuple[int, int]:
    """Numbers of queries and of keys; None is as many keys as queries, and fewer are refused."""
    queries = checks.integer(who, "q_len", q_len, least=0)
    keys = queries if k_len is None else checks.integer(who, "k_len", k_len, least=0)
    if keys < queries:
        rule = f"k_len must be at least q_len={queries}"
        raise ValueError(message(who, rule, keys, "Pass the keys of all queries, cached ones too."))
    return queries, keys


def check_slopes(who: str, slopes: Any) -> Tensor:
    """``slopes`` if they are a floating tensor ``(H,)`` or ``(B, H)``."""
    checks.float_tensor(who, "slopes", slopes)
    checks.rank(who, "slopes", slopes, (1, 2), "(H,) or (B, H)")
    return slopes  # type: ignore[no-any-return]


def check_slope_numbers(who: str, slopes: Any, heads: int) -> Any:
    """Slopes of the caller's as numbers, ``(H,)`` or ``(B, H)``."""
    if isinstance(slopes, Tensor) and slopes.requires_grad:
        rule = "slopes must not require a gradient, because their numbers are kept"
        way_out = "Pass slopes that learn to posenc.attention.alibi_attention(q, k, v, slopes)."
        raise ValueError(message(who, rule, f"shape {tuple(slopes.shape)}", way_out))
    try:
        found = torch.as_tensor(slopes, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        rule, got = "slopes must be numbers", checks.describe(slopes)
        raise TypeError(message(who, rule, got, "Pass one for each head.")) from None
    if check_slopes(who, found).shape[-1] != heads:
        rule = f"slopes must have one number for each of the {heads} heads"
        got = f"shape {tuple(found.shape)}"
        raise ValueError(message(who, rule, got, "Give (H,) or (B, H)."))
    numbers = found.tolist()
    if not bool(((found >= 0) & found.isfinite()).all()):
        rule, way_out = "slopes must be finite and not below zero", "Pass zero for no distance."
        raise ValueError(message(who, rule, numbers, way_out))
    return tuple(map(tuple, numbers)) if found.dim() == 2 else tuple(numbers)


def check_query_offset(
    who: str, offset: Any, queries: int, keys: int, device: torch.device | str
) -> int | Tensor:
    """Key index of the first query: an int, or an int64 tensor ``()`` or ``(B,)`` on ``device``.

    None is ``keys - queries``. An offset that leaves a query without a key of its own is
    refused; values on a device are refused there, by an asynchronous assertion.
    """
    most = keys - queries
    if offset is None:
        return most
    if not isinstance(offset, (Tensor, list, tuple)):
        start = checks.integer(who, "query_offset", offset, least=0)
        if start > most:
            rule = f"query_offset must be at most k_len - q_len = {most}"
            raise ValueError(message(who, rule, start, "Pass the key index of the first query."))
        return start
    if not isinstance(offset, Tensor) or offset.dtype not in checks.INT_DTYPES:
        rule = "query_offset must be an int, or an integer tensor of shape () or (B,)"
        way_out = "Pass torch.tensor(query_offset) of int64."
        raise TypeError(message(who, rule, checks.describe(offset), way_out))
    checks.rank(who, "query_offset", offset, (0, 1), "() or (B,)")
    if is_readable(offset):
        for end in offset.aminmax() if offset.numel() else ():
            check_query_offset(who, int(end), queries, keys, device)
    elif not in_transform(offset):
        inside = (offset >= 0) & (offset <= most)
        rule = f"{who}: query_offset must be in [0, k_len - q_len]."
        device_assert(inside.all(), rule)
    return offset.to(device=device, dtype=torch.int64)


def check_key_ids(
    who: str, name: str, ids: Any, keys: int, device: torch.device | str
) -> Tensor | None:
    """One integer for each key, int64 ``(K,)`` or ``(B, K)`` on ``device``, or None."""
    if ids is None:
        return None
    if not isinstance(ids, Tensor) or ids.dtype not in checks.INT_DTYPES:
        way_out = "Pass an int64 tensor."
        if isinstance(ids, Tensor) and ids.dtype is torch.bool:
            way_out = f"Of a mask of real keys make torch.where({name}, 0, -1)."
        rule = f"{name} must be an integer tensor"
        raise TypeError(message(who, rule, checks.describe(ids), way_out))
    if ids.dim() not in (1, 2) or ids.shape[-1] != keys:
        rule = f"{name} must have shape ({keys},) or (B, {keys})"
        got = f"shape {tuple(ids.shape)}"
        raise ValueError(message(who, rule, got, "Give one to each key, cached ones too."))
    return ids.to(device=device, dtype=torch.int64)


def check_batches(who: str, batch: int | None = None, **values: Tensor | int | None) -> bool:
    """Whether any of ``values`` has a row for each sequence; refuse those with other numbers.

    A query offset has a row for each sequence if it has one axis, all others if they have two.
    The number of sequences is ``batch``, or the largest there is.
    """
    rows = {}
    for name, x in values.items():
        if isinstance(x, Tensor) and x.dim() == (1 if name == "query_offset" else 2):
            rows[name] = x.shape[0]
    wanted = max([1, *rows.values()]) if batch is None else batch
    for name, got in rows.items():
        if got not in (1, wanted):
            rule = f"{name} must be for 1 or {wanted} sequences"
            raise ValueError(message(who, rule, got, "Give one row to each sequence."))
    return bool(rows)


def check_qk(who: str, q: Any, k: Any) -> None:
    """Refuse queries and keys that do not belong together."""
    for name, x in (("q", q), ("k", k)):
        checks.float_tensor(who, name, x)
        checks.rank(who, name, x, (4,), "(B, heads, tokens, D)")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        rule = f"k must have the batch and width of q, {q.shape[0]} and {q.shape[3]}"
        raise ValueError(message(who, rule, f"shape {tuple(k.shape)}", "Match q and k."))
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        rule = f"the {q.shape[1]} heads of q must be a multiple of those of k"
        way_out = "Use num_heads divisible by num_kv_heads."
        raise ValueError(message(who, rule, k.shape[1], way_out))


def check_qkv(who: str, q: Any, k: Any, v: Any, slopes: Any) -> Tensor:
    """The slopes, on the device of ``q``, once everything fits together."""
    check_qk(who, q, k)
    checks.float_tensor(who, "v", v)
    if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        rule = f"v must have shape {(*k.shape[:3], 'Dv')}, the keys of k"
        raise ValueError(message(who, rule, f"shape {tuple(v.shape)}", "Match k and v."))
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        got = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        rule = "q, k and v must have one dtype and device"
        raise ValueError(message(who, rule, got, "Convert them first."))
    if k.shape[2] < q.shape[2]:
        rule = f"k must have at least as many keys as there are queries, {q.shape[2]}"
        way_out = "Pass the keys of all queries, cached ones too."
        raise ValueError(message(who, rule, k.shape[2], way_out))
    if check_slopes(who, slopes).shape[-1] != q.shape[1]:
        rule = f"q must have {slopes.shape[-1]} heads, one for each slope"
        raise ValueError(message(who, rule, q.shape[1], "Take the slopes of these heads."))
    return slopes.to(q.device)  # type: ignore[no-any-return]


def check_scale(who: str, scale: Any, q: Tensor) -> float:
    """``scale``, or one over the root of the width of ``q`` if None."""
    if scale is None:
        return max(q.shape[-1], 1) ** -0.5  # type: ignore[no-any-return]
    return checks.positive_float(who, "scale", scale)


def check_score_bound(who: str, bound: Any, heads: int, like: Tensor) -> Tensor:
    """A bound ``[1 or B, 1 or H]`` in at least float32, neither negative nor NaN.

    Values on a device are not read: a bound that is negative or NaN there prunes nothing.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    rule, way_out = "score_bound must not be negative or NaN", "Pass bound_scores(q, k), say."
    if not isinstance(bound, Tensor):
        if isinstance(bound, bool) or not isinstance(bound, (int, float)):
            kind, got = "score_bound must be a number or a tensor", checks.describe(bound)
            raise TypeError(message(who, kind, got, "Pass float(score_bound)."))
        if not bound >= 0:
            raise ValueError(message(who, rule, bound, way_out))
        return torch.full((1, 1), float(bound), dtype=wide, device=like.device)
    checks.float_tensor(who, "score_bound", bound)
    checks.rank(who, "score_bound", bound, (0, 1, 2), "(H,) or (B, H)")
    if is_readable(bound) and not bool((bound >= 0).all()):
        raise ValueError(message(who, rule, bound.min().item(), way_out))
    if bound.dim() and bound.shape[-1] not in (1, heads):
        rule = f"score_bound must be for 1 or {heads} heads"
        raise ValueError(message(who, rule, bound.shape[-1], "Give one to each head."))
    safe = torch.where(bound >= 0, bound, float("inf")).to(like.device, wide)
    return safe.reshape((1,) * (2 - safe.dim()) + safe.shape)
