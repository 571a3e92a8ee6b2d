"""ALiBi attention in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from posenc._contract import checks, qk_checks, sharding
from posenc.attention import chunked, dense, flex
from posenc.attention.pruning import Plan
from posenc.functional.alibi import KeyOptions
from posenc.numerics.spans import document_ends, gather_rows, spans


class AttentionOptions(KeyOptions, total=False):
    """The keywords of :func:`alibi_attention` that :meth:`posenc.ALiBi.attention` takes too."""

    scale: float | None
    prune: bool
    score_bound: float | Tensor | None
    backend: str | None


def alibi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    query_offset: int | Tensor | None = None,
    document_ids: Tensor | None = None,
    prune: bool = True,
    score_bound: float | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""Attention with ALiBi, without an ``L × L`` matrix and without far keys.

    .. math:: \sum_j \text{softmax}_j(s\, q_i \cdot k_j - m\,|i - j|)\, v_j

    Far keys are pruned where their weights together are provably below the rounding of the output;
    see ``docs/alibi.md``. On CUDA this is compiled FlexAttention. Elsewhere, and where that does
    not compile, it is SDPA on a few queries of one head at a time. Forward-mode AD,
    torch.func transforms and gradients to ``slopes`` use the dense backend.

    Args:
        q: ``(B, H, Q, D)``.
        k: ``(B, Hk, K, D)`` with ``H`` a multiple of ``Hk`` and ``K`` at least ``Q``.
        v: ``(B, Hk, K, Dv)``.
        slopes: ``(H,)`` or ``(B, H)``.
        causal: Whether a query sees only keys up to its own.
        scale: :math:`s`, :math:`1/\sqrt{D}` if None.
        query_offset: Key index of the first query, ``K - Q`` if None: an int, or an integer tensor
            ``()`` or ``(B,)``. It locates the queries in a cache of fixed size; if causal,
            they do not see later keys.
        document_ids: Ids ``(K,)`` or ``(B, K)``. A run of equal ids is a document, and a query
            sees only its own. Negative ids are padding, whose output is zero.
        prune: Whether to leave far keys out.
        score_bound: A bound on :math:`|s\, q \cdot k|` to prune by, a number or a tensor ``(H,)``
            or ``(B, H)``; computed from the data if None. The norms of ``q`` and ``k`` are
            computed either way: a head whose norms exceed the bound is not pruned.
        backend: ``flex``, ``chunked`` or ``dense`` (all scores at once); None chooses.

    Returns:
        ``(B, H, Q, Dv)`` in the dtype of ``q``.

    Examples:
        >>> import torch
        >>> from posenc.functional import alibi_slopes
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> alibi_attention(q, k, v, alibi_slopes(8)).shape
        torch.Size([1, 8, 512, 64])
    """
    who = "alibi_attention"
    if sharding.is_sharded(q):
        assert sharding.registered is not None
        options: Any = {"score_bound": score_bound, "backend": backend, "scale": scale}
        options |= {"query_offset": query_offset, "document_ids": document_ids}
        options |= {"causal": causal, "prune": prune}
        return sharding.registered.attend(alibi_attention, q, k, v, slopes, **options)
    slopes = qk_checks.check_qkv(who, q, k, v, slopes)
    checks.boolean(who, "causal", causal)
    checks.boolean(who, "prune", prune)
    scale = qk_checks.check_scale(who, scale, q)
    bound = None
    if score_bound is not None:
        bound = qk_checks.check_score_bound(who, score_bound, q.shape[1], q)
    queries, keys, device = q.shape[2], k.shape[2], q.device
    start = qk_checks.check_query_offset(who, query_offset, queries, keys, device)
    ids = qk_checks.check_key_ids(who, "document_ids", document_ids, keys, device)
    rows = {"slopes": slopes, "score_bound": bound, "query_offset": start, "document_ids": ids}
    qk_checks.check_batches(who, q.shape[0], **rows)
    plan = Plan(slopes, document_ends(ids), bound, scale, causal, prune, query_offset is None)
    out = _choose_backend(who, backend, q, k, v, slopes)(q, k, v, start, plan)
    if out is None:
        if backend == "flex":
            rule, way_out = "backend='flex' must compile", "Leave backend out to run in chunks."
            checks.fail(who, rule, "an error of the compiler", way_out, RuntimeError)
        out = chunked.attend(q, k, v, start, plan)
    if ids is not None:
        own = spans(queries, keys, causal=causal, offset=start, device=device).own
        out = out.masked_fill(gather_rows(ids < 0, own)[:, None, :, None], 0)
    return out


def _choose_backend(
    who: str, backend: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor
) -> Callable[..., Tensor | None]:
    """The ``attend`` function of a backend; it returns None if its kernels do not compile."""
    if backend not in (None, "flex", "chunked", "dense"):
        rule, got = "backend must be 'flex', 'chunked', 'dense' or None", checks.describe(backend)
        checks.fail(who, rule, got, "Leave backend out to have one chosen.")
    if backend == "flex" and not flex.can_run(q, v):
        rule = "backend='flex' needs CUDA, Triton, at most float32 and heads of 16 and wider"
        got = f"{q.dtype} on {q.device}, {q.shape[-1]} wide"
        checks.fail(who, rule, got, "Leave backend out to have one chosen.")
    if backend == "dense" or dense.is_needed(q, k, v, slopes):
        return dense.attend
    if backend != "chunked" and flex.can_run(q, v):
        return flex.attend
    return chunked.attend
