"""Checks of queries, keys and slopes, and of where the queries are among the keys."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.checks import describe, fail
from posenc._contract.tracing import device_assert, in_transform, is_readable

_PASS_ALL_KEYS = "Pass all keys, those in the cache included."


def check_lengths(who: str, q_len: Any, k_len: Any) -> tuple[int, int]:
    """Numbers of queries and keys; ``k_len=None`` means ``q_len``, and fewer keys are refused."""
    queries = checks.integer(who, "q_len", q_len, least=0)
    keys = queries if k_len is None else checks.integer(who, "k_len", k_len, least=0)
    if keys < queries:
        fail(who, f"k_len must be at least q_len={queries}", keys, _PASS_ALL_KEYS)
    return queries, keys


def check_slopes(who: str, slopes: Any) -> Tensor:
    """``slopes`` if they are a floating tensor ``(H,)`` or ``(B, H)``."""
    checks.float_tensor(who, "slopes", slopes)
    checks.rank(who, "slopes", slopes, (1, 2), "(H,) or (B, H)")
    return slopes  # type: ignore[no-any-return]


def check_slope_numbers(who: str, slopes: Any, heads: int) -> Any:
    """The user's own slopes as tuples of floats, ``(H,)`` or ``(B, H)``."""
    if isinstance(slopes, Tensor) and slopes.requires_grad:
        rule = "slopes must not require a gradient, because the module keeps them as constants"
        hint = "Pass slopes.detach() and learned=True, or call alibi_attention(q, k, v, slopes)."
        fail(who, rule, describe(slopes), hint)
    try:
        found = torch.as_tensor(slopes, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        hint = "Pass one number for each head."
        fail(who, "slopes must be numbers", describe(slopes), hint, TypeError)
    if check_slopes(who, found).shape[-1] != heads:
        rule = f"slopes must have one number for each of the {heads} heads"
        fail(who, rule, f"shape {tuple(found.shape)}", "Pass slopes of shape (H,) or (B, H).")
    numbers = found.tolist()
    if not bool(((found >= 0) & found.isfinite()).all()):
        hint = "Pass zero for a head without a bias."
        fail(who, "slopes must be finite and not below zero", numbers, hint)
    return tuple(map(tuple, numbers)) if found.dim() == 2 else tuple(numbers)


def check_query_offset(
    who: str, offset: Any, queries: int, keys: int, device: torch.device | str
) -> int | Tensor:
    """Key index of the first query: an int, or an int64 tensor ``()`` or ``(B,)`` on ``device``.

    None means ``keys - queries``, the largest value. Values on a device are checked there, by an
    asynchronous assertion.
    """
    most = keys - queries
    if offset is None:
        return most
    if not isinstance(offset, (Tensor, list, tuple)):
        start = checks.integer(who, "query_offset", offset, least=0)
        if start > most:
            rule = f"query_offset must be at most k_len - q_len = {most}"
            fail(who, rule, start, "Pass the key index of the first query.")
        return start
    if not isinstance(offset, Tensor) or offset.dtype not in checks.INT_DTYPES:
        rule = "query_offset must be an int, or an integer tensor of shape () or (B,)"
        fail(who, rule, describe(offset), "Pass torch.tensor(query_offset) of int64.", TypeError)
    checks.rank(who, "query_offset", offset, (0, 1), "() or (B,)")
    if is_readable(offset):
        for end in offset.aminmax() if offset.numel() else ():
            check_query_offset(who, int(end), queries, keys, device)
    elif not in_transform(offset):
        inside = (offset >= 0) & (offset <= most)
        device_assert(inside.all(), f"{who}: query_offset must be in [0, k_len - q_len].")
    return offset.to(device=device, dtype=torch.int64)


# A window without an end on one side.
UNBOUNDED = 2**30


def check_window(who: str, window: Any) -> tuple[int, int] | None:
    """How many keys a query sees before its own and after it; None for all."""
    if window is None:
        return None
    pair = isinstance(window, (tuple, list))
    sides = list(window) if pair else [window]
    rule = "window must be an int of at least 1, or a pair (left, right) of ints from -1 on"
    hint = "Pass None for all keys; -1 in a pair is no limit on that side."
    if not all(isinstance(n, (Integral, torch.SymInt)) and not isinstance(n, bool) for n in sides):
        fail(who, rule, describe(window), hint, TypeError)
    if len(sides) != (2 if pair else 1) or min(sides) < (-1 if pair else 1):
        fail(who, rule, window, hint)
    if not pair:
        sides = [sides[0] - 1] * 2
    left, right = (UNBOUNDED if n < 0 else min(int(n), UNBOUNDED) for n in sides)
    return None if left == right == UNBOUNDED else (left, right)


def check_key_ids(
    who: str, name: str, ids: Any, keys: int, device: torch.device | str
) -> Tensor | None:
    """One integer for each key, int64 ``(K,)`` or ``(B, K)`` on ``device``, or None."""
    if ids is None:
        return None
    if not isinstance(ids, Tensor) or ids.dtype not in checks.INT_DTYPES:
        hint = "Pass an int64 tensor."
        if isinstance(ids, Tensor) and ids.dtype is torch.bool:
            hint = f"For a mask of real keys, pass torch.where({name}, 0, -1)."
        fail(who, f"{name} must be an integer tensor", describe(ids), hint, TypeError)
    if ids.dim() not in (1, 2) or ids.shape[-1] != keys:
        rule, got = f"{name} must have shape ({keys},) or (B, {keys})", f"shape {tuple(ids.shape)}"
        fail(who, rule, got, "Pass one for each key, those in the cache included.")
    return ids.to(device=device, dtype=torch.int64)


def check_batches(who: str, batch: int | None = None, **values: Tensor | int | None) -> bool:
    """Whether any of ``values`` has a batch axis; its size must be 1 or ``batch``.

    ``batch=None`` means the largest of these sizes. A batched query offset has one axis, other
    batched values have two.
    """
    rows = {}
    for name, x in values.items():
        if isinstance(x, Tensor) and x.dim() == (1 if name == "query_offset" else 2):
            rows[name] = x.shape[0]
    wanted = max([1, *rows.values()]) if batch is None else batch
    for name, got in rows.items():
        if not checks.is_one_of(got, (1, wanted)):
            rule = f"{name} must be for 1 or {wanted} sequences"
            fail(who, rule, got, "Pass one row for each sequence.")
    return len(rows) > 0


def check_qk(who: str, q: Any, k: Any) -> None:
    """Refuse queries and keys whose shapes do not match."""
    for name, x in (("q", q), ("k", k)):
        checks.float_tensor(who, name, x)
        checks.rank(who, name, x, (4,), "(B, heads, tokens, D)")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        rule = f"k must have the batch and head_dim of q, {q.shape[0]} and {q.shape[3]}"
        fail(who, rule, f"shape {tuple(k.shape)}", "Pass q and k of one attention layer.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        rule = f"the {q.shape[1]} heads of q must be a multiple of those of k"
        fail(who, rule, k.shape[1], "Use num_heads divisible by num_kv_heads.")


def check_qkv(who: str, q: Any, k: Any, v: Any) -> None:
    """Refuse queries, keys and values that do not match."""
    check_qk(who, q, k)
    checks.float_tensor(who, "v", v)
    if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        rule = f"v must have shape ({', '.join(map(str, k.shape[:3]))}, Dv), the keys of k"
        fail(who, rule, f"shape {tuple(v.shape)}", "Pass one value for each key.")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        got = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        fail(who, "q, k and v must have one dtype and device", got, "Convert them first.")
    if k.shape[2] < q.shape[2]:
        rule = f"k must have at least as many keys as there are queries, {q.shape[2]}"
        hint = f"{_PASS_ALL_KEYS} Tensors are (B, heads, tokens, D); cross attention is for SDPA."
        fail(who, rule, k.shape[2], hint)


def check_scale(who: str, scale: Any, q: Tensor) -> float:
    """``scale``, or one over the root of the width of ``q`` if None."""
    if scale is None:
        return max(q.shape[-1], 1) ** -0.5  # type: ignore[no-any-return]
    return checks.positive_float(who, "scale", scale)


def check_attn_mask(
    who: str, mask: Any, shape: tuple[int, ...], device: torch.device
) -> Tensor | None:
    """A bool or floating mask for scores of ``shape``, with four axes, on ``device``, or None."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, *checks.FLOAT_DTYPES):
        rule = "attn_mask must be a tensor of bools, True for seen keys, or of numbers to add"
        fail(who, rule, describe(mask), "Pass attn_mask.bool(), for example.", TypeError)
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(sizes) != 4 or not all(
        checks.is_one_of(n, (1, m)) for n, m in zip(sizes, shape, strict=True)
    ):
        rule = f"attn_mask must broadcast to (B, H, Q, K) = {tuple(shape)}"
        hint = "For one row of keys for each sequence, pass mask[:, None, None, :]."
        fail(who, rule, f"shape {tuple(mask.shape)}", hint)
    return mask.to(device).reshape(sizes)


def check_score_bound(who: str, bound: Any, heads: int, like: Tensor) -> Tensor:
    """A bound ``[1 or B, 1 or H]`` in at least float32, neither negative nor NaN.

    Values on a device are not read: a bound that is negative or NaN there prunes nothing.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    rule, hint = "score_bound must not be negative or NaN", "Pass bound_scores(q, k), say."
    if not isinstance(bound, Tensor):
        if isinstance(bound, bool) or not isinstance(bound, (int, float)):
            kind = "score_bound must be a number or a tensor"
            fail(who, kind, describe(bound), "Pass float(score_bound).", TypeError)
        if not bound >= 0:
            fail(who, rule, bound, hint)
        return torch.full((1, 1), float(bound), dtype=wide, device=like.device)
    checks.float_tensor(who, "score_bound", bound)
    checks.rank(who, "score_bound", bound, (0, 1, 2), "(H,) or (B, H)")
    if is_readable(bound) and not bool((bound >= 0).all()):
        fail(who, rule, bound.min().item(), hint)
    if bound.dim() and not checks.is_one_of(bound.shape[-1], (1, heads)):
        rule = f"score_bound must be for 1 or {heads} heads"
        fail(who, rule, bound.shape[-1], "Pass one for each head.")
    safe = torch.where(bound >= 0, bound, float("inf")).to(like.device, wide)
    return safe.reshape((1,) * (2 - safe.dim()) + safe.shape)
