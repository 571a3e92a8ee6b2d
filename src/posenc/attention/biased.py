"""Attention with a bias, in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks, sharding
from posenc.attention import chunked, op, rows, terms
from posenc.attention.biases import (
    Bias,
    Call,
    DistanceTable,
    RowBias,
    RunningSum,
    Slopes,
    bias_rows,
    check_bias,
    stored,
)
from posenc.numerics.spans import document_ends


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    query_offset: int | Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    prune: bool = True,
    backend: str | None = None,
) -> Tensor:
    r"""Attention with a relative bias, without an ``L × L`` matrix.

    .. math:: \sum_j \text{softmax}_j(s\, q_i \cdot k_j + \text{bias}_{ij})\, v_j

    Gradients reach ``q``, ``k``, ``v`` and the numbers of the bias, and are the same bits in every
    run. On CUDA this is one Triton kernel; elsewhere it runs a few queries at a time.

    Args:
        q: ``(B, H, Q, D)``.
        k: ``(B, Hk, K, D)`` with ``H`` a multiple of ``Hk`` and ``K`` at least ``Q``.
        v: ``(B, Hk, K, Dv)``.
        bias: :class:`Slopes`, :class:`DistanceTable`, :class:`RunningSum`, :class:`RowBias`, or
            None for none.
        causal: Whether a query sees only keys up to its own.
        scale: :math:`s`, :math:`1/\sqrt{D}` if None.
        query_offset: Key index of the first query, ``K - Q`` if None: an int, or an integer tensor
            ``()`` or ``(B,)``. It locates the queries in a cache of fixed size; if causal,
            they do not see later keys.
        document_ids: Ids ``(K,)`` or ``(B, K)``. A run of equal ids is a document, and a query
            sees only its own. Negative ids are padding, whose output is zero.
        window: A sliding window of so many keys on each side, the query's own among them: ``w``
            shows the keys at distances below ``w``. Or a pair ``(left, right)``, as flash-attn's:
            so many keys before the query's own, and after it, with -1 for no limit. Keys outside
            cost nothing. None for all keys.
        attn_mask: A further mask that can be broadcast to ``(B, H, Q, K)``, as SDPA's: bool, True
            for keys that are seen, or floating, to be added to the scores. A query that sees no
            key gets zero.
        dropout_p: The probability with which a weight is set to zero, as SDPA's: pass 0.0 unless
            the model is training. With it, or with ``attn_mask``, attention goes a few queries at a
            time on every device, by torch operations, and nothing is pruned.
        prune: Whether to leave out far keys of :class:`Slopes` and :class:`RunningSum`, where their
            weights together are provably below the rounding of the output; see ``docs/alibi.md``.
        backend: ``triton``, ``chunked`` or ``dense`` (all scores at once); None chooses.

    Returns:
        ``(B, H, Q, Dv)`` in the dtype of ``q``.

    Examples:
        >>> from posenc.attention import DistanceTable
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> table = torch.zeros(8, 100)  # one number for each distance below 100
        >>> biased_attention(q, k, v, DistanceTable(table)).shape
        torch.Size([1, 8, 512, 64])
    """
    how: Any = {"causal": causal, "scale": scale, "query_offset": query_offset}
    how |= {"document_ids": document_ids, "window": window}
    how |= {"attn_mask": attn_mask, "dropout_p": dropout_p}
    return attend("biased_attention", q, k, v, bias, prune=prune, backend=backend, **how)[0]


def biased_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    query_offset: int | Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    prune: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""As :func:`biased_attention`, with the log-sum-exp of each query's biased scores.

    With it, attention over parts of the keys can be put together.

    Returns:
        The output, and :math:`\ln \sum_j \exp(s\, q_i \cdot k_j + \text{bias}_{ij})`, shape
        ``(B, H, Q)``, in at least float32: minus infinity for a query that sees no key.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> out, lse = biased_attention_with_lse(q, k, v)
        >>> lse.shape
        torch.Size([1, 8, 512])
    """
    how: Any = {"causal": causal, "scale": scale, "query_offset": query_offset}
    how |= {"document_ids": document_ids, "window": window}
    how |= {"attn_mask": attn_mask, "dropout_p": dropout_p, "prune": prune, "backend": backend}
    return attend("biased_attention_with_lse", q, k, v, bias, **how)


