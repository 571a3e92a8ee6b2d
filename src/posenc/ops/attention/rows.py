"""Attention by torch operations, and the formula of every bias: the scores of some queries.

A few queries at a time serve what no kernel computes: a bias that is a function, a mask, dropout.
All scores at once serve exporters, and the derivatives that the kernels lack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad
from torch.utils.checkpoint import checkpoint

from posenc._contract import checks, qk_checks
from posenc._contract.qk_checks import UNBOUNDED
from posenc._contract.tracing import in_transform, is_exporting, is_readable, without_autocast
from posenc.numerics.spans import Spans, document_ends, gather_rows
from posenc.ops.attention.biases import (
    Bias,
    Call,
    CopeLevels,
    FireNetwork,
    Places,
    Products,
    RowBias,
    check_bias,
    check_places,
    stored,
)

# The least c and threshold of a network: the product of two such is a normal number of float32.
SMALLEST = 1e-15
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
    bias: Bias | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; long calls are computed again in the backward pass.

    The numbers of a bias that has some are those of the call. The mask has four axes. A checkpoint
    draws the same random numbers again.
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
    of_keys = _products_of_keys(bias, call.scale)
    piece = partial(_piece, who, call, bias, of_keys, dropout_p)
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
    bias: Bias | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    who: str = "",
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp with all scores at once, and with every derivative."""
    (queries, keys), seen = (q.shape[2], k.shape[2]), call.spans(q.shape[2], k.shape[2], q.device)
    where = slice(0, queries), slice(0, keys)
    return _piece(who, call, bias, None, dropout_p, q, k, v, seen, *where, mask)


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
    bias: Bias | None,
    of_keys: Tensor | None,
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
        scores = q.to(wide) * call.scale @ k.mT
        if isinstance(bias, Products):
            where = seen.own, index, some, near
            scores = _add_products(scores, bias, call.scale, *where, of_keys)
        elif isinstance(bias, FireNetwork):
            scores = scores + network_rows(bias, call.first, seen.own, index).to(wide)
        elif isinstance(bias, RowBias):
            scores = scores + _checked(who, bias.rows(seen.own, index), scores).to(wide)
        elif call.values is not None:
            rows = bias_rows(call.kind, call.values, call.zero, seen.own, index)
            scores = scores + rows.to(wide)
        sees_all = not call.causal and call.first is None and call.window is None
        scores = _hide(scores, None if sees_all else hidden_keys(seen, index), mask)
        if isinstance(bias, CopeLevels):
            # A hidden key has no gate.
            scores = scores + level_rows(bias.values[:, :, some].to(wide), scores)
        return _attend_scores(scores, v, q.dtype, dropout_p)


def _checked(who: str, bias: Tensor, scores: Tensor) -> Tensor:
    sizes = zip(getattr(bias, "shape", ()), scores.shape, strict=False)
    if getattr(bias, "ndim", 0) != 4 or any(n != 1 and n != m for n, m in sizes):
        rule = f"RowBias.rows must return a tensor of shape {tuple(scores.shape)}, or (1, ...)"
        hint = "Return [1 or B, H, n, k] for queries [1 or B, n] and keys [k]."
        checks.fail(who, rule, checks.describe(bias), hint)
    return bias


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


