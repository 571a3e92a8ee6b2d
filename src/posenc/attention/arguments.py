"""Checks of what attention is called with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks
from posenc._contract.tracing import is_readable


def inputs(who: str, q: Any, k: Any, v: Any, slopes: Any) -> Tensor:
    """The slopes, on the device of ``q``, once everything fits together."""
    pair(who, q, k)
    checks.float_tensor(who, "v", v)
    if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        rule = f"v must have shape {(*k.shape[:3], 'Dv')}, the keys of k"
        raise ValueError(checks.message(who, rule, f"shape {tuple(v.shape)}", "Match k and v."))
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        rule, way_out = "q, k and v must have one dtype and device", "Convert them first."
        got = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise ValueError(checks.message(who, rule, got, way_out))
    if k.shape[2] < q.shape[2]:
        rule = f"k must have at least as many keys as there are queries, {q.shape[2]}"
        way_out = "Queries are the last of the keys."
        raise ValueError(checks.message(who, rule, k.shape[2], way_out))
    steep = qk_checks.slopes(who, slopes)
    if steep.shape[-1] != q.shape[1]:
        rule = f"q must have {steep.shape[-1]} heads, one for each slope"
        raise ValueError(checks.message(who, rule, q.shape[1], "Take the slopes of these heads."))
    qk_checks.check_batch(who, "slopes", steep, 2, q.shape[0])
    return steep.to(q.device)


def pair(who: str, q: Any, k: Any) -> None:
    """Refuse queries and keys that do not belong together."""
    for name, x in (("q", q), ("k", k)):
        checks.float_tensor(who, name, x)
        checks.rank(who, name, x, (4,), "(B, heads, tokens, D)")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        rule = f"k must have the batch and width of q, {q.shape[0]} and {q.shape[3]}"
        raise ValueError(checks.message(who, rule, f"shape {tuple(k.shape)}", "Match q and k."))
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        rule = f"the {q.shape[1]} heads of q must be a multiple of those of k"
        raise ValueError(checks.message(who, rule, k.shape[1], "Each key head serves a group."))


def scale(who: str, value: Any, q: Tensor) -> float:
    """``scale``, or one over the root of the width."""
    return (
        max(q.shape[-1], 1) ** -0.5 if value is None else checks.positive_float(who, "scale", value)
    )


def bound(who: str, value: Any, like: Tensor) -> Tensor:
    """A bound ``[1 or B, 1 or H]`` in at least float32, neither negative nor NaN."""
    wide = torch.promote_types(like.dtype, torch.float32)
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            rule, got = "score_bound must be a number or a tensor", checks.describe(value)
            raise TypeError(checks.message(who, rule, got, "Pass float(score_bound)."))
        if not value >= 0:
            rule = "score_bound must not be negative or NaN"
            raise ValueError(checks.message(who, rule, value, "See score_bound(q, k)."))
        return torch.full((1, 1), float(value), dtype=wide, device=like.device)
    checks.float_tensor(who, "score_bound", value)
    checks.rank(who, "score_bound", value, (0, 1, 2), "(H,) or (B, H)")
    if is_readable(value) and not bool((value >= 0).all()):
        rule = "score_bound must not be negative or NaN"
        raise ValueError(checks.message(who, rule, value.min().item(), "See score_bound(q, k)."))
    # On a device nobody reads it: what is negative or NaN there leaves nothing out.
    found = torch.where(value >= 0, value, float("inf")).to(like.device, wide)
    return found.reshape((1,) * (2 - found.dim()) + found.shape)
