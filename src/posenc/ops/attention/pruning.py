"""Find the keys that each query needs, from bounds on its scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks
from posenc.numerics.slopes import window_length
from posenc.numerics.spans import Spans, gather_rows
from posenc.ops.attention.biases import RunningSum, Slopes
from posenc.ops.attention.call import Call

# Norms, products and the kernels' own scores are sums in float32. With up to 2^14 channels each is
# off by at most 2^-10 |q||k|, and the three together by less than this factor.
SLACK = 1 + 2**-8


def alibi_reach(
    slopes: Tensor,
    k_len: int,
    *,
    score_bound: float | Tensor,
    dtype: torch.dtype,
    causal: bool = True,
) -> Tensor:
    """Distance in tokens at which keys stop affecting the output, for each head.

    Keys at this distance and further may be pruned, as :func:`alibi_block_mask` does: a sliding
    window of this many tokens, the query's own among them, is enough.

    Args:
        slopes: ``(H,)`` or ``(B, H)``.
        k_len: Keys ``K``.
        score_bound: An upper bound on every ``|q · k| · scale``, as in :func:`alibi_block_mask`.
        dtype: The dtype of the output.
        causal: Whether keys are on one side of the query only.

    Returns:
        int64 ``(H,)``, or ``(B, H)`` if either argument is, from 1 to ``k_len``.

    Examples:
        >>> from posenc.functional import alibi_slopes
        >>> alibi_reach(alibi_slopes(4), 32_768, score_bound=10.0, dtype=torch.bfloat16)
        tensor([ 115,  478, 1996, 8335])
    """
    who = "alibi_reach"
    slopes = qk_checks.check_slopes(who, slopes)
    keys = checks.integer(who, "k_len", k_len)
    checks.float_dtype(who, "dtype", dtype)
    checks.boolean(who, "causal", causal)
    bound = qk_checks.check_score_bound(who, score_bound, slopes.shape[-1], slopes)
    qk_checks.check_batches(who, slopes=slopes, score_bound=bound)
    if slopes.dim() == len(bound) == 1:
        bound = bound[0]
    gap = 2 * SLACK * bound
    return window_length(slopes.to(gap.dtype), gap, keys, dtype, causal=causal).long()


def bound_scores(q: Tensor, k: Tensor, *, scale: float | None = None) -> Tensor:
    r"""A bound on every score, from the norms: :math:`s \max_i |q_i| \max_j |k_j|`.

    Args:
        q: ``(B, H, Q, D)``.
        k: ``(B, Hk, K, D)`` with ``H`` a multiple of ``Hk``.
        scale: :math:`s`, :math:`1/\sqrt{D}` if None.

    Returns:
        float32 (float64 for float64) of shape ``(B, H)``.

    Examples:
        >>> q = k = torch.ones(1, 2, 5, 64)
        >>> bound_scores(q, k)
        tensor([[8., 8.]])
    """
    who = "bound_scores"
    qk_checks.check_qk(who, q, k)
    scale = qk_checks.check_scale(who, scale, q)
    return _norms(q).amax(-1) * longest_key(q, k) * abs(scale)


def needed_keys(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The first and the last key that each query needs, int64 ``[1 or B, 1 or H, Q]``."""
    queries, keys = q.shape[2], k.shape[2]
    seen = call.spans(queries, keys, q.device)
    gap = None
    if call.prunes and queries:
        with torch.no_grad():
            offset = call.start if call.starts is None else call.starts
            gap = score_gap(q, k, _own_keys(k, queries, offset, seen.own), call.scale)
            if call.padding is not None:
                # A query whose own key is hidden has no score that others could be measured by.
                own = gather_rows(call.padding, seen.own.clamp(0, keys - 1))
                gap = gap.masked_fill(own[:, None] == 0, float("inf"))
    if gap is not None and isinstance(call.bias, RunningSum):
        return prune_sums(seen, call.bias.values, gap, q.dtype, causal=call.causal)
    slopes = call.bias.values if isinstance(call.bias, Slopes) else torch.zeros(())
    return prune_keys(seen, slopes, gap, keys, q.dtype, causal=call.causal)


def _norms(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=wide)
    return norms


