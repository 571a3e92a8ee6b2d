"""Products of queries and keys with a vector for each distance, as a bias by rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, sym_max, sym_min
from torch.nn.functional import embedding, pad

from posenc._contract import checks, qk_checks
from posenc._contract.tracing import is_exporting, without_autocast
from posenc.attention import chunked
from posenc.attention.biases import (
    Call,
    RowBias,
    Terms,
    for_each_query_head,
    hidden_keys,
    skew,
)
from posenc.attention.op import check_call, check_results, differentiate, kernel_for
from posenc.attention.rows import attend_scores
from posenc.kernels.op import Op
from posenc.kernels.rotation import check_devices, refuse


def relative_terms(
    q: Tensor,
    k: Tensor,
    rows: Callable[[Tensor], Tensor],
    *,
    for_queries: Tensor | None = None,
    for_keys: Tensor | None = None,
    scale: float | None = None,
    query_offset: int | Tensor | None = None,
    reach: tuple[int, int] | None = None,
) -> RowBias:
    r"""Add the products of queries, and of keys, with a vector for each distance.

    .. math:: \text{bias}_{ij} = s\,(q_i \cdot A_{r(i - j)} + k_j \cdot B_{r(i - j)})

    The vectors are those of Shaw, Transformer-XL and DeBERTa, by the function :math:`r`. On CUDA
    the attention's kernel makes the products; elsewhere they are made for a few queries at a time.
    Gradients reach ``q``, ``k`` and the vectors, and are the same bits in every run.

    Args:
        q: ``(B, H, Q, D)``, that of the attention, or with a vector added.
        k: ``(B, Hk, K, D)``, that of the attention.
        rows: :math:`r`, a function of an int64 tensor of distances that returns the rows of the
            vectors, int64. It must take any distance, and clip it.
        for_queries: :math:`A`, ``(R, D)``, or ``(R, H, D)`` with vectors for each head; None for
            none.
        for_keys: :math:`B`, in the same way.
        scale: :math:`s`, :math:`1/\sqrt{D}` if None: that of the attention.
        query_offset: As in the attention.
        reach: ``(least, greatest)``: distances beyond these use the row of the nearer one, and a
            kernel then has less to do. None for all distances.

    Returns:
        A bias for :func:`biased_attention` of these queries and keys.

    Examples:
        >>> from posenc.attention import biased_attention
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> vectors = torch.randn(17, 64, requires_grad=True)  # distances 0 to 16
        >>> bias = relative_terms(q, k, lambda d: d.clamp(0, 16), for_queries=vectors)
        >>> biased_attention(q, k, v, bias).shape
        torch.Size([1, 8, 512, 64])

    References:
        Shaw et al., *Self-Attention with Relative Position Representations*, 2018; Dai et al.,
        *Transformer-XL*, 2019; He et al., *DeBERTa*, 2021.
    """
    who = "relative_terms"
    qk_checks.check_qk(who, q, k)
    heads, queries, _ = q.shape[1:]
    qk_checks.check_lengths(who, queries, k.shape[2])
    size = qk_checks.check_scale(who, scale, q)
    start = qk_checks.check_query_offset(who, query_offset, queries, k.shape[2], q.device)
    start = start.reshape(-1, 1) if isinstance(start, Tensor) else start
    wide = torch.promote_types(q.dtype, torch.float32)
    to_q, to_k = (
        _check_vectors(who, name, x, q, wide)
        for name, x in (("for_queries", for_queries), ("for_keys", for_keys))
    )

    keys, of_keys = k.shape[2], None
    if to_k is not None and k.is_cpu and not is_exporting() and to_k.shape[0] <= 2 * keys:
        # Once for all queries.
        with without_autocast(q):
            vectors = to_k.unflatten(-1, (-1, k.shape[3])).transpose(0, 1)
            of_keys = vectors @ for_each_query_head(k.to(wide) * size, heads).mT

    def bias_rows(own: Tensor, index: Tensor) -> Tensor:
        if not own.shape[1]:
            return q.new_zeros((1, heads, 0, index.shape[0]), dtype=wide)
        bias = q.new_zeros((1, 1, 1, 1), dtype=wide)
        with without_autocast(q):
            if to_q is not None:
                # Each index is there once, so the order of the gradient's sums does not matter.
                some = q.index_select(2, (own - start)[0]).to(wide) * size
                bias = _by_queries(some, to_q, rows, own, index)
            if of_keys is not None:
                some = of_keys if index.shape[0] == keys else of_keys.index_select(3, index)
                bias = bias + _take(some, rows(own[..., None] - index), -2)
            elif to_k is not None:
                some = for_each_query_head(k.index_select(2, index).to(wide) * size, heads)
                bias = bias + _by_keys(some, to_k, rows, own - index[:1])
            return bias

    least, most = (-keys - queries, keys + queries) if reach is None else reach
    if not least <= 0 <= most:
        rule = "reach must be a pair of ints, the first at most zero, the second at least zero"
        checks.fail(who, rule, reach, "Pass (-128, 128), for example.")
    terms = Terms(None, q, k, rows, to_q, to_k, least, most)
    return RowBias(bias_rows, terms)


def _by_queries(
    q: Tensor, vectors: Tensor, rows: Callable[[Tensor], Tensor], own: Tensor, index: Tensor
) -> Tensor:
    """The products of queries with the vectors of their keys, ``[B, H, n, k]``."""
    keys = index.shape[0]
    if q.is_cpu and not is_exporting() and vectors.shape[0] <= own.shape[1] + keys:
        products = torch.einsum("bhnd,rhd->bhnr", q, vectors.unflatten(-1, (-1, q.shape[3])))
        return _take(products, rows(own[..., None] - index), -1)
    distance = own[:, -1:] - index[:1] - torch.arange(own.shape[1] + keys, device=q.device)
    return skew(torch.einsum("bhnd,bwhd->bhnw", q, _read(vectors, rows(distance), q)), keys)


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
    products = torch.einsum("bhkmd,bkwhd->bhkmw", k, _read(vectors, rows(distance), k))
    by_key: Tensor = skew(products, size).flatten(2, 3)[:, :, :keys]
    return by_key.mT


def _take(products: Tensor, rows: Tensor, dim: int) -> Tensor:
    """The products that ``rows``, ``[1 or B, n, k]``, name along ``dim``.

    Only on the CPU has the gradient of gather the same bits in every run.
    """
    return products.gather(dim, rows[:, None].expand(*products.shape[:2], -1, -1))


def _read(vectors: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """The vectors of these rows, ``[..., 1 or H, D]``."""
    # The gradient of indexing may depend on the order of threads.
    read: Tensor = embedding(rows, vectors).unflatten(-1, (-1, like.shape[-1]))
    return read


def _check_vectors(who: str, name: str, vectors: Any, q: Tensor, wide: torch.dtype) -> Any:
    """The vectors as ``[R, D or H D]``, on the device of the queries, or None."""
    if vectors is None:
        return None
    checks.float_tensor(who, name, vectors)
    heads, width, sizes = q.shape[1], q.shape[3], tuple(vectors.shape)
    # The heads are compared, not searched for: torch.compile cannot search for a symbolic size.
    shared = len(sizes) == 2 or (len(sizes) == 3 and sizes[1] == heads)
    if not shared or sizes[-1] != width:
        rule = f"{name} must have shape (R, {width}) or (R, {heads}, {width})"
        hint = "Pass a row for each distance, of the width and heads of q."
        checks.fail(who, rule, f"shape {sizes}", hint)
    return vectors.to(q.device, wide).flatten(1)


def attend(q: Tensor, k: Tensor, v: Tensor, terms: Terms, call: Call) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp by the op."""
    own_q, least = q if terms.q is None else terms.q.to(q.dtype), 0
    p = m = for_queries = for_keys = None
    if terms.rows is not None:
        # Distances that there are, and that have rows of their own; of any length, if traced.
        # torch.compile turns min and max into these, and up to 2.11 refuses these for ints.
        lower, upper = (sym_min, sym_max) if is_exporting() else (min, max)
        queries, keys = q.shape[2], k.shape[2]
        least, most = (0 if call.causal else -queries - keys), queries + keys
        if call.starts is None:
            least = upper(least, lower(call.start - keys + 1, 0))
            most = lower(most, upper(call.start + queries - 1, 0))
        least, most = upper(terms.least, least), lower(terms.most, most)
        rows = terms.rows(torch.arange(least, most + 1, device=q.device))
        if terms.p is not None and terms.for_queries is not None:
            for_queries = _read(terms.for_queries, rows, q).to(q.dtype)
            p = None if terms.p is own_q else terms.p.to(q.dtype)
        if terms.m is not None and terms.for_keys is not None:
            for_keys = _read(terms.for_keys, rows, q).to(q.dtype)
            m = None if terms.m is k else terms.m.to(q.dtype)
    tensors = own_q, k, v, p, m, for_queries, for_keys, terms.network, terms.levels
    out, lse = terms_op(*tensors, *call._replace(zero=-least).arguments()[1:])
    return out, lse


