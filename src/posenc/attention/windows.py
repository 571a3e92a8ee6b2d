"""How far each query has to look: bounds on its scores, and the keys that are left."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.numerics.slopes import window_length
from posenc.numerics.spans import Ends, Spans, spans

# Norms, products and the kernels' own scores are sums in float32: each is off by at most a
# 2^-10th of |q|·|k|, up to 2^14 channels, and the three together by less than this.
SLACK = 1 + 2**-8


def needed(
    q: Tensor,
    k: Tensor,
    slopes: Tensor,
    offset: int | Tensor,
    ends: Ends | None,
    bound: Tensor | None,
    scale: float,
    *,
    causal: bool,
    windowed: bool,
) -> tuple[Spans, Tensor, Tensor]:
    """What each query may see, and the first and the last key that it needs of that.

    The bound is taken from ``q`` and ``k`` if there is none; both cost one reading of them.
    """
    queries, keys = q.shape[2], k.shape[2]
    seen = spans(queries, keys, causal=causal, offset=offset, ends=ends, device=q.device)
    gap = None
    if windowed and queries:
        with torch.no_grad():
            if bound is None:
                gap = score_gap(q, k, own_keys(k, queries, offset, seen.at), scale)
            else:
                gap = confirmed_gap(q, k, scale, bound)
    return seen, *narrowed(seen, slopes, gap, keys, q.dtype, causal=causal)


def norms(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Length of each query times ``scale``, ``[B, H, Q]``, and of the longest key, ``[B, H]``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    lengths = torch.linalg.vector_norm(q, dim=-1, dtype=wide) * abs(scale)
    longest = torch.linalg.vector_norm(k, dim=-1, dtype=wide).amax(-1)
    return lengths, longest.repeat_interleave(q.shape[1] // k.shape[1], 1)


def score_gap(q: Tensor, k: Tensor, own: Tensor, scale: float) -> Tensor:
    r"""How far any score of a query can be above that of its own key, ``[B, H, Q]``.

    .. math:: g_i = s\,|q_i| \max_j |k_j| - s\, q_i \cdot k_i

    By Cauchy-Schwarz. The own score is exact, which about halves the windows that the bound
    :math:`2 s |q||k|` gives.
    """
    lengths, longest = norms(q, k, scale)
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    wide = lengths.dtype
    product = q.unflatten(1, groups).to(wide) * own.unsqueeze(2).to(wide)
    ceiling = lengths * longest[..., None] * SLACK
    own_scores: Tensor = product.sum(-1).flatten(1, 2) * scale
    return ceiling - own_scores


def own_keys(k: Tensor, q_len: int, offset: int | Tensor, at: Tensor) -> Tensor:
    """The key at each query's own place, ``[B, Hk, Q, D]``."""
    if not isinstance(offset, Tensor):
        return k.narrow(2, offset, q_len)
    rows = at.clamp(0, k.shape[2] - 1)[:, None, :, None]
    return k.gather(2, rows.expand(k.shape[0], k.shape[1], -1, k.shape[3]))


def confirmed_gap(q: Tensor, k: Tensor, scale: float, bound: Tensor) -> Tensor:
    """Twice ``bound`` where the norms confirm it, and otherwise infinite, ``[B, H, 1]``."""
    lengths, longest = norms(q, k, scale)
    # A bound that is exactly the product of the norms, as after a norm of q and k, must pass.
    holds = lengths.amax(-1) * longest <= bound * SLACK
    gap = bound * (2 * SLACK * SLACK)
    return torch.where(holds, gap, torch.full_like(gap, float("inf")))[..., None]


def narrowed(
    seen: Spans, slopes: Tensor, gap: Tensor | None, keys: int, dtype: torch.dtype, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """First and last key that each query of each head needs, int64 ``[1 or B, 1 or H, Q]``.

    Args:
        seen: What it may see.
        slopes: ``[H]`` or ``[B, H]``.
        gap: How far a score can be above that of the own key, ``[..., H, 1 or Q]``; None
            narrows nothing.
        keys: ``K``.
        dtype: Of the output.
        causal: Whether ``seen`` ends at the own key.
    """
    at, first, last = (x[:, None] for x in seen)
    if gap is None:
        return first, last
    steep = (slopes if slopes.dim() == 2 else slopes[None]).to(gap.dtype)[..., None]
    reach = window_length(steep, gap, keys, dtype, causal=causal).long()
    low = torch.maximum(first, at - reach + 1)
    # What ends at the own key ends there for every head.
    return low, last if causal else torch.minimum(last, at + reach - 1)
