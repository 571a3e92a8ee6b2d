"""Attention with a bias that is a function, a few queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc.attention.biases import Call, RowBias, hidden_keys
from posenc.attention.dense import attend_scores
from posenc.numerics.spans import Spans

# Scores of a piece.
SCORES = 2**21


def attend(q: Tensor, k: Tensor, v: Tensor, bias: RowBias, call: Call) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; each piece is computed again in the backward pass."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    seen = call.spans(queries, keys, q.device)
    size = max(1, SCORES // max(1, batch * heads * keys))
    pieces = []
    for start in range(0, max(queries, 1), size):
        rows = slice(start, start + size)
        some = Spans(*(x[:, rows] for x in seen))
        given = q[:, :, rows], k, v, bias, some, call.scale
        if torch.is_grad_enabled():
            pieces.append(checkpoint(_piece, *given, use_reentrant=False))
        else:
            pieces.append(_piece(*given))
    outs, sums = zip(*pieces, strict=True)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _piece(
    q: Tensor, k: Tensor, v: Tensor, bias: RowBias, seen: Spans, scale: float
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, shared = k.shape[2], q.shape[1] // k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        k, v = (x.to(wide).repeat_interleave(shared, 1) for x in (k, v))
        index = torch.arange(keys, device=q.device)
        scores = q.to(wide) @ k.mT * scale + bias.rows(seen.own, index).to(wide)
        return attend_scores(scores, hidden_keys(seen, keys), v, q.dtype)