def _check(who: str, tensors: Sequence[Any], call: Call) -> Call:
    """The call as the kernels read it; refuse what would lead them out of a tensor's memory."""
    q, k, v, p, m, for_queries, for_keys, network, levels = tensors
    check_devices(who, *tensors)
    call = check_call(who, q, k, v, call)
    _, heads, _, width = q.shape
    counts = {len(x) for x in (for_queries, for_keys) if x is not None}

    def are_vectors(x: Tensor | None, like: Tensor, vectors: Tensor | None) -> bool:
        if vectors is None:
            return x is None
        is_like = x is None or (x.shape == like.shape and x.dtype == q.dtype)
        shapes = (len(vectors), 1, width), (len(vectors), heads, width)
        return is_like and vectors.shape in shapes and vectors.dtype == q.dtype

    def is_network(x: Tensor) -> bool:
        units, rest = divmod(x.numel() - 2 - heads, 2 + heads)
        return x.dim() == 1 and x.dtype in (torch.float32, torch.float64) and units > 0 == rest

    def are_levels(x: Tensor) -> bool:
        fits = x.dim() == 4 and x.shape[:3] == q.shape[:3] and x.shape[3] > 0
        return fits and x.dtype in checks.FLOAT_DTYPES and call.causal

    if not (
        are_vectors(p, q, for_queries)
        and are_vectors(m, k, for_keys)
        and (network is None or is_network(network))
        and (levels is None or are_levels(levels))
        and (levels is None) == bool(counts or network is not None)
        and len(counts) < 2
        and 0 not in counts
    ):
        rule = "vectors, or a network, or levels must fit q (B, H, Q, D) and k (B, Hk, K, D)"
        refuse(who, rule, *tensors)
    return call


