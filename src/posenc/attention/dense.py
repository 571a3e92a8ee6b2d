"""Attention with all scores at once, for derivatives that the kernels lack."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc._contract.tracing import is_readable, without_autocast
from posenc.attention.biases import Call, bias_rows, for_each_query_head, hidden_keys


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp by torch's own operations, with every derivative."""
    queries, keys = q.shape[2], k.shape[2]
    seen = call.spans(queries, keys, q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q):
        k, v = (for_each_query_head(x.to(wide), q.shape[1]) for x in (k, v))
        index = torch.arange(keys, device=q.device)
        bias = bias_rows(call.kind, call.values, call.zero, seen.own, index).to(wide)
        scores = q.to(wide) @ k.mT * call.scale + bias
        return attend_scores(scores, hidden_keys(seen, index), v, q.dtype)


def attend_scores(
    scores: Tensor, hidden: Tensor | None, v: Tensor, dtype: torch.dtype, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention by ``scores``, ``[B, H, Q, K]``; queries that see no key get zero, and -inf."""
    # A bias of minus infinity hides a key too. A query that sees no key gets scores of zero at
    # first: with minus infinity alone, its gradients would be NaN.
    if not scores.shape[-1]:
        return (scores @ v).to(dtype), scores.logsumexp(-1)
    scores = scores if hidden is None else scores.masked_fill(hidden, float("-inf"))
    nothing = scores.detach().amax(-1, keepdim=True) == float("-inf")
    all_see = is_readable(nothing) and not nothing.any()
    scores = scores if all_see else scores.masked_fill(nothing, 0.0)
    weights = scores.softmax(-1)
    # The greatest weight is the exponential of this difference: no second one of each score.
    lse = scores.amax(-1) - weights.amax(-1).log()
    if not all_see:
        weights = weights.masked_fill(nothing, 0.0)
        lse = lse.masked_fill(nothing[..., 0], float("-inf"))
    if dropout_p:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    return (weights @ v).to(dtype), lse
