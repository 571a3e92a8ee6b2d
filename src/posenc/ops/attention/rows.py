"""Attention by torch operations, from the formula of a bias: the scores of some queries.

A few queries at a time serve what no kernel computes: a bias that is a function, a mask, dropout.
All scores at once serve exporters, and the derivatives that the kernels lack.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc._contract import checks, qk_checks
from posenc._contract.qk_checks import UNBOUNDED
from posenc._contract.tracing import in_transform, is_exporting, is_readable, without_autocast
from posenc.numerics.spans import Spans, document_ends
from posenc.ops.attention.biases import (
    COUNTED,
    NUMBERS,
    Bias,
    CopeLevels,
    NoBias,
    Products,
    RowBias,
    check_bias,
)
from posenc.ops.attention.biases.kind import Where, for_each_query_head
from posenc.ops.attention.biases.row_bias import check_rows
from posenc.ops.attention.call import Call
from posenc.ops.attention.places import Places, check_places

# Scores of a piece on the CPU, whose cache holds them, and on other devices; the most scores of a
# call that are kept for the backward pass (64 MiB for each tensor of float32); and the fewest
# queries that a window leaves in a piece.
SCORES, SCORES_ELSEWHERE, KEPT, FEWEST = 2**22, 2**25, 2**24, 64


def attend_by_rows(
    who: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    bias: NoBias | Bias,
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
    # A checkpoint has hooks, which neither torch.func nor an exporter takes.
    again = torch.is_grad_enabled() and not in_transform(q, k, v) and not is_exporting()
    again = again and (traced or batch * heads * queries * keys > KEPT)
    if isinstance(bias, Products):
        bias = bias.with_products_of_keys(call.scale)
    piece = partial(_piece, who, call, bias, dropout_p)
    if again:
        piece = partial(checkpoint, piece, use_reentrant=False)
    # A loop, or a slice, is traced for only one length: short calls have none, nor exported ones.
    if is_exporting() or (traced and queries <= size):
        return piece(q, k, v, seen, slice(0, queries), slice(0, keys), mask)
    pieces = []
    for start in range(0, max(queries, 1), size):
        some = slice(start, min(start + size, queries))
        near = _near_keys(call, some, keys)
        part = mask if mask is None or mask.shape[2] == 1 else mask[:, :, some]
        part = part if part is None or part.shape[3] == 1 else part[..., near]
        inputs = q[:, :, some], k[:, :, near], v[:, :, near]
        pieces.append(piece(*inputs, Spans(*(x[:, some] for x in seen)), some, near, part))
    if len(pieces) == 1:
        return pieces[0]
    outs, sums = zip(*pieces, strict=True)
    with without_autocast(q):
        return torch.cat(outs, 2), torch.cat(sums, 2)


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    bias: NoBias | Bias,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    who: str = "",
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp with all scores at once, and with every derivative."""
    (queries, keys), seen = (q.shape[2], k.shape[2]), call.spans(q.shape[2], k.shape[2], q.device)
    where = slice(0, queries), slice(0, keys)
    return _piece(who, call, bias, dropout_p, q, k, v, seen, *where, mask)


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
    bias: NoBias | Bias,
    dropout_p: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Spans,
    some: slice,
    near: slice,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of ``some`` queries to the keys ``near`` them."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q):
        k, v = (for_each_query_head(x.to(wide), q.shape[1]) for x in (k, v))
        index = torch.arange(near.start, near.stop, device=q.device)
        where = Where(seen.own, index, some, near, call.first, call.scale)
        scores = q.to(wide) * call.scale @ k.mT
        if not isinstance(bias, COUNTED):
            scores = _add(who, scores, bias, where)
        sees_all = not call.causal and call.first is None and call.window is None
        hidden = None if sees_all else hidden_keys(seen, index)
        if call.padding is not None:
            padded = call.padding[:, None, None, near] == 0
            hidden = padded if hidden is None else hidden | padded
        scores = _hide(scores, hidden, mask)
        if isinstance(bias, COUNTED):
            scores = _add(who, scores, bias, where)
        return _attend_scores(scores, v, q.dtype, dropout_p)


def _add(who: str, scores: Tensor, bias: NoBias | Bias, where: Where) -> Tensor:
    """Scores plus the bias."""
    if isinstance(bias, NoBias):
        return scores
    rows = bias.of(where, scores)
    if isinstance(bias, RowBias):
        check_rows(who, rows, scores)
    return scores + rows.to(scores.dtype)


