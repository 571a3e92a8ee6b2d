"""Products of queries, and of keys, with a vector for each distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from torch import Tensor, sym_max, sym_min
from torch.nn.functional import embedding, pad

from posenc._contract import checks, qk_checks
from posenc._contract.tracing import is_exporting, without_autocast
from posenc.ops.attention.biases.kind import Where, for_each_query_head, skew

if TYPE_CHECKING:
    from posenc.ops.attention.call import Call


class Products(NamedTuple):
    """Products with vectors of distances, times the scale: :func:`relative_terms` has the formula.

    Attributes:
        q: Queries for the products with ``for_queries``, ``(B, H, Q, D)``.
        k: Keys for those with ``for_keys``, ``(B, Hk, K, D)``.
        rows: The rows of the vectors for distances.
        for_queries: ``(R, H D or D)``, in at least float32; None for none.
        for_keys: In the same way.
        shift: Vectors added to the queries of the attention in their products with keys,
            ``(H, D)``; None for none.
        least: Distances below this have the row of this one.
        most: Distances above this have the row of this one.
        of_keys: The products of all keys with all vectors, where there are few vectors.
    """

    q: Tensor
    k: Tensor
    rows: Callable[[Tensor], Tensor]
    for_queries: Tensor | None
    for_keys: Tensor | None
    shift: Tensor | None
    least: int
    most: int
    of_keys: Tensor | None = None

    def of(self, where: Where, scores: Tensor) -> Tensor:
        """The bias of queries and keys, ``[B, H, n, k]``."""
        wide, own, index = scores.dtype, where.query_index, where.key_index
        result = None

        def keys() -> Tensor:
            return for_each_query_head(self.k[:, :, where.keys].to(wide), self.q.shape[1])

        if self.shift is not None:
            result = self.shift.to(wide)[:, None] * where.scale @ keys().mT
        if self.for_queries is not None and own.shape[1]:
            q = self.q[:, :, where.queries].to(wide) * where.scale
            result = _sum(result, _by_queries(q, self.for_queries, self.rows, own, index))
        if self.of_keys is not None:
            at = self.rows(own[..., None] - index)
            result = _sum(result, _take(self.of_keys[..., where.keys], at, -2))
        elif self.for_keys is not None and own.shape[1]:
            vectors = self.for_keys * where.scale
            result = _sum(result, _by_keys(keys(), vectors, self.rows, own - index[:1]))
        return scores.new_zeros((*self.q.shape[:2], 1, 1)) if result is None else result

    def with_products_of_keys(self, scale: float) -> Products:
        """The same, with the products of all keys and all vectors, once for all queries.

        Without them if :func:`_by_keys` needs fewer: it has, for each key, two for each query.
        """
        k, vectors = self.k, self.for_keys
        if vectors is None or not k.is_cpu or is_exporting():
            return self
        if vectors.shape[0] > 2 * self.q.shape[2]:
            return self
        wide = torch.promote_types(k.dtype, torch.float32)
        with without_autocast(k):
            of_heads = (vectors * scale).unflatten(-1, (-1, k.shape[3])).transpose(0, 1)
            keys = for_each_query_head(k.to(wide), self.q.shape[1])
            return self._replace(of_keys=of_heads @ keys.mT)

    def fits_kernels(self) -> bool:
        """Whether a kernel computes it."""
        return True

    def with_fields(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, VectorFields]:
        """The queries of the products with keys, and what the op has of the bias."""
        own_q = q
        if self.shift is not None:
            wide = torch.promote_types(q.dtype, self.shift.dtype)
            own_q = (q.to(wide) + self.shift.to(wide)[:, None]).to(q.dtype)
        rows, zero = _rows_of_distances(q, k, self, call)
        for_queries, for_keys = (
            x if x is None else read_vectors(x, rows, q).to(q.dtype)
            for x in (self.for_queries, self.for_keys)
        )
        p = None if for_queries is None or self.q is own_q else self.q.to(q.dtype)
        m = None if for_keys is None or self.k is k else self.k.to(q.dtype)
        return own_q, VectorFields(p, m, for_queries, for_keys, zero)


class VectorFields(NamedTuple):
    """Products as the ops have them: a vector for each distance, clipped at both ends."""

    p: Annotated[Tensor | None, "B H Q D"]  # queries of the products with vectors; None for q
    m: Annotated[Tensor | None, "B Hk K D"]  # keys of those; None for k
    for_queries: Annotated[Tensor | None, "R 1|H D"]
    for_keys: Annotated[Tensor | None, "R 1|H D"]
    zero: Annotated[int, "SymInt"]  # the vector of distance zero

    def is_valid(self, q: Any, k: Any, causal: bool) -> bool:
        """Whether there are vectors, and the fields fit beyond their axes."""
        pairs = (self.p, self.for_queries), (self.m, self.for_keys)
        present = [x for pair in pairs for x in pair if x is not None]
        has_vectors = self.for_queries is not None or self.for_keys is not None
        are_pairs = all(x is None or vectors is not None for x, vectors in pairs)
        return has_vectors and are_pairs and all(x.dtype == q.dtype for x in present)

    def as_bias(self, q: Tensor, k: Tensor) -> Products:
        """The bias that the fields are of."""
        wide = torch.promote_types(q.dtype, torch.float32)
        vectors = self.for_queries, self.for_keys
        to_q, to_k = (x if x is None else x.to(wide).flatten(1) for x in vectors)
        last = next(x.shape[0] for x in (to_q, to_k) if x is not None) - 1

        def rows(distance: Tensor) -> Tensor:
            return (distance + self.zero).clamp(0, last)

        p, m = q if self.p is None else self.p, k if self.m is None else self.m
        return Products(p, m, rows, to_q, to_k, None, -self.zero, last - self.zero)


def relative_terms(
    q: Tensor,
    k: Tensor,
    rows: Callable[[Tensor], Tensor],
    *,
    for_queries: Tensor | None = None,
    for_keys: Tensor | None = None,
    reach: tuple[int, int] | None = None,
) -> Products:
    r"""Add the products of queries, and of keys, with a vector for each distance.

    .. math:: \text{bias}_{ij} = s\,(q_i \cdot A_{r(i - j)} + k_j \cdot B_{r(i - j)})

    The vectors are those of Shaw, Transformer-XL and DeBERTa, by the function :math:`r`. On CUDA
    the attention's kernel makes the products; elsewhere they are made for a few queries at a time.
    Gradients reach ``q``, ``k`` and the vectors, and are the same bits in every run. :math:`s` is
    the scale of the attention.

    Args:
        q: ``(B, H, Q, D)``, that of the attention, or with a vector added.
        k: ``(B, Hk, K, D)``, that of the attention.
        rows: :math:`r`, a function of an int64 tensor of distances that returns the rows of the
            vectors, int64. It must take any distance, and clip it.
        for_queries: :math:`A`, ``(R, D)``, or ``(R, H, D)`` with vectors for each head; None for
            none.
        for_keys: :math:`B`, in the same way.
        reach: ``(least, greatest)``: distances beyond these use the row of the nearer one, and a
            kernel then has less to do. None for all distances.

    Returns:
        A bias for :func:`biased_attention` of these queries and keys.

    Examples:
        >>> from posenc.attention import biased_attention
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> vectors = torch.randn(17, 64, requires_grad=True)  # distances 0 to 16
        >>> bias = relative_terms(q, k, lambda d: d.clamp(0, 16), for_queries=vectors)
        >>> biased_attention(q, k, v, bias, causal=True).shape
        torch.Size([1, 8, 512, 64])

    References:
        Shaw et al., *Self-Attention with Relative Position Representations*, 2018; Dai et al.,
        *Transformer-XL*, 2019; He et al., *DeBERTa*, 2021.
    """
    who = "relative_terms"
    qk_checks.check_qk(who, q, k)
    queries, keys = qk_checks.check_lengths(who, q.shape[2], k.shape[2])
    wide = torch.promote_types(q.dtype, torch.float32)
    to_q, to_k = (
        _check_vectors(who, name, x, q, wide)
        for name, x in (("for_queries", for_queries), ("for_keys", for_keys))
    )
    least, most = (-keys - queries, keys + queries) if reach is None else reach
    if not least <= 0 <= most:
        rule = "reach must be a pair of ints, the first at most zero, the second at least zero"
        checks.fail(who, rule, reach, "Pass (-128, 128), for example.")
    return Products(q, k, rows, to_q, to_k, None, least, most)


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


def _rows_of_distances(q: Tensor, k: Tensor, bias: Products, call: Call) -> tuple[Tensor, int]:
    """The rows of the distances that there are, as far as they differ, and the place of zero."""
    # Of any length, if traced. torch.compile turns min and max into these, and up to 2.11 refuses
    # these for ints.
    lower, upper = (sym_min, sym_max) if is_exporting() else (min, max)
    queries, keys = q.shape[2], k.shape[2]
    least, most = (0 if call.causal else -queries - keys), queries + keys
    if call.starts is None:
        least = upper(least, lower(call.start - keys + 1, 0))
        most = lower(most, upper(call.start + queries - 1, 0))
    least, most = upper(bias.least, least), lower(bias.most, most)
    return bias.rows(torch.arange(least, most + 1, device=q.device)), -least


def _sum(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


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
