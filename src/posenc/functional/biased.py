"""Attention with a bias, in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks, sharding
from posenc.numerics.spans import document_ends
from posenc.ops.attention import op, rows
from posenc.ops.attention.biases import (
    BY_ROWS,
    NUMBERS,
    TERMS,
    Bias,
    DistanceTable,
    NoBias,
    RowBias,
    RunningSum,
    Slopes,
    check_bias,
    numbers_of,
)
from posenc.ops.attention.call import CAUSAL, PRUNE, Call
from posenc.ops.attention.places import check_places


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None = None,
    *,
    causal: bool,
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
    run. On CUDA this is one Triton kernel, except for a :class:`RowBias`, ``attn_mask``, dropout,
    float64 and heads of more than 256 channels; elsewhere it runs a few queries at a time.

    Args:
        q: ``(B, H, Q, D)``.
        k: ``(B, Hk, K, D)`` with ``H`` a multiple of ``Hk`` and ``K`` at least ``Q``.
        v: ``(B, Hk, K, Dv)``.
        bias: :class:`Slopes`, :class:`DistanceTable`, :class:`RunningSum`, :class:`RowBias`, what
            :func:`relative_terms` or ``as_bias`` of a module returns, or None for none.
        causal: Whether a query sees only keys up to its own. There is no default: that of SDPA's
            ``is_causal`` is False, and most models with such a bias need True.
        scale: :math:`s`, :math:`1/\sqrt{D}` if None.
        query_offset: Key index of the first query, ``K - Q`` if None: an int, or an integer tensor
            ``()`` or ``(B,)``. It locates the queries in a cache of fixed size; if causal,
            they do not see later keys.
        document_ids: Ids ``(K,)`` or ``(B, K)``. A run of equal ids is a document, and a query
            sees only its own. Negative ids are padding, whose output is zero.
        window: A sliding window. An int ``w``: a query sees keys at distances below ``w``. A pair
            ``(left, right)``, as flash-attn's: that many keys before the query's own and after it,
            -1 for no limit. Keys outside cost nothing. None for all keys.
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
        >>> biased_attention(q, k, v, DistanceTable(table), causal=True).shape
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
    causal: bool,
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
        >>> out, lse = biased_attention_with_lse(q, k, v, causal=True)
        >>> lse.shape
        torch.Size([1, 8, 512])
    """
    how: Any = {"causal": causal, "scale": scale, "query_offset": query_offset}
    how |= {"document_ids": document_ids, "window": window}
    how |= {"attn_mask": attn_mask, "dropout_p": dropout_p, "prune": prune, "backend": backend}
    return attend("biased_attention_with_lse", q, k, v, bias, **how)


def alibi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    query_offset: int | Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    prune: bool = True,
    backend: str | None = None,
) -> Tensor:
    r"""Attention with ALiBi, without an ``L × L`` matrix and without far keys.

    .. math:: \sum_j \text{softmax}_j(s\, q_i \cdot k_j - m\,|i - j|)\, v_j

    Far keys are pruned where their weights together are provably below the rounding of the output;
    see ``docs/alibi.md``. Gradients reach ``slopes``, ``(H,)`` or ``(B, H)``, too. Other arguments,
    and the result, are those of :func:`biased_attention`.

    Examples:
        >>> import torch
        >>> from posenc.functional import alibi_slopes
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> alibi_attention(q, k, v, alibi_slopes(8), causal=True).shape
        torch.Size([1, 8, 512, 64])
    """
    how: Any = {"causal": causal, "scale": scale, "query_offset": query_offset}
    how |= {"document_ids": document_ids, "window": window}
    how |= {"attn_mask": attn_mask, "dropout_p": dropout_p, "prune": prune, "backend": backend}
    return attend("alibi_attention", q, k, v, Slopes(slopes), **how)[0]


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
        and (result := _try_native(q, k, v, bias, causal)) is not None
    ):
        return result
    drop = checks.probability(who, "dropout_p", dropout_p)
    if sharding.is_sharded(q):
        if attn_mask is not None or drop:
            rule = "attn_mask must be None and dropout_p zero for DTensors"
            got = f"dropout_p={drop}" if drop else checks.describe(attn_mask)
            checks.fail(who, rule, got, "Call the function on local tensors.")
        assert sharding.registered is not None
        how: Any = {"causal": causal, "scale": scale, "query_offset": query_offset}
        how |= {"document_ids": document_ids, "window": window, "prune": prune, "backend": backend}
        return sharding.registered.attend(who, q, k, v, bias, **how)
    qk_checks.check_qkv(who, q, k, v)
    check_bias(who, bias, q.shape[1], k.shape[2])
    checks.boolean(who, "prune", prune)
    lengths = q.shape[2], k.shape[2]
    given = *lengths, causal, query_offset, document_ids, window, q.device, q.shape[0]
    places = check_places(who, bias, *given)
    mask = qk_checks.check_attn_mask(who, attn_mask, (*q.shape[:3], k.shape[2]), q.device)
    first, last = hide_padding(places.ids)
    call = Call.of(
        numbers_of(bias, q),
        start=places.start,
        scale=qk_checks.check_scale(who, scale, q),
        causal=causal,
        prune=prune,
        first=first,
        last=last,
        window=places.window,
    )
    return run(who, q, k, v, bias, call, backend, mask, drop)