def longest_key(q: Tensor, k: Tensor) -> Tensor:
    """Norm of the longest key, for each head of ``q``, ``[B, H]``."""
    return _norms(k).amax(-1).repeat_interleave(q.shape[1] // k.shape[1], 1)


def score_gap(
    q: Tensor, k: Tensor, own_keys: Tensor, scale: float, longest: Tensor | None = None
) -> Tensor:
    r"""How far any score of a query can be above that of its own key, ``[B, H, Q]``.

    .. math:: g_i = s\,|q_i| \max_j |k_j| - s\, q_i \cdot k_i

    This follows from Cauchy-Schwarz. The score of the own key is computed, which about halves the
    windows of the bound :math:`2 s |q||k|`. ``longest``, ``[B, H]``, is the norm of the longest key
    where ``k`` has only some of them.
    """
    longest = longest_key(q, k) if longest is None else longest
    q_norms = _norms(q) * abs(scale)
    groups, wide = (k.shape[1], q.shape[1] // k.shape[1]), q_norms.dtype
    products = q.unflatten(1, groups).to(wide) * own_keys.unsqueeze(2).to(wide)
    own_scores: Tensor = products.sum(-1).flatten(1, 2) * scale
    return q_norms * longest[..., None] * SLACK - own_scores


def _own_keys(k: Tensor, q_len: int, offset: int | Tensor, own: Tensor) -> Tensor:
    """The key at each query's own index, ``[B, Hk, Q, D]``."""
    if not isinstance(offset, Tensor):
        return k.narrow(2, offset, q_len)
    rows = own.clamp(0, k.shape[2] - 1)[:, None, :, None]
    return k.gather(2, rows.expand(k.shape[0], k.shape[1], -1, k.shape[3]))


def prune_keys(
    seen: Spans, slopes: Tensor, gap: Tensor | None, keys: int, dtype: torch.dtype, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """First and last key that each query of each head needs, int64 ``[1 or B, 1 or H, Q]``.

    ``gap``, ``[..., H, 1 or Q]``, is that of :func:`score_gap`; None prunes nothing.
    """
    own, first, last = (x[:, None] for x in seen)
    if gap is None:
        return first, last
    rows = torch.atleast_2d(slopes).to(gap.dtype)[..., None]
    reach = window_length(rows, gap, keys, dtype, causal=causal).long()
    low = torch.maximum(first, own - reach + 1)
    # A causal range ends at the own key for every head.
    return low, last if causal else torch.minimum(last, own + reach - 1)


def prune_sums(
    seen: Spans, sums: Tensor, gap: Tensor, dtype: torch.dtype, *, causal: bool
) -> tuple[Tensor, Tensor]:
    r"""As :func:`prune_keys`, for the bias :math:`c_i - c_j` with ``sums``, ``[1 or B, H, K]``.

    The weight of key :math:`j` is at most :math:`e^{g_i + c_i - c_j}`. With
    :math:`c_j \ge c_i + g_i + \ln(8 K / \epsilon)` for all keys that are left out, at most ``K``,
    their weights together are at most :math:`\epsilon / 8`. Keys are left out up to the first one
    below that, whether or not the sums are monotone.
    """
    batch, keys = max(len(sums), len(gap), len(seen.own)), sums.shape[-1]
    sums = sums.to(torch.promote_types(sums.dtype, gap.dtype)).expand(batch, -1, -1).contiguous()
    own, first, last = (x[:, None] for x in seen)
    at = own.clamp(0, max(keys - 1, 0)).expand(batch, sums.shape[1], -1)
    spare = math.log(8 * max(keys, 1) / torch.finfo(dtype).eps)
    # The factor covers the roundings of this line in float32.
    far = sums.gather(2, at) + (gap + spare) * (1 + 2**-20)
    far = far.masked_fill(far.isnan(), float("inf"))
    least_before = sums.cummin(-1).values
    count = torch.searchsorted(-least_before, -far, right=True)
    low = torch.maximum(first, torch.minimum(count, own))
    if causal:
        return low, last
    least_after = sums.flip(-1).cummin(-1).values.flip(-1)
    count = torch.searchsorted(least_after, far)
    return low, torch.minimum(last, torch.maximum(count - 1, own))