def attend(
    who: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    *,
    causal: bool = True,
    scale: float | None = None,
    query_offset: int | Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    prune: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Check the arguments of an attention function named ``who``, and run it."""
    if (
        getattr(q, "is_cuda", False)
        and (query_offset is None and document_ids is None and window is None and scale is None)
        and (attn_mask is None and dropout_p == 0 and prune is True and backend is None)
        and (found := _attend_at_once(q, k, v, bias, causal)) is not None
    ):
        return found
    drop = checks.probability(who, "dropout_p", dropout_p)
    masked = attn_mask is not None or drop > 0
    if masked and (backend == "triton" or sharding.is_sharded(q)):
        rule = "attn_mask must be None and dropout_p zero for DTensors and for backend='triton'"
        got = f"dropout_p={drop}" if drop else checks.describe(attn_mask)
        hint = "Call the function on local tensors, and leave backend out."
        checks.fail(who, rule, got, hint)
    if sharding.is_sharded(q):
        assert sharding.registered is not None
        how: Any = {"causal": causal, "scale": scale, "query_offset": query_offset}
        how |= {"document_ids": document_ids, "window": window, "prune": prune, "backend": backend}
        return sharding.registered.attend(who, q, k, v, bias, **how)
    qk_checks.check_qkv(who, q, k, v)
    queries, keys, device = q.shape[2], k.shape[2], q.device
    check_bias(who, bias, q.shape[1], keys)
    checks.boolean(who, "causal", causal)
    checks.boolean(who, "prune", prune)
    scale = qk_checks.check_scale(who, scale, q)
    start = qk_checks.check_query_offset(who, query_offset, queries, keys, device)
    ids = qk_checks.check_key_ids(who, "document_ids", document_ids, keys, device)
    sides = qk_checks.check_window(who, window)
    given = ("none", None, 0) if isinstance(bias, RowBias) else stored(bias, q.dtype)
    kind, values, zero = given
    if values is not None:
        values = values if values.device == device else values.to(device)
        if kind != "table" and values.shape[0] not in (1, q.shape[0]):
            rule = f"{kind} must be for 1 or {q.shape[0]} sequences"
            checks.fail(who, rule, values.shape[0], "Pass one row for each sequence.")
    if ids is not None or isinstance(start, Tensor):
        qk_checks.check_batches(who, q.shape[0], query_offset=start, document_ids=ids)
    starts, begin = (start.reshape(-1), 0) if isinstance(start, Tensor) else (None, start)
    first, last = hide_padding(ids)
    call = Call(values, starts, first, last, kind, zero, begin, scale, causal, prune, sides)
    if not masked and not isinstance(bias, RowBias):
        return op.attend(who, q, k, v, call, backend)
    op.check_backend(who, backend)
    if (
        isinstance(bias, RowBias)
        and bias.terms is not None
        and not masked
        and backend in (None, "triton")
        and op.kernel_for(q, v) is not chunked
    ):
        return terms.attend(q, k, v, bias.terms, call)
    mask = qk_checks.check_attn_mask(who, attn_mask, (*q.shape[:3], keys), device)
    if not isinstance(bias, RowBias):
        bias = RowBias(lambda own, index: bias_rows(kind, values, zero, own, index))
    return rows.attend(who, q, k, v, bias, call, mask, drop)


def _attend_at_once(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, causal: Any
) -> tuple[Tensor, Tensor] | None:
    """The result if the arguments are those of an earlier call, but for their values, or None."""
    if not isinstance(causal, bool) or isinstance(bias, RowBias):
        return None
    try:
        return op.attend_at_once(q, k, v, *stored(bias, q.dtype), causal=causal)
    except (AttributeError, IndexError, TypeError, RuntimeError, ZeroDivisionError):
        # They are not what they should be: the checks say why.
        return None


def attend_last(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: DistanceTable | RunningSum,
    *,
    scale: float,
    causal: bool,
    prune: bool,
) -> Tensor:
    """Attention of queries that are at the last keys; nothing is checked but DTensors."""
    if sharding.is_sharded(q):
        how: Any = {"scale": scale, "causal": causal, "prune": prune}
        return attend("the patched model", q, k, v, bias, **how)[0]
    kind, values, zero = stored(bias, q.dtype)
    start = k.shape[2] - q.shape[2]
    call = Call(values, None, None, None, kind, zero, start, scale, causal, prune)
    return op.attend("attend_last", q, k, v, call, None)[0]


def attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Slopes | DistanceTable | RunningSum | None,
    *,
    start: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention to keys that are all before, or all after, all of the queries, without a mask.

    Nothing is checked. The own index of the first query, ``start``, is at least the number of keys,
    or so far below zero that no query is among the keys; there may be fewer keys than queries. The
    values of a :class:`RunningSum` are those of the keys and then of the queries, wherever these
    are, and ``start`` is the number of keys.
    """
    kind, values, zero = stored(bias, q.dtype)
    # Where all keys are earlier, a causal mask hides none, and the kernels have less to compute.
    call = Call(values, None, None, None, kind, zero, start, scale, start >= k.shape[2], False)
    return op.attend("attend_block", q, k, v, call, None)


def attend_ranges(
    who: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    start: int | Tensor,
    scale: float,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query to a range of keys at or before its own; no bias, nothing is checked.

    ``first`` and ``last``, int64 ``[1 or B, K]``, are the ends of the range of the query at each
    key; ``last`` below ``first`` is an empty one.
    """
    starts, begin = (start.reshape(-1), 0) if isinstance(start, Tensor) else (None, start)
    call = Call(None, starts, first, last, "none", 0, begin, scale, True, False)
    return op.attend(who, q, k, v, call, backend)


def hide_padding(ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """First and last key of each key's document; padding, below zero, has none."""
    if ids is None:
        return None, None
    first, last = document_ends(ids)  # type: ignore[misc]
    padding = ids < 0
    first, last = first.masked_fill(padding, ids.shape[-1]), last.masked_fill(padding, -1)
    return torch.atleast_2d(first), torch.atleast_2d(last)
