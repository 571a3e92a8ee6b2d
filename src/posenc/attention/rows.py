"""Attention by torch operations: a few queries at a time, or all scores at once.

A few queries at a time serve a bias that is a function, a mask or dropout. All scores at once serve
exporters, and the derivatives that the kernels lack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc._contract import checks
from posenc._contract.qk_checks import UNBOUNDED
from posenc._contract.tracing import in_transform, is_exporting, is_readable, without_autocast
from posenc.attention.biases import Call, bias_rows, for_each_query_head, hidden_keys
from posenc.numerics.spans import Spans

# Scores of a piece on the CPU, whose cache holds them, and on other devices; the most scores of a
# call that are kept for the backward pass (64 MiB for each tensor of float32); and the fewest
# queries that a window leaves in a piece.
SCORES, SCORES_ELSEWHERE, KEPT, FEWEST = 2**22, 2**25, 2**24, 64

RowFunction = Callable[[Tensor, Tensor], Tensor]


def attend(
    who: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    rows: RowFunction | None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; long calls are computed again in the backward pass.

    ``rows`` is that of a :class:`RowBias`, None for the bias of the call; the mask has four axes. A
    checkpoint draws the same random numbers again.
    """
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    seen = call.spans(queries, keys, q.device)
    scores = SCORES if q.is_cpu else SCORES_ELSEWHERE
    size = max(1, scores // max(1, batch * heads * keys))
    traced = torch.compiler.is_compiling()
    if call.window is not None and call.starts is None and not traced:
        # So many queries meet at most twice as many keys.
        reach = call.window[0] + (0 if call.causal else call.window[1]) + 1
        reach = min(max(reach, FEWEST), keys)
        size = max(1, min(reach, scores // max(1, 2 * batch * heads * reach)))
    # A checkpoint has hooks, which torch.func does not take.
    again = torch.is_grad_enabled() and not in_transform(q, k, v)
    again = again and (traced or batch * heads * queries * keys > KEPT)
    piece = partial(_piece, who, call, rows, dropout_p)
    if again:
        piece = partial(checkpoint, piece, use_reentrant=False)
    # A loop, or a slice, is traced for only one length: short calls have none, nor exported ones.
    if is_exporting() or (traced and queries <= size):
        return piece(q, k, v, seen, slice(0, keys), mask)
    pieces = []
    for start in range(0, max(queries, 1), size):
        some = slice(start, min(start + size, queries))
        near = _near_keys(call, some, keys)
        part = mask if mask is None or mask.shape[2] == 1 else mask[:, :, some]
        part = part if part is None or part.shape[3] == 1 else part[..., near]
        inputs = q[:, :, some], k[:, :, near], v[:, :, near]
        pieces.append(piece(*inputs, Spans(*(x[:, some] for x in seen)), near, part))
    if len(pieces) == 1:
        return pieces[0]
    outs, sums = zip(*pieces, strict=True)
    with without_autocast(q):
        return torch.cat(outs, 2), torch.cat(sums, 2)


def attend_all(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp with all scores at once, and with every derivative."""
    seen = call.spans(q.shape[2], k.shape[2], q.device)
    return _piece("", call, None, 0.0, q, k, v, seen, slice(0, k.shape[2]), None)


def attend_scores(
    scores: Tensor, hidden: Tensor | None, v: Tensor, dtype: torch.dtype, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention by ``scores``, ``[B, H, Q, K]``; queries that see no key get zero, and -inf."""
    # A bias of minus infinity hides a key too. A query that sees no key gets scores of zero at
    # first: with only minus infinity, its gradients would be NaN.
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


def _near_keys(call: Call, rows: slice, keys: int) -> slice:
    """The keys that some of these queries may see."""
    if call.starts is not None:
        return slice(0, keys)
    left, right = call.window or (UNBOUNDED, UNBOUNDED)
    begin = max(call.start + rows.start - left, 0)
    end = call.start + rows.stop + (0 if call.causal else right)
    return slice(begin, min(end, keys))


def _piece(
    who: str,
    call: Call,
    rows: RowFunction | None,
    dropout_p: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Spans,
    near: slice,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of some queries to the keys ``near`` them."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q):
        k, v = (for_each_query_head(x.to(wide), q.shape[1]) for x in (k, v))
        index = torch.arange(near.start, near.stop, device=q.device)
        scores = q.to(wide) * call.scale @ k.mT
        rows = partial(bias_rows, call.kind, call.values, call.zero) if rows is None else rows
        bias = rows(seen.own, index)
        sizes = zip(getattr(bias, "shape", ()), scores.shape, strict=False)
        if getattr(bias, "ndim", 0) != 4 or any(n != 1 and n != m for n, m in sizes):
            rule = f"RowBias.rows must return a tensor of shape {tuple(scores.shape)}, or (1, ...)"
            hint = "Return [1 or B, H, n, k] for queries [1 or B, n] and keys [k]."
            checks.fail(who, rule, checks.describe(bias), hint)
        scores = scores + bias.to(wide)
        sees_all = not call.causal and call.first is None and call.window is None
        hidden = None if sees_all else hidden_keys(seen, index)
        if mask is not None and mask.dtype == torch.bool:
            hidden = ~mask if hidden is None else hidden | ~mask
        elif mask is not None:
            scores = scores + mask.to(wide)
        return attend_scores(scores, hidden, v, q.dtype, dropout_p)