def _hide(scores: Tensor, hidden: Tensor | None, mask: Tensor | None) -> Tensor:
    """Scores with minus infinity for ``hidden`` keys, and with a mask of bools or numbers."""
    if mask is not None and mask.dtype == torch.bool:
        hidden = ~mask if hidden is None else hidden | ~mask
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))


def _attend_scores(
    scores: Tensor, v: Tensor, dtype: torch.dtype, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Attention by ``scores``, ``[B, H, Q, K]``; queries that see no key get zero, and -inf."""
    # A query that sees no key gets scores of zero at first: with only minus infinity, its gradients
    # would be NaN.
    if not scores.shape[-1]:
        return (scores @ v).to(dtype), scores.logsumexp(-1)
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


def hidden_keys(seen: Spans, index: Tensor) -> Tensor:
    """Whether a query does not see the keys at ``index``, ``[1 or B, 1, Q, k]``."""
    first, last = seen.first[:, None, :, None], seen.last[:, None, :, None]
    return (index < first) | (index > last)


def relative_bias(
    bias: Bias,
    q_len: int,
    k_len: int | None = None,
    *,
    causal: bool = True,
    query_offset: int | Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    r"""The whole matrix of a bias, to look at, or for an attention of your own.

    Args:
        bias: The bias.
        q_len: Queries ``Q``.
        k_len: Keys ``K``, at least ``Q``; ``Q`` if None.
        causal: Whether later keys get ``-inf``.
        query_offset: As in :func:`biased_attention`, and so are the next two.
        document_ids: Ids ``(K,)`` or ``(B, K)``.
        window: A sliding window.
        scale: The factor of :func:`relative_terms`, which is that of the attention;
            :math:`1/\sqrt{D}` if None. Other biases have none.
        dtype: A floating dtype for the result.
        device: The device of a :class:`RowBias`; other biases are on that of their values.

    Returns:
        Tensor of shape ``(H, Q, K)``, or ``(B, H, Q, K)`` if an argument has a batch axis.

    Examples:
        >>> from posenc.attention import DistanceTable
        >>> relative_bias(DistanceTable(torch.tensor([[0.0, -1.0, -3.0]])), 4)
        tensor([[[ 0., -inf, -inf, -inf],
                 [-1.,  0., -inf, -inf],
                 [-3., -1.,  0., -inf],
                 [-3., -3., -1.,  0.]]])
    """
    who = "relative_bias"
    checks.float_dtype(who, "dtype", dtype)
    if bias is None:
        rule = "bias must be Slopes, DistanceTable, RunningSum or RowBias"
        checks.fail(who, rule, None, "Pass Slopes(torch.zeros(heads)) for none.", TypeError)
    check_bias(who, bias, None, q_len if k_len is None else k_len)
    if not isinstance(bias, RowBias):
        device = bias[0].device
    given = q_len, k_len, causal, query_offset, document_ids, window, device or "cpu"
    places = check_places(who, bias, *given)
    size = 1.0
    if isinstance(bias, (Products, CopeLevels)):
        size = qk_checks.check_scale(who, scale, bias.q)
    matrix = matrix_of(bias, places, dtype, size)
    return matrix if places.batched or len(matrix) > 1 else matrix[0]


def matrix_of(
    bias: Bias, places: Places, dtype: torch.dtype, scale: float, mask: Tensor | None = None
) -> Tensor:
    """The whole matrix of a checked bias, with the mask, ``[1 or B, H, Q, K]``."""
    seen, ends = places.spans(), document_ends(places.ids)
    first = None if ends is None else torch.atleast_2d(ends[0])
    index = torch.arange(places.keys, device=seen.own.device)
    queries, keys = slice(0, places.queries), slice(0, places.keys)
    hidden = hidden_keys(seen, index)
    with without_autocast(index):
        like = torch.zeros((), dtype=dtype, device=index.device)
        if isinstance(bias, NUMBERS):
            bias = bias.as_fields(dtype)
        elif isinstance(bias, Products):
            wide = torch.promote_types(bias.q.dtype, torch.float32)
            bias, like = bias.with_products_of_keys(scale), like.to(wide)
        elif isinstance(bias, CopeLevels):
            q, k = (x.to(bias.values.dtype) for x in bias[:2])
            scores = q * scale @ for_each_query_head(k, q.shape[1]).mT
            like = _hide(scores, hidden, mask)
        where = Where(seen.own, index, queries, keys, first, scale)
        return _hide(bias.of(where, like).to(dtype), hidden, mask)