def _kernel(tensors: Sequence[Any], zero: int) -> Any:
    """The kernel with its tensors, a function of the call, or None if there is none for them."""
    q, k, v, *given, levels = tensors
    if kernel_for(q, v) is chunked:
        return None
    if levels is not None:
        from posenc.kernels.triton.cope import CountedLaunches

        return partial(CountedLaunches, q, k, v, levels)
    from posenc.kernels.triton.terms import TermLaunches

    return partial(TermLaunches, q, k, v, given, zero)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, call = _split(arguments)
    call = _check("posenc::attend_terms", tensors, call)
    kernel = _kernel(tensors, call.zero)
    return _operations(*arguments) if kernel is None else kernel(call).forward()


def _split(arguments: Sequence[Any]) -> tuple[Sequence[Any], Call]:
    """The tensors of an op's arguments, from q to the levels, and the call."""
    return arguments[:9], Call.from_arguments(None, *arguments[9:])


def _operations(*arguments: Any) -> tuple[Tensor, Tensor]:
    (q, k, v, p, m, for_queries, for_keys, network, levels), call = _split(arguments)
    heads, keys = q.shape[1], k.shape[2]
    seen, index = call.spans(q.shape[2], keys, q.device), torch.arange(keys, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    count = next((x.shape[0] for x in (for_queries, for_keys) if x is not None), 1)

    def rows(distance: Tensor) -> Tensor:
        row: Tensor = (distance + call.zero).clamp(0, count - 1)
        return row

    with without_autocast(q):
        scores = q.to(wide) @ for_each_query_head(k.to(wide), heads).mT
        if for_queries is not None:
            vectors = for_queries.to(wide).flatten(1)
            some = (q if p is None else p).to(wide)
            scores = scores + _by_queries(some, vectors, rows, seen.own, index)
        if for_keys is not None:
            some = for_each_query_head((k if m is None else m).to(wide), heads)
            vectors = for_keys.to(wide).flatten(1)
            scores = scores + _by_keys(some, vectors, rows, seen.own)
        scores, values = scores * call.scale, for_each_query_head(v.to(wide), heads)
        if network is not None:
            scores = scores + _network_rows(network.to(wide), heads, call.first, seen.own, index)
        if levels is not None:
            scores = scores + level_rows(levels.to(wide), scores, seen.own, index)
        return attend_scores(scores, hidden_keys(seen, index), values, q.dtype)


def level_rows(levels: Tensor, scores: Tensor, own: Tensor, index: Tensor) -> Tensor:
    """CoPE's bias: levels at the positions that gates of the scores count, ``[B, H, n, k]``."""
    gates = scores.sigmoid().masked_fill(index > own[:, None, :, None], 0.0)
    # Count from the query backwards.
    at = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=levels.shape[3] - 1)
    below = at.detach().floor()
    ends = below.long(), at.detach().ceil().long()
    # The gradient of gather has the same bits in every run on the CPU; see _gather.
    left, right = (
        levels.gather(-1, end) if levels.is_cpu else _gather(levels, end) for end in ends
    )
    return left + (right - left) * (at - below)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """``x.gather(-1, index)`` with a gradient that is sorted, and so repeats, on CUDA."""
    rows = torch.arange(x[..., 0].numel(), device=x.device).view(*x.shape[:-1], 1)
    return x.flatten(0, -2)[rows, index]


