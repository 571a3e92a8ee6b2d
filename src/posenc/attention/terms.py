"""Products of queries and keys with a vector for each distance, as a bias by rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from posenc._contract import checks, qk_checks
from posenc._contract.tracing import without_autocast
from posenc.attention.biases import RowBias, for_each_query_head, skew


def relative_terms(
    q: Tensor,
    k: Tensor,
    rows: Callable[[Tensor], Tensor],
    *,
    for_queries: Tensor | None = None,
    for_keys: Tensor | None = None,
    scale: float | None = None,
    query_offset: int | Tensor | None = None,
) -> RowBias:
    r"""Add the products of queries, and of keys, with a vector for each distance.

    .. math:: \text{bias}_{ij} = s\,(q_i \cdot A_{r(i - j)} + k_j \cdot B_{r(i - j)})

    The vectors are those of Shaw, Transformer-XL and DeBERTa, by the function :math:`r`. The
    products are made for a few queries at a time: no more of them exist at once than scores.
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

    def made(own: Tensor, index: Tensor) -> Tensor:
        if not own.shape[1]:
            return q.new_zeros((1, heads, 0, index.shape[0]), dtype=wide)
        bias = q.new_zeros((1, 1, 1, 1), dtype=wide)
        with without_autocast(q):
            if to_q is not None:
                # Each index is there once, so the order of the gradient's sums does not matter.
                some = q.index_select(2, (own - start)[0]).to(wide)
                bias = _by_queries(some, to_q, rows, own, index)
            if to_k is not None:
                some = for_each_query_head(k.index_select(2, index).to(wide), heads)
                bias = bias + _by_keys(some, to_k, rows, own - index[:1])
            return bias * size

    return RowBias(made)


def _by_queries(
    q: Tensor, vectors: Tensor, rows: Callable[[Tensor], Tensor], own: Tensor, index: Tensor
) -> Tensor:
    """The products of queries with the vectors of their keys, ``[B, H, n, k]``."""
    keys = index.shape[0]
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
        way_out = "Pass a row for each distance, of the width and heads of q."
        checks.fail(who, rule, f"shape {sizes}", way_out)
    return vectors.to(q.device, wide).flatten(1)
