"""ALiBi attention in one call, and the pieces of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks
from posenc._contract.sharding import attend_shards, is_sharded
from posenc.attention import arguments, blocks, chunked, dense, flex
from posenc.attention import windows as windows_of
from posenc.attention.blocks import BLOCK
from posenc.attention.mods import pair_mod
from posenc.numerics.slopes import window_length
from posenc.numerics.spans import pick, run_ends, spans

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def alibi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    offset: int | Tensor | None = None,
    documents: Tensor | None = None,
    windows: bool = True,
    score_bound: float | Tensor | None = None,
    path: str | None = None,
) -> Tensor:
    r"""Attention with ALiBi, forward and backward, without the matrix and without far keys.

    .. math:: \text{softmax}_j(s\, q_i \cdot k_j - m\,|i - j|)\, v_j

    Keys whose whole weight is provably below the rounding of the output are not computed; see
    ``docs/alibi.md``. On CUDA it is FlexAttention, compiled. Elsewhere, and where that does not
    compile, it is SDPA on a few queries of one head at a time, with the same windows. Forward-mode
    derivatives, those of torch.func, and gradients to ``slopes`` take all scores at once.

    Args:
        q: ``(B, H, Q, D)``.
        k: ``(B, Hk, K, D)`` with ``H`` a multiple of ``Hk`` and ``K`` at least ``Q``.
        v: ``(B, Hk, K, Dv)``.
        slopes: ``(H,)`` or ``(B, H)``.
        causal: Whether a query sees only keys up to its own.
        scale: :math:`s`, :math:`1/\sqrt{D}` if None.
        offset: Key of the first query, ``K - Q`` if None: an int, or a tensor ``()`` or ``(B,)``.
            For a cache of fixed size; keys past the last query are not seen if causal.
        documents: Ids ``(K,)`` or ``(B, K)``. A run of equal ids is a document, and a query sees
            its own alone. Negative ids are padding, whose output is zero.
        windows: Whether to leave far keys out.
        score_bound: Take the windows from this bound on :math:`|s\, q \cdot k|` instead of the
            data, a number or a tensor ``(H,)`` or ``(B, H)``. A head whose norms do not confirm
            it is computed without a window. This costs the same as the default.
        path: ``flex`` or ``chunked`` to insist on one; None chooses.

    Returns:
        ``(B, H, Q, Dv)`` in the dtype of ``q``.

    Examples:
        >>> from posenc.functional import alibi_slopes
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> alibi_attention(q, k, v, alibi_slopes(8)).shape
        torch.Size([1, 8, 512, 64])
    """
    who = "alibi_attention"
    if is_sharded(q):
        return attend_shards(
            *(alibi_attention, q, k, v, slopes),
            causal=causal,
            scale=scale,
            offset=offset,
            documents=documents,
            windows=windows,
            score_bound=score_bound,
            path=path,
        )
    given = arguments.inputs(who, q, k, v, slopes)
    slopes = given.detach()
    checks.boolean(who, "causal", causal)
    checks.boolean(who, "windows", windows)
    scale = arguments.scale(who, scale, q)
    bound = None if score_bound is None else arguments.bound(who, score_bound, q)
    if bound is not None:
        qk_checks.check_batch(who, "score_bound", bound, 2, q.shape[0])
        if bound.shape[1] not in (1, q.shape[1]):
            rule = f"score_bound must be for 1 or {q.shape[1]} heads"
            raise ValueError(checks.message(who, rule, bound.shape[1], "Give one to each head."))
    queries, keys = q.shape[2], k.shape[2]
    start = qk_checks.offset(who, offset, queries, keys, q.device)
    ids = qk_checks.ids(who, "documents", documents, keys, q.device)
    qk_checks.check_batch(who, "offset", start, 1, q.shape[0])
    qk_checks.check_batch(who, "documents", ids, 2, q.shape[0])
    if path not in (None, "flex", "chunked"):
        rule, got = "path must be 'flex', 'chunked' or None", checks.describe(path)
        raise ValueError(checks.message(who, rule, got, "None chooses."))
    if path == "flex" and not flex.can_run(q, v):
        rule = "path='flex' needs CUDA, Triton, at most float32 and heads of 16 and wider"
        got = f"{q.dtype} on {q.device}, {q.shape[-1]} wide"
        raise ValueError(checks.message(who, rule, got, "Leave path out."))
    ends = None if ids is None else run_ends(ids)
    out = None
    if dense.is_wanted(q, k, v, given):
        seen = spans(queries, keys, causal=causal, offset=start, ends=ends, device=q.device)
        out = dense.attend(q, k, v, seen, given if given.dim() == 2 else given[None], scale)
    elif path != "chunked" and flex.can_run(q, v):
        if not isinstance(start, Tensor):
            place = torch.full((), start, dtype=torch.int32, device=q.device)
        else:
            place = start.int()
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        out = flex.attend_compiled(
            *(q, k, v, slopes.float(), place, ends, bound, scale),
            aligned=offset is None,
            causal=causal,
            windowed=windows,
            grad=grad,
        )
        if out is None and path == "flex":
            rule, way_out = "path='flex' must compile", "Leave path out to run in chunks."
            raise RuntimeError(checks.message(who, rule, "the compiler's refusal", way_out))
    if out is None:
        if windows and not torch.compiler.is_compiling():
            # What is made at once is made of all keys; one graph for all lengths asks for none.
            windows = not chunked.at_once(q, k)
        seen, low, high = windows_of.needed(
            q, k, slopes, start, ends, bound, scale, causal=causal, windowed=windows
        )
        wide = torch.promote_types(q.dtype, torch.float32)
        # Not detached: a gradient that is asked for after all is refused, and not zero.
        steep = (given if given.dim() == 2 else given[None]).to(wide)
        out = chunked.attend(q, k, v, *seen, low, high, steep, scale)
    if ids is not None:
        at = spans(queries, keys, causal=causal, offset=start, device=q.device).at
        out = out.masked_fill(pick(ids < 0, at)[:, None, :, None], 0)
    return cast(Tensor, out)


def alibi_block_mask(
    slopes: Tensor,
    q_len: int,
    k_len: int | None = None,
    *,
    score_bound: float | Tensor,
    dtype: torch.dtype,
    causal: bool = True,
    offset: int | Tensor | None = None,
    documents: Tensor | None = None,
    block: int = BLOCK,
) -> BlockMask:
    """Block mask for ``flex_attention`` that leaves out the keys no head needs.

    For use with :func:`alibi_score_mod` where you call FlexAttention yourself. What it leaves out
    is below half an ulp of the output **if the scores keep to the bound**; nobody checks that
    here. It is written down from the windows, and no ``L × L`` mask is made.

    Args:
        slopes: ``(H,)`` or ``(B, H)``, on the device of the attention.
        q_len: Queries ``Q``.
        k_len: Keys ``K``; ``Q`` if None.
        score_bound: At least every ``|q · k| · scale``: a number, or a tensor
            ``(H,)`` or ``(B, H)``. Infinity leaves nothing out.
        dtype: Of the output.
        causal: Whether a query sees only keys up to its own.
        offset: Key of the first query, ``K - Q`` if None: an int, or a tensor ``()`` or ``(B,)``.
        documents: Ids ``(K,)`` or ``(B, K)``; a run of equal ids is a document.
        block: Queries, and keys, of a block.

    Examples:
        >>> from posenc.functional import alibi_slopes
        >>> slopes = alibi_slopes(8)
        >>> mask = alibi_block_mask(slopes, 4096, score_bound=8.0, dtype=torch.bfloat16)
        >>> visited = mask.to_dense()[0].sum((1, 2))
        >>> visited.tolist()
        [63, 63, 93, 150, 228, 375, 522, 528]
        >>> 32 * 33 // 2  # what a causal mask alone visits
        528
    """
    who = "alibi_block_mask"
    slopes = qk_checks.slopes(who, slopes)
    queries, keys = qk_checks.lengths(who, q_len, k_len)
    checks.float_dtype(who, "dtype", dtype)
    checks.boolean(who, "causal", causal)
    checks.integer(who, "block", block)
    start = qk_checks.offset(who, offset, queries, keys, slopes.device)
    ids = qk_checks.ids(who, "documents", documents, keys, slopes.device)
    if queries == 0:
        rule = "q_len must be at least 1"
        raise ValueError(checks.message(who, rule, 0, "There is nothing to mask."))
    bound = arguments.bound(who, score_bound, slopes)
    qk_checks.check_batches(
        *(who, ("slopes", slopes, 2), ("offset", start, 1)),
        *(("documents", ids, 2), ("score_bound", bound, 2)),
    )
    gap = 2 * windows_of.SLACK * bound[..., None]
    ends = None if ids is None else run_ends(ids)
    seen = spans(queries, keys, causal=causal, offset=start, ends=ends, device=slopes.device)
    low, high = windows_of.narrowed(seen, slopes, gap, keys, dtype, causal=causal)
    place = torch.as_tensor(start, dtype=torch.int32, device=slopes.device)
    sees = pair_mod(place, ends, causal)
    return blocks.block_mask(seen, low, high, keys, sees, block=block, grad=True)


def alibi_reach(
    slopes: Tensor,
    k_len: int,
    *,
    score_bound: float | Tensor,
    dtype: torch.dtype,
    causal: bool = True,
) -> Tensor:
    """Distance from which each head's keys weigh too little to move its output, in tokens.

    The keys at this distance and further may be left out, as :func:`alibi_block_mask` does: a
    sliding window of this many tokens, the query's own among them, is enough.

    Args:
        slopes: ``(H,)`` or ``(B, H)``.
        k_len: Keys ``K``, which bounds how many there are to leave out.
        score_bound: At least every ``|q · k| · scale``, as in :func:`alibi_block_mask`.
        dtype: Of the output.
        causal: Whether keys are on one side of the query only.

    Returns:
        int64 ``(H,)``, or ``(B, H)`` if either argument is, from 1 to ``k_len``.

    Examples:
        >>> from posenc.functional import alibi_slopes
        >>> alibi_reach(alibi_slopes(4), 32_768, score_bound=10.0, dtype=torch.bfloat16)
        tensor([ 115,  478, 1996, 8335])
    """
    who = "alibi_reach"
    steep = qk_checks.slopes(who, slopes)
    keys = checks.integer(who, "k_len", k_len)
    checks.float_dtype(who, "dtype", dtype)
    checks.boolean(who, "causal", causal)
    bound = arguments.bound(who, score_bound, steep)
    qk_checks.check_batches(who, ("slopes", steep, 2), ("score_bound", bound, 2))
    if steep.dim() == len(bound) == 1:
        bound = bound[0]
    gap = 2 * windows_of.SLACK * bound
    return window_length(steep.to(gap.dtype), gap, keys, dtype, causal=causal).long()


def score_bound(q: Tensor, k: Tensor, *, scale: float | None = None) -> Tensor:
    r"""A bound on every score, from the norms: :math:`s \max_i |q_i| \max_j |k_j|`.

    Args:
        q: ``(B, H, Q, D)``.
        k: ``(B, Hk, K, D)`` with ``H`` a multiple of ``Hk``.
        scale: :math:`s`, :math:`1/\sqrt{D}` if None.

    Returns:
        float32 (float64 for float64) of shape ``(B, H)``.

    Examples:
        >>> q = k = torch.ones(1, 2, 5, 64)
        >>> score_bound(q, k)
        tensor([[8., 8.]])
    """
    who = "score_bound"
    arguments.pair(who, q, k)
    lengths, longest = windows_of.norms(q, k, arguments.scale(who, scale, q))
    return lengths.amax(-1) * longest