def _network_rows(
    network: Tensor, heads: int, first: Tensor | None, own: Tensor, index: Tensor
) -> Tensor:
    """The network's part of scores, ``[1 or B, H, n, k]``; see :class:`Terms`."""
    units = (network.shape[0] - 2 - heads) // (2 + heads)
    scales, ends, outputs = network.split((2, 2 * units, (1 + units) * heads))
    c, least = scales.abs().clamp(min=1e-15)
    position = own
    if first is not None:
        inside = own.clamp(0, first.shape[1] - 1).expand(len(first), -1)
        position = own - first.gather(1, inside)
    longest = position.to(network.dtype).maximum(least)
    x = (c * (own[..., None] - index).abs()).log1p() / (c * longest).log1p()[..., None]
    (low, high), (base, of_units) = ends.view(2, units), outputs.split((heads, units * heads))
    hidden = (low + x[..., None] * (high - low)).relu()
    bias: Tensor = hidden @ (of_units.view(units, heads) - base) + base
    return bias.movedim(-1, 1)


def _fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    check_devices("posenc::attend_terms", q, k, v, *others)
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


def _backward(g: Tensor, g_lse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> Any:
    who, (tensors, call) = "posenc::attend_terms_backward", _split(arguments)
    call = _check(who, tensors, call)
    check_results(who, tensors[0], tensors[2], g, g_lse, out, lse)
    kernel = _kernel(tensors, call.zero)
    if kernel is None:
        refuse(who, "there must be a kernel for the device, the dtype and the width of q", g)
    grads = kernel(call).backward(g, g_lse, out.contiguous(), lse.contiguous())
    if tensors[8] is None:
        grads = *grads, None
    else:
        dq, dk, dv, to_levels = grads
        grads = dq, dk, dv, *[None] * 5, to_levels
    # An op cannot return None in place of a tensor.
    return tuple(g.new_empty(0) if x is None else x for x in grads)


def _fake_backward(g: Tensor, g_lse: Tensor | None, out: Tensor, lse: Tensor, *others: Any) -> Any:
    check_devices("posenc::attend_terms_backward", g, g_lse, out, lse, *others)
    return tuple(g.new_empty(0) if x is None else x.new_empty(x.shape) for x in others[:9])


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output, *inputs[:12])
    ctx.numbers = inputs[12:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, g_lse: Tensor | None) -> tuple[Any, ...]:
    out, lse, *given = ctx.saved_tensors
    tensors, others = given[:9], (*given[9:], *ctx.numbers)
    _, call = _split((*tensors, *others))
    if torch.is_grad_enabled() or _kernel(tensors, call.zero) is None:
        # A gradient that is differentiated again consists of torch operations.
        grads = differentiate(lambda *x: _operations(*x, *others), tensors, (g, g_lse))
    else:
        g = torch.zeros_like(out) if g is None else g
        grads = terms_backward_op(g, g_lse, out, lse, *tensors, *others)
    pairs = zip(grads, tensors, strict=True)
    return *[None if x is None else grad for grad, x in pairs], *[None] * 9


def _rehearse(*arguments: Any) -> None:
    """Launch what the gradient of a call launches."""
    out, lse = _fake(*arguments)
    _backward(torch.empty_like(out), None, out, lse, *arguments)


_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? p, Tensor? m, Tensor? for_queries, Tensor? for_keys, "
    "Tensor? network, Tensor? levels, Tensor? starts, Tensor? first, Tensor? last, int how, "
    "SymInt zero, SymInt start, float scale, SymInt left, SymInt right"
)
terms_op = Op(
    "attend_terms",
    f"({_CALL}) -> (Tensor, Tensor)",
    _forward,
    _operations,
    _fake,
    save=_save,
    backward=_gradients,
    native=("cuda",),
    repeats=True,
    rehearse=_rehearse,
)
terms_backward_op = Op(
    "attend_terms_backward",
    f"(Tensor g, Tensor? g_lse, Tensor out, Tensor lse, {_CALL}) -> ({', '.join(['Tensor'] * 9)})",
    _backward,
    _backward,
    _fake_backward,
    native=("cuda",),
    repeats=True,
)
