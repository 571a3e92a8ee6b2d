"""Relative biases as score_mods, and ALiBi as a mask_mod, for FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks
from posenc.attention.biases import (
    Bias,
    DistanceTable,
    RowBias,
    Slopes,
    check_bias,
    check_sequences,
    heads_of,
)
from posenc.numerics.spans import Ends, Window, document_ends

ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_Read: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def alibi_score_mod(
    slopes: Tensor,
    q_len: int,
    k_len: int,
    *,
    causal: bool = True,
    query_offset: int | Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    head_offset: int = 0,
    masked: bool = True,
    base: ScoreMod | None = None,
) -> ScoreMod:
    """Score modification for ``flex_attention``: adds the bias, and hides keys that are not seen.

    It reads lengths, offsets and documents from tensors, so that other values do not recompile the
    kernel. FlexAttention passes no lengths to a mod: make one for each call.

    Args:
        slopes: Shape ``(H,)`` or ``(B, H)``, on the device of the attention.
        q_len: Queries ``Q`` of the call.
        k_len: Keys ``K`` of the call, cached ones too.
        causal: Whether a query sees only keys up to its own.
        query_offset: Key index of the first query, ``K - Q`` if None: an int, or an integer tensor
            ``()`` or ``(B,)``.
        position_ids: Position of each key, ``(K,)`` or ``(B, K)``, instead of its index.
        document_ids: Ids ``(K,)`` or ``(B, K)``; a run of equal ids is a document.
        window: A sliding window, as in :func:`biased_attention`.
        head_offset: Index in ``slopes`` of the attention's first head.
        masked: Whether to hide the future and other documents here. False leaves that to a
            block mask made with :func:`alibi_mask_mod`, which is faster.
        base: A score_mod of your own, applied first.

    Examples:
        >>> from posenc.functional import alibi_slopes
        >>> mod = alibi_score_mod(alibi_slopes(8), 1, 6)  # one query, the last of six keys
        >>> zero = torch.tensor(0)
        >>> mod(torch.tensor(0.0), zero, zero, zero, zero + 3)
        tensor(-1.)
    """
    who = "alibi_score_mod"
    slopes, device = qk_checks.check_slopes(who, slopes), slopes.device
    queries, keys = qk_checks.check_lengths(who, q_len, k_len)
    checks.boolean(who, "causal", causal)
    first_head = checks.integer(who, "head_offset", head_offset, least=0)
    if first_head >= slopes.shape[-1]:
        rule = f"head_offset must be below the {slopes.shape[-1]} heads of slopes"
        checks.fail(who, rule, first_head, "Pass the slopes of all ranks.")
    start = qk_checks.check_query_offset(who, query_offset, queries, keys, device)
    documents = qk_checks.check_key_ids(who, "document_ids", document_ids, keys, device)
    positions = qk_checks.check_key_ids(who, "position_ids", position_ids, keys, device)
    qk_checks.check_batches(
        who, slopes=slopes, query_offset=start, document_ids=documents, position_ids=positions
    )
    start = as_int32(start, device)
    bias = bias_mod(slopes[..., first_head:], start, causal, positions)
    sides = qk_checks.check_window(who, window)
    sees = visible_mod(start, document_ends(documents), causal, sides)
    return _masked_mod(bias, sees, masked, base)


def relative_score_mod(
    bias: Bias,
    q_len: int,
    k_len: int,
    *,
    causal: bool = True,
    query_offset: int | Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    masked: bool = True,
    base: ScoreMod | None = None,
) -> ScoreMod:
    """Score modification for ``flex_attention`` with any bias but a :class:`RowBias`.

    As :func:`alibi_score_mod`, make one for each call. Gradients reach the bias's numbers.

    Args:
        bias: :class:`Slopes`, :class:`DistanceTable` or :class:`RunningSum`, on the device of the
            attention.
        q_len: Queries ``Q`` of the call.
        k_len: Keys ``K`` of the call, cached ones too.
        causal: Whether a query sees only keys up to its own.
        query_offset: Key index of the first query, ``K - Q`` if None: an int, or an integer tensor
            ``()`` or ``(B,)``.
        document_ids: Ids ``(K,)`` or ``(B, K)``; a run of equal ids is a document.
        window: A sliding window, as in :func:`biased_attention`.
        masked: Whether to hide the future and other documents here. False leaves that to a
            block mask made with :func:`alibi_mask_mod`, which is faster.
        base: A score_mod of your own, applied first.

    Examples:
        >>> table = DistanceTable(torch.tensor([[0.0, -1.0, -3.0]]))
        >>> mod = relative_score_mod(table, 1, 6)  # one query, the last of six keys
        >>> zero = torch.tensor(0)
        >>> mod(torch.tensor(0.0), zero, zero, zero, zero + 4)
        tensor(-1.)
    """
    who = "relative_score_mod"
    queries, keys = qk_checks.check_lengths(who, q_len, k_len)
    checks.boolean(who, "causal", causal)
    if bias is None or isinstance(bias, RowBias):
        rule = "bias must be Slopes, DistanceTable or RunningSum"
        hint = "FlexAttention cannot compute it: call attention(), or biased_attention."
        checks.fail(who, rule, checks.describe(bias), hint, TypeError)
    check_bias(who, bias, heads_of(bias), keys)
    values, device = bias.values, bias.values.device
    start = qk_checks.check_query_offset(who, query_offset, queries, keys, device)
    documents = qk_checks.check_key_ids(who, "document_ids", document_ids, keys, device)
    check_sequences(who, bias, query_offset=start, document_ids=documents)
    start = as_int32(start, device)
    if isinstance(bias, Slopes):
        mod = bias_mod(values, start, causal)
    elif isinstance(bias, DistanceTable):
        mod = _table_mod(bias, start)
    else:
        mod = _sums_mod(values, start)
    sides = qk_checks.check_window(who, window)
    sees = visible_mod(start, document_ends(documents), causal, sides)
    return _masked_mod(mod, sees, masked, base)


def _masked_mod(bias: ScoreMod, sees: MaskMod, masked: bool, base: ScoreMod | None) -> ScoreMod:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if base is not None:
            score = base(score, b, h, q, k)
        biased = bias(score, b, h, q, k)
        return torch.where(sees(b, h, q, k), biased, float("-inf")) if masked else biased

    return score_mod


def _table_mod(bias: DistanceTable, offset: Tensor) -> ScoreMod:
    own_key, table, zero, last = _own_key(offset), *bias, bias.values.shape[1] - 1
    return lambda score, b, h, q, k: (
        score + table[h, (own_key(b, q) - k + zero).clamp(0, last)].to(score.dtype)
    )


def _sums_mod(sums: Tensor, offset: Tensor) -> ScoreMod:
    own_key = _own_key(offset)
    if sums.dim() == 3 and len(sums) == 1:
        sums = sums[0]
    if sums.dim() == 2:
        return lambda score, b, h, q, k: (
            score + (sums[h, own_key(b, q)] - sums[h, k]).to(score.dtype)
        )
    return lambda score, b, h, q, k: (
        score + (sums[b, h, own_key(b, q)] - sums[b, h, k]).to(score.dtype)
    )


def alibi_mask_mod(
    q_len: int,
    k_len: int,
    *,
    causal: bool = True,
    query_offset: int | Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    device: torch.device | str = "cpu",
    base: MaskMod | None = None,
) -> MaskMod:
    """Mask for ``create_block_mask``: the keys that a query sees.

    Args:
        q_len: Queries ``Q`` of the call.
        k_len: Keys ``K`` of the call, cached ones too.
        causal: Whether a query sees only keys up to its own.
        query_offset: Key index of the first query, ``K - Q`` if None: an int, or an integer tensor
            ``()`` or ``(B,)``.
        document_ids: Ids ``(K,)`` or ``(B, K)``; a run of equal ids is a document.
        window: A sliding window, as in :func:`biased_attention`.
        device: The device of the attention.
        base: A mask_mod of your own; a key is seen if both masks say so.

    Examples:
        >>> mod = alibi_mask_mod(2, 4)  # two queries, the last of four keys
        >>> zero = torch.tensor(0)
        >>> mod(zero, zero, zero, zero + 2), mod(zero, zero, zero, zero + 3)
        (tensor(True), tensor(False))
    """
    who = "alibi_mask_mod"
    queries, keys = qk_checks.check_lengths(who, q_len, k_len)
    checks.boolean(who, "causal", causal)
    start = qk_checks.check_query_offset(who, query_offset, queries, keys, device)
    documents = qk_checks.check_key_ids(who, "document_ids", document_ids, keys, device)
    qk_checks.check_batches(who, query_offset=start, document_ids=documents)
    sides = qk_checks.check_window(who, window)
    sees = visible_mod(as_int32(start, device), document_ends(documents), causal, sides)
    if base is None:
        return sees
    return lambda b, h, q, k: sees(b, h, q, k) & base(b, h, q, k)


def visible_mod(offset: Tensor, ends: Ends | None, causal: bool, window: Window | None) -> MaskMod:
    """The mask of the keys that a query sees, from checked tensors."""
    own_key = _own_key(offset)
    first, last = (None, None) if ends is None else map(_by_sequence, ends)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = own_key(b, q)
        seen = k <= own if causal else k == k
        if first is not None and last is not None:
            seen = seen & (k >= first(b, own)) & (k <= last(b, own))
        if window is not None:
            seen = seen & (k >= own - window[0]) & (k <= own + window[1])
        return seen

    return mask_mod


def bias_mod(
    slopes: Tensor, offset: Tensor, causal: bool, positions: Tensor | None = None
) -> ScoreMod:
    """The bias alone, which hides nothing, in the fewest operations for each score."""
    slope, own_key = _by_sequence(slopes), _own_key(offset)
    if positions is not None:
        position = _by_sequence(positions)
        return lambda score, b, h, q, k: (
            score - slope(b, h) * (position(b, k) - position(b, own_key(b, q))).abs()
        )
    if causal:
        return lambda score, b, h, q, k: score + slope(b, h) * (k - own_key(b, q))
    return lambda score, b, h, q, k: score - slope(b, h) * (k - own_key(b, q)).abs()


def as_int32(offset: int | Tensor, device: torch.device | str) -> Tensor:
    """A query offset as a tensor, because an int would be compiled into the kernel."""
    if isinstance(offset, Tensor):
        return offset.int()
    return torch.full((), offset, dtype=torch.int32, device=device)


def _by_sequence(table: Tensor) -> _Read:
    """A function that reads ``table``, ``[n]`` or ``[1 or B, n]``, at a sequence and an index."""
    if table.dim() == 2 and table.shape[0] == 1:
        table = table[0]
    if table.dim() == 1:
        return lambda b, i: table[i]
    return lambda b, i: table[b, i]


def _own_key(offset: Tensor) -> _Read:
    """A function from a sequence and a query to the query's key index."""
    if offset.dim() == 1 and len(offset) != 1:
        return lambda b, q: q + offset[b]
    start = offset.reshape(())
    return lambda b, q: q + start
