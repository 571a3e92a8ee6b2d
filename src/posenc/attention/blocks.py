"""Block masks made from the first and the last key of each query, never from a matrix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks
from posenc.attention.mods import MaskMod, as_int32, visible_mod
from posenc.attention.pruning import SLACK, prune_keys
from posenc.numerics.spans import Spans, document_ends, spans

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# FlexAttention's default block size.
BLOCK = 128
# The first and the last block of each row of blocks; neither decreases from row to row.
_Range: TypeAlias = tuple[Tensor, Tensor]


def alibi_block_mask(
    slopes: Tensor,
    q_len: int,
    k_len: int | None = None,
    *,
    score_bound: float | Tensor,
    dtype: torch.dtype,
    causal: bool = True,
    query_offset: int | Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    block: int = BLOCK,
) -> BlockMask:
    """Block mask for ``flex_attention`` without the blocks of keys that a head does not need.

    For use with :func:`alibi_score_mod` where you call FlexAttention yourself. Pruning changes the
    output by less than half an ulp **if every score is within the bound**, which this function
    cannot check. No ``L × L`` mask is made.

    Args:
        slopes: ``(H,)`` or ``(B, H)``, on the device of the attention.
        q_len: Queries ``Q``.
        k_len: Keys ``K``; ``Q`` if None.
        score_bound: An upper bound on every ``|q · k| · scale``: a number, or a tensor
            ``(H,)`` or ``(B, H)``. Infinity prunes nothing.
        dtype: The dtype of the output.
        causal: Whether a query sees only keys up to its own.
        query_offset: Key index of the first query, ``K - Q`` if None: an int, or an integer tensor
            ``()`` or ``(B,)``.
        document_ids: Ids ``(K,)`` or ``(B, K)``; a run of equal ids is a document.
        window: A sliding window, as in :func:`biased_attention`.
        block: The block size, in queries and in keys.

    Examples:
        >>> from posenc.functional import alibi_slopes
        >>> slopes = alibi_slopes(8)
        >>> mask = alibi_block_mask(slopes, 4096, score_bound=8.0, dtype=torch.bfloat16)
        >>> visited = mask.to_dense()[0].sum((1, 2))
        >>> visited.tolist()
        [63, 63, 93, 150, 228, 375, 522, 528]
        >>> 32 * 33 // 2  # the blocks of a causal mask alone
        528
    """
    who = "alibi_block_mask"
    slopes, device = qk_checks.check_slopes(who, slopes), slopes.device
    checks.integer(who, "q_len", q_len)
    queries, keys = qk_checks.check_lengths(who, q_len, k_len)
    checks.float_dtype(who, "dtype", dtype)
    checks.boolean(who, "causal", causal)
    checks.integer(who, "block", block)
    bound = qk_checks.check_score_bound(who, score_bound, slopes.shape[-1], slopes)
    start = qk_checks.check_query_offset(who, query_offset, queries, keys, device)
    ids = qk_checks.check_key_ids(who, "document_ids", document_ids, keys, device)
    qk_checks.check_batches(
        who, slopes=slopes, score_bound=bound, query_offset=start, document_ids=ids
    )
    ends, sides = document_ends(ids), qk_checks.check_window(who, window)
    how: Any = {"causal": causal, "offset": start, "ends": ends, "window": sides, "device": device}
    seen = spans(queries, keys, **how)
    gap = 2 * SLACK * bound[..., None]
    low, high = prune_keys(seen, slopes, gap, keys, dtype, causal=causal)
    sees = visible_mod(as_int32(start, device), ends, causal, sides)
    return block_mask(seen, low, high, keys, sees, block=block, grad=True)


def block_mask(
    seen: Spans, low: Tensor, high: Tensor, keys: int, mask_mod: MaskMod, *, block: int, grad: bool
) -> BlockMask:
    """The blocks that hold every key from ``low`` to ``high``, ``[1 or B, 1 or H, Q]``.

    Inside them ``mask_mod`` hides the keys that are not ``seen``. ``grad`` adds the lists for the
    backward pass.
    """
    from torch.nn.attention.flex_attention import BlockMask  # costs a second of imports

    queries, columns = low.shape[-1], -(-keys // block)
    visited, full = _row_ranges(seen, low, high, block)
    kv = _lists(visited, full, columns)
    q: Iterable[Tensor | None] = (None,) * 4
    if grad:
        back = _transpose(visited, columns), _transpose(full, columns)
        q = _lists(*back, visited[0].shape[-1], negative=True)
    return BlockMask((queries, keys), *kv, *q, (block, block), mask_mod)  # type: ignore[call-arg, arg-type]


def _row_ranges(seen: Spans, low: Tensor, high: Tensor, block: int) -> tuple[_Range, _Range]:
    """The blocks that each row of blocks visits, and those that are full, which need no mask.

    Full ranges may reach beyond the visited ones, and are empty where they end before they begin.
    """
    queries = low.shape[-1]
    begin = torch.arange(0, queries, block, device=low.device)
    end = (begin + block - 1).clamp(max=queries - 1)
    # Windows differ from query to query; `_transpose` needs ranges that never decrease.
    visited_low = _split_blocks(low, block).amin(-1).flip(-1).cummin(-1).values.flip(-1) // block
    visited_high = _split_blocks(high, block).amax(-1).cummax(-1).values // block
    full_low = -(-seen.first[:, None, end] // block)
    full_high = (seen.last[:, None, begin] + 1) // block - 1
    return (visited_low, visited_high), (full_low, full_high)


def _split_blocks(x: Tensor, block: int) -> Tensor:
    """The last axis split into blocks, ``[..., n, block]``, padded with its last entry."""
    short = -x.shape[-1] % block
    padded = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], short)), -1)
    return padded.reshape(*x.shape[:-1], -1, block)


def _transpose(rows: _Range, columns: int) -> _Range:
    """The rows that visit each column, negated, because `_lists` counts downwards."""
    low, high = (x.contiguous() for x in rows)
    column = torch.arange(columns, device=low.device)
    last = torch.searchsorted(low, column.expand(*low.shape[:-1], -1).contiguous(), right=True) - 1
    first = torch.searchsorted(high, column.expand(*high.shape[:-1], -1).contiguous())
    return -last, -first


def _lists(
    visited: _Range, full_range: _Range, width: int, *, negative: bool = False
) -> tuple[Tensor, ...]:
    """Counts and indices of the blocks to mask, then of the full ones, int32.

    Indices run downwards from the high end. In causal attention pruning moves only the low end, so
    all heads share one list of indices, and differ only in the counts.
    """
    (low, high), (full_low, full_high) = visited, full_range
    top = torch.minimum(torch.maximum(full_high, full_low - 1), high)
    full = (top - torch.maximum(full_low, low) + 1).clamp(min=0)
    masked = (high - low + 1).clamp(min=0) - full
    n = torch.arange(width, device=low.device)
    above = (high - top)[..., None]
    below = torch.minimum(full_low - 1, high)[..., None] + above - n
    masked_index = torch.where(n < above, high[..., None] - n, below)
    full_index = top[..., None] - n
    if negative:
        masked_index, full_index = -masked_index, -full_index
    shape = full.shape[:2]

    def expand(x: Tensor) -> Tensor:
        shared = x.dim() == 4 and x.shape[0] == x.shape[1] == 1
        x = x.expand(*shape, *x.shape[2:])
        if shared:
            return x
        # The kernels step through sequences and heads by the stride of the heads, even where there
        # is one head; left to a compiler, an axis of length 1 may get any stride.
        x = x.flatten(0, 1).contiguous()
        step = x[0].numel()
        return x.as_strided((*shape, *x.shape[1:]), (shape[1] * step, step, *x.stride()[1:]))

    lists = (masked, masked_index.clamp(0, width - 1), full, full_index.clamp(0, width - 1))
    return tuple(expand(x.int()) for x in lists)