def for_each_query_head(x: Tensor, heads: int) -> Tensor:
    """Keys or values of ``heads`` heads of queries, ``[B, H, K, D]``, that share those of ``x``."""
    shared = heads // x.shape[1]
    if shared == 1:
        return x
    if not is_exporting():
        return x.repeat_interleave(shared, 1)
    # torch 2.11 takes two axes that become one for a constraint on the lengths.
    return x.index_select(1, torch.arange(heads, device=x.device) // shared)


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
    seen, first = places.spans(), None
    index = torch.arange(places.keys, device=seen.own.device)
    queries, keys = slice(0, places.queries), slice(0, places.keys)
    hidden = hidden_keys(seen, index)
    with without_autocast(index):
        if isinstance(bias, Products):
            wide = torch.promote_types(bias.q.dtype, torch.float32)
            nothing = bias.q.new_zeros((*bias.q.shape[:2], 1, 1), dtype=wide)
            where = seen.own, index, queries, keys, _products_of_keys(bias, scale)
            matrix = _add_products(nothing, bias, scale, *where)
        elif isinstance(bias, CopeLevels):
            levels, (q, k) = bias.values, (x.to(bias.values.dtype) for x in bias[:2])
            scores = q * scale @ for_each_query_head(k, q.shape[1]).mT
            matrix = level_rows(levels, _hide(scores, hidden, mask))
        elif isinstance(bias, FireNetwork):
            ends = document_ends(places.ids)
            first = None if ends is None else torch.atleast_2d(ends[0])
            matrix = network_rows(bias, first, seen.own, index)
        elif isinstance(bias, RowBias):
            matrix = bias.rows(seen.own, index)
        else:
            matrix = bias_rows(*stored(bias, dtype), seen.own, index)
        return _hide(matrix.to(dtype), hidden, mask)


def bias_rows(kind: str, values: Tensor | None, zero: int, own: Tensor, index: Tensor) -> Tensor:
    """The bias of queries at key indices ``own``, ``[1 or B, n]``, to keys at ``index``, ``[k]``.

    ``[1 or B, H, n, k]`` in the dtype of ``values``; nothing is hidden.
    """
    if values is None:
        return own.new_zeros((1, 1, 1, 1), dtype=torch.float32)
    distance = own[:, None, :, None] - index
    if kind == "slopes":
        return -values[..., None, None] * distance.abs()
    if kind == "table":
        return _table_rows(values, zero, own, index)
    heads, batch = values.shape[1], own.shape[0] if values.shape[0] == 1 else values.shape[0]
    at = own[:, None].expand(batch, heads, -1)
    sums = values.expand(batch, -1, -1)
    return sums.gather(2, at)[..., None] - sums[:, :, index][:, :, None]


def _table_rows(table: Tensor, zero: int, own: Tensor, index: Tensor) -> Tensor:
    """One line of numbers for all distances, and then a row of it for each query."""
    count, keys = own.shape[1], index.shape[0]
    if not count:
        return table.new_zeros((1, table.shape[0], 0, keys))
    line = own[:, -1:] - index[:1] - torch.arange(count + keys, device=own.device)
    # The gradient of indexing may depend on the order of threads.
    columns = (line + zero).clamp(0, table.shape[1] - 1)
    values = embedding(columns, table.T).mT
    return skew(values[:, :, None].expand(-1, -1, count, -1), keys)


def skew(x: Tensor, width: int) -> Tensor:
    """Move row ``r`` of ``x``, ``[..., n, w]``, left by ``n - 1 - r``, and keep ``width`` columns.

    ``w`` is at least ``n + width``. Slices and views do it, so gradients are summed in one order.
    """
    n, w = x.shape[-2:]
    moved = x.flatten(-2)[..., n - 1 : n - 1 + n * (w - 1)]
    rows: Tensor = moved.unflatten(-1, (n, w - 1))
    return rows[..., :width]


def _add_products(
    scores: Tensor,
    bias: Products,
    scale: float,
    own: Tensor,
    index: Tensor,
    some: slice,
    near: slice,
    of_keys: Tensor | None,
) -> Tensor:
    """Scores plus the products of ``some`` queries, and of the keys ``near`` them, with vectors."""
    wide = scores.dtype

    def keys() -> Tensor:
        return for_each_query_head(bias.k[:, :, near].to(wide), bias.q.shape[1])

    if bias.shift is not None:
        scores = scores + bias.shift.to(wide)[:, None] * scale @ keys().mT
    if bias.for_queries is not None and own.shape[1]:
        q = bias.q[:, :, some].to(wide) * scale
        scores = scores + _by_queries(q, bias.for_queries, bias.rows, own, index)
    if of_keys is not None:
        scores = scores + _take(of_keys[..., near], bias.rows(own[..., None] - index), -2)
    elif bias.for_keys is not None and own.shape[1]:
        vectors = bias.for_keys * scale
        scores = scores + _by_keys(keys(), vectors, bias.rows, own - index[:1])
    return scores


def _products_of_keys(bias: object, scale: float) -> Tensor | None:
    """The products of all keys with all vectors, to compute them once for all queries.

    None if :func:`_by_keys` needs fewer: it has, for each key, two for each query.
    """
    if not isinstance(bias, Products) or bias.for_keys is None:
        return None
    k, vectors = bias.k, bias.for_keys
    if not k.is_cpu or is_exporting() or vectors.shape[0] > 2 * bias.q.shape[2]:
        return None
    wide = torch.promote_types(k.dtype, torch.float32)
    with without_autocast(k):
        of_heads = (vectors * scale).unflatten(-1, (-1, k.shape[3])).transpose(0, 1)
        keys = for_each_query_head(k.to(wide), bias.q.shape[1])
        products: Tensor = of_heads @ keys.mT
    return products


def _by_queries(
    q: Tensor, vectors: Tensor, rows: Callable[[Tensor], Tensor], own: Tensor, index: Tensor
) -> Tensor:
    """The products of queries with the vectors of their keys, ``[B, H, n, k]``."""
    keys = index.shape[0]
    if q.is_cpu and not is_exporting() and vectors.shape[0] <= own.shape[1] + keys:
        products = torch.einsum("bhnd,rhd->bhnr", q, vectors.unflatten(-1, (-1, q.shape[3])))
        return _take(products, rows(own[..., None] - index), -1)
    distance = own[:, -1:] - index[:1] - torch.arange(own.shape[1] + keys, device=q.device)
    return skew(torch.einsum("bhnd,bwhd->bhnw", q, read_vectors(vectors, rows(distance), q)), keys)


def _by_keys(k: Tensor, vectors: Tensor, rows: Callable[[Tensor], Tensor], own: Tensor) -> Tensor:
    """The products of keys with the vectors of their queries, ``[B, H, n, k]``.

    ``own`` counts from the first of these keys.
    Blocks of as many keys as queries need the vectors of twice as many distances.
    """
    keys, size = k.shape[2], own.shape[1]
    blocks = -(-keys // size)
    k = pad(k, (0, 0, 0, blocks * size - keys)).unflatten(2, (blocks, size))
    ends = size * torch.arange(1, blocks + 1, device=k.device)[:, None]
    distance = own[:, :1, None] + 1 - ends + torch.arange(2 * size, device=k.device)
    products = torch.einsum("bhkmd,bkwhd->bhkmw", k, read_vectors(vectors, rows(distance), k))
    by_key: Tensor = skew(products, size).flatten(2, 3)[:, :, :keys]
    return by_key.mT


def _take(products: Tensor, rows: Tensor, dim: int) -> Tensor:
    """The products that ``rows``, ``[1 or B, n, k]``, name along ``dim``.

    Only on the CPU has the gradient of gather the same bits in every run.
    """
    return products.gather(dim, rows[:, None].expand(*products.shape[:2], -1, -1))


def read_vectors(vectors: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """The vectors of these rows, ``[..., 1 or H, D]``."""
    # The gradient of indexing may depend on the order of threads.
    read: Tensor = embedding(rows, vectors).unflatten(-1, (-1, like.shape[-1]))
    return read


def level_rows(levels: Tensor, scores: Tensor) -> Tensor:
    """CoPE's bias: levels at the positions that gates of the scores count, ``[B, H, n, k]``."""
    # Count from the query backwards.
    at = scores.sigmoid().flip(-1).cumsum(-1).flip(-1).clamp(max=levels.shape[3] - 1)
    # A score that is NaN has a position that is NaN, and so a bias; its ends are any that exist.
    known = at.detach().nan_to_num()
    below = known.floor()
    ends = below.long(), known.ceil().long()
    # The gradient of gather has the same bits in every run on the CPU; see _gather.
    left, right = (
        levels.gather(-1, end) if levels.is_cpu else _gather(levels, end) for end in ends
    )
    return torch.lerp(left, right, at - below)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """``x.gather(-1, index)`` with a gradient that is sorted, and so repeats, on CUDA."""
    rows = torch.arange(x[..., 0].numel(), device=x.device).view(*x.shape[:-1], 1)
    return x.flatten(0, -2)[rows, index]


def network_rows(bias: FireNetwork, first: Tensor | None, own: Tensor, index: Tensor) -> Tensor:
    """The network for each query and key, ``[1 or B, H, n, k]``."""
    # The ratio has a limit where either is zero, but no value.
    c, least = (x.abs().clamp(min=SMALLEST) for x in (bias.c, bias.threshold))
    position = own
    if first is not None:
        position = own - gather_rows(first, own.clamp(0, first.shape[1] - 1))
    longest = position.to(c.dtype).maximum(least)
    x = (c * (own[..., None] - index).abs()).log1p() / (c * longest).log1p()[..., None]
    low, high = bias.units[..., None]
    hidden = (low + x.flatten(1)[:, None] * (high - low)).relu()
    base = bias.outputs[0]
    # Heads before keys, also in memory. Where heads are last, Inductor of torch 2.11 computes the
    # greatest score of several heads in one vector, and writes as many as fit into a vector.
    weights = (bias.outputs[1:] - base).T.expand(x.shape[0], -1, -1)
    result = torch.baddbmm(base[:, None], weights, hidden)
    rows: Tensor = result.unflatten(-1, x.shape[1:])
    return rows