def run(
    who: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    call: Call,
    backend: str | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp by the first of these that takes the call.

    ============  ====================================================================
    terms         products, FIRE and CoPE, where Triton has kernels
    dense         if named: all scores at once
    rows          any other bias by rows; a mask; dropout
    triton        CUDA, float32 or narrower, heads of at most 256 channels
    chunked       everything else
    ============  ====================================================================

    All but rows and dense are ops, a pair for each kind of bias. Their ``operations`` are dense:
    they serve exporters, torch.func, forward mode and second derivatives; see `posenc.ops.op`.
    """
    if backend not in (None, "triton", "chunked", "dense"):
        rule = "backend must be 'triton', 'chunked', 'dense' or None"
        checks.fail(who, rule, checks.describe(backend), "Leave backend out to have one chosen.")
    masked = mask is not None or dropout_p > 0
    by_kernel = not masked and has_kernel(q, v, bias)
    if backend == "triton" and not by_kernel:
        rule = (
            "backend='triton' needs CUDA, Triton, float32 or narrower, heads of at most 256 "
            "channels, at least one query, and neither attn_mask, dropout nor a RowBias of your own"
        )
        got = f"{q.dtype} on {q.device}, shape {tuple(q.shape)}"
        checks.fail(who, rule, got, "Leave backend out to have one chosen.")
    if isinstance(bias, TERMS) and by_kernel and backend in (None, "triton"):
        q, fields = bias.with_fields(q, k, call)
        return op.attend(q, k, v, call._replace(bias=fields))
    formula = bias if isinstance(bias, BY_ROWS) else numbers_of(bias, q)
    if backend == "dense":
        return rows.attend_dense(q, k, v, call, formula, mask, dropout_p, who)
    if masked or isinstance(bias, BY_ROWS):
        return rows.attend_by_rows(who, q, k, v, call, formula, mask, dropout_p)
    return op.attend(q, k, v, call._replace(chunked=backend == "chunked"))


def has_kernel(q: Tensor, v: Tensor, bias: Bias | None) -> bool:
    """Whether a kernel computes attention with this bias."""
    is_fit = bias.fits_kernels() if isinstance(bias, TERMS) else not isinstance(bias, RowBias)
    return is_fit and op.has_kernel(q, v)


def _try_native(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, causal: Any
) -> tuple[Tensor, Tensor] | None:
    """The result of a call without options, if native code has done one like it before.

    None otherwise: nothing has happened then, and nothing has been checked.
    """
    if not isinstance(causal, bool) or not (bias is None or isinstance(bias, NUMBERS)):
        return None
    try:
        start = k.shape[-2] - q.shape[-2]
        if start < 0:
            return None
        fields, flags = numbers_of(bias, q), PRUNE | CAUSAL * causal
        # As op.arguments, in half the time.
        sees = op.Sees(None, None, None, None, flags, start, q.shape[-1] ** -0.5, -1, -1)
        result = op.OPS[type(fields)].forward.try_native(q, k, v, *fields, *sees)
    except (AttributeError, IndexError, TypeError, RuntimeError, ZeroDivisionError):
        # They are not what they should be: the checks say why.
        return None
    return None if result is None else result[:2]


def attend_last(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: DistanceTable | RunningSum | None,
    *,
    scale: float,
    causal: bool,
    prune: bool,
    padding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries that are at the last keys; nothing is checked but DTensors.

    ``padding``, uint8 ``[1 or B, K]``, is zero for keys that are hidden.
    """
    who: Any = "the patched model"
    how: Any = {"scale": scale, "causal": causal, "prune": prune, "padding": padding}
    if sharding.is_sharded(q):
        assert sharding.registered is not None
        return sharding.registered.attend(who, q, k, v, bias, **how)
    call = Call.of(numbers_of(bias, q), start=k.shape[2] - q.shape[2], **how)
    return run(who, q, k, v, bias, call)


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
    call = Call.of(NoBias(), start=start, scale=scale, causal=True, first=first, last=last)
    return run(who, q, k, v, None, call, backend)


def hide_padding(ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """First and last key of each key's document; padding, below zero, has none."""
    if ids is None:
        return None, None
    first, last = document_ends(ids)  # type: ignore[misc]
    padding = ids < 0
    first, last = first.masked_fill(padding, ids.shape[-1]), last.masked_fill(padding, -1)
    return torch.atleast_2d(first), torch.atleast_2d(last)
