"""Attention with a bias that is a function, a mask or dropout, a few queries at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc._contract import checks
from posenc._contract.qk_checks import UNBOUNDED
from posenc._contract.tracing import in_transform, is_exporting, without_autocast
from posenc.attention.biases import Call, RowBias, for_each_query_head, hidden_keys
from posenc.attention.dense import attend_scores
from posenc.numerics.spans import Spans

# Scores of a piece on the CPU, whose cache holds them, and on other devices; the most scores of a
# call that are kept for the backward pass (64 MiB for each tensor of float32); and the fewest
# queries that a window leaves in a piece.
SCORES, SCORES_ELSEWHERE, KEPT, FEWEST = 2**22, 2**25, 2**24, 64


def attend(
    who: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: RowBias,
    call: Call,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; long calls are computed again in the backward pass.

    The mask has four axes. A checkpoint draws the same random numbers again.
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
    sees_all = not call.causal and call.first is None and call.window is None
    again = torch.is_grad_enabled() and not in_transform(q, k, v)
    again = again and (traced or batch * heads * queries * keys > KEPT)
    piece = partial(checkpoint, _piece, use_reentrant=False) if again else _piece
    # A loop, or a slice, is traced for one length alone: short calls have none, nor exported ones.
    if is_exporting() or (traced and queries <= size):
        near = slice(0, keys)
        return piece(who, q, k, v, bias, seen, near, sees_all, call.scale, mask, dropout_p)
    pieces = []
    for start in range(0, max(queries, 1), size):
        rows = slice(start, min(start + size, queries))
        some, near = Spans(*(x[:, rows] for x in seen)), _near_keys(call, rows, keys)
        part = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]
        part = part if part is None or part.shape[3] == 1 else part[..., near]
        given = q[:, :, rows], k[:, :, near], v[:, :, near]
        pieces.append(piece(who, *given, bias, some, near, sees_all, call.scale, part, dropout_p))
    if len(pieces) == 1:
        return pieces[0]
    outs, sums = zip(*pieces, strict=True)
    with without_autocast(q):
        return torch.cat(outs, 2), torch.cat(sums, 2)


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: RowBias,
    seen: Spans,
    near: slice,
    sees_all: bool,
    scale: float,
    mask: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q):
        k, v = (for_each_query_head(x.to(wide), q.shape[1]) for x in (k, v))
        index = torch.arange(near.start, near.stop, device=q.device)
        scores = q.to(wide) * scale @ k.mT
        scores = scores + _check_rows(who, bias.rows(seen.own, index), scores.shape).to(wide)
        hidden = None if sees_all else hidden_keys(seen, index)
        if mask is not None and mask.dtype == torch.bool:
            hidden = ~mask if hidden is None else hidden | ~mask
        elif mask is not None:
            scores = scores + mask.to(wide)
        return attend_scores(scores, hidden, v, q.dtype, dropout_p)


def _check_rows(who: str, made: Any, shape: torch.Size) -> Tensor:
    """What a :class:`RowBias` returned, if it is for the scores of ``shape``."""
    sizes = made.shape if isinstance(made, Tensor) else ()
    if len(sizes) != 4 or any(n != 1 and n != m for n, m in zip(sizes, shape, strict=True)):
        rule = f"RowBias.rows must return a tensor of shape {tuple(shape)}, or (1, ...)"
        hint = "Return [1 or B, H, n, k] for queries [1 or B, n] and keys [k]."
        checks.fail(who, rule, checks.describe(made), hint)
    return made  # type: ignore[no-any-return]
