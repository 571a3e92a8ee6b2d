"""ALiBi attention with all scores at once, for derivatives that the other backends lack."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc._contract.tracing import in_forward_mode, in_transform, is_exporting
from posenc.attention.pruning import Plan
from posenc.numerics.spans import spans


def is_needed(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> bool:
    """Whether the call is in torch.func or forward mode, is exported, or has trainable slopes.

    An exported program must run where this package is not installed, so it cannot hold its ops.
    """
    if is_exporting() or in_transform(q, k, v, slopes) or in_forward_mode():
        return True
    return torch.is_grad_enabled() and slopes.requires_grad


def attend(q: Tensor, k: Tensor, v: Tensor, start: int | Tensor, plan: Plan) -> Tensor:
    """Attention by torch's own operations."""
    keys, causal, ends = k.shape[2], plan.causal, plan.ends
    seen = spans(q.shape[2], keys, causal=causal, offset=start, ends=ends, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    shared = q.shape[1] // k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        k, v = (x.to(wide).repeat_interleave(shared, 1) for x in (k, v))
        own, first, last = (x[:, None, :, None] for x in seen)
        index = torch.arange(keys, device=q.device)
        hidden = (index < first) | (index > last)
        rows: Tensor = torch.atleast_2d(plan.slopes).to(wide)
        bias = rows[..., None, None] * (index - own).abs()
        scores = q.to(wide) @ k.mT * plan.scale - bias
        # With minus infinity, the gradients of a query that sees no key would be NaN.
        scores = scores.masked_fill(hidden, torch.finfo(wide).min)
        weights = scores.softmax(-1).masked_fill(hidden, 0.0)
        return (weights @ v).to(q.dtype)
