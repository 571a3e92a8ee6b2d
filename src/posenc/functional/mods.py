"""ALiBi and other relative biases for FlexAttention: score_mods, a mask_mod and a block mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from posenc._contract import checks, qk_checks
from posenc.numerics.spans import document_ends
from posenc.ops.attention.biases import (
    BY_ROWS,
    Bias,
    DistanceTable,
    RunningSum,
    Slopes,
    check_bias,
    described,
)
from posenc.ops.attention.places import Places, check_places
from posenc.ops.attention.pruning import SLACK, prune_keys

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def alibi_score_mod(
    slopes: Tensor,
    q_len: int,
    k_len: int | None = None,
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
    """As :func:`relative_score_mod` with :class:`Slopes` of shape ``(H,)`` or ``(B, H)``.

    In addition, ``position_ids``, ``(K,)`` or ``(B, K)``, are positions of the keys, instead of
    their indices, and ``head_offset`` is the index in ``slopes`` of the attention's first head.

    Examples:
        >>> from posenc.functional import alibi_slopes
        >>> mod = alibi_score_mod(alibi_slopes(8), 1, 6)  # one query, the last of six keys
        >>> zero = torch.tensor(0)
        >>> mod(torch.tensor(0.0), zero, zero, zero, zero + 3)
        tensor(-1.)
    """
    who = "alibi_score_mod"
    qk_checks.check_slopes(who, slopes)
    first_head = checks.integer(who, "head_offset", head_offset, least=0)
    if first_head >= slopes.shape[-1]:
        rule = f"head_offset must be below the {slopes.shape[-1]} heads of slopes"
        checks.fail(who, rule, first_head, "Pass the slopes of all ranks.")
    bias = Slopes(slopes[..., first_head:])
    k_len = q_len if k_len is None else k_len
    positions = qk_checks.check_key_ids(who, "position_ids", position_ids, k_len, slopes.device)
    given = q_len, k_len, causal, query_offset, document_ids, window, slopes.device
    places = check_places(who, bias, *given, position_ids=positions)
    return _score_mod(bias, places, positions, masked, base)


def relative_score_mod(
    bias: Bias,
    q_len: int,
    k_len: int | None = None,
    *,
    causal: bool = True,
    query_offset: int | Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    masked: bool = True,
    base: ScoreMod | None = None,
) -> ScoreMod:
    """Score modification for ``flex_attention``: adds the bias, and hides keys that are not seen.

    It reads lengths, offsets and documents from tensors, so that other values do not recompile the
    kernel. FlexAttention passes no lengths to a mod: make one for each call. Gradients reach the
    bias's numbers.

    Args:
        bias: :class:`Slopes`, :class:`DistanceTable` or :class:`RunningSum`, on the device of the
            attention.
        q_len: Queries ``Q`` of the call.
        k_len: Keys ``K`` of the call, cached ones too; ``Q`` if None.
        causal: Whether a query sees only keys up to its own.
        query_offset: As in :func:`biased_attention`, and so are the next two.
        document_ids: Ids ``(K,)`` or ``(B, K)``.
        window: A sliding window.
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
    if bias is None or isinstance(bias, BY_ROWS):
        rule = "bias must be Slopes, DistanceTable or RunningSum"
        hint = "FlexAttention cannot compute it: call attention(), or biased_attention."
        checks.fail(who, rule, described(bias), hint, TypeError)
    check_bias(who, bias, None, q_len if k_len is None else k_len)
    given = q_len, k_len, causal, query_offset, document_ids, window, bias.values.device
    return _score_mod(bias, check_places(who, bias, *given), None, masked, base)


def alibi_mask_mod(
    q_len: int,
    k_len: int | None = None,
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
        k_len: Keys ``K`` of the call, cached ones too; ``Q`` if None.
        causal: Whether a query sees only keys up to its own.
        query_offset: As in :func:`biased_attention`, and so are the next two.
        document_ids: Ids ``(K,)`` or ``(B, K)``.
        window: A sliding window.
        device: The device of the attention.
        base: A mask_mod of your own; a key is seen if both masks say so.

    Examples:
        >>> mod = alibi_mask_mod(2, 4)  # two queries, the last of four keys
        >>> zero = torch.tensor(0)
        >>> mod(zero, zero, zero, zero + 2), mod(zero, zero, zero, zero + 3)
        (tensor(True), tensor(False))
    """
    given = q_len, k_len, causal, query_offset, document_ids, window, device
    sees = _visible_mod(check_places("alibi_mask_mod", None, *given))
    if base is None:
        return sees
    return lambda b, h, q, k: sees(b, h, q, k) & base(b, h, q, k)


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
    block: int = 128,
) -> BlockMask:
    """Block mask for ``flex_attention`` without the blocks of keys that a head does not need.

    For use with :func:`alibi_score_mod` where you call FlexAttention yourself. Pruning changes the
    output by less than half an ulp **if every score is within the bound**, which this function
    cannot check. It makes no ``L × L`` mask.

    Args:
        slopes: ``(H,)`` or ``(B, H)``, on the device of the attention.
        q_len: Queries ``Q``.
        k_len: Keys ``K``; ``Q`` if None.
        score_bound: An upper bound on every ``|q · k| · scale``: a number, or a tensor
            ``(H,)`` or ``(B, H)``. Infinity prunes nothing.
        dtype: The dtype of the output.
        causal: Whether a query sees only keys up to its own.
        query_offset: As in :func:`biased_attention`, and so are the next two.
        document_ids: Ids ``(K,)`` or ``(B, K)``.
        window: A sliding window.
        block: The block size, in queries and in keys.

    Examples:
        >>> from posenc.functional import alibi_slopes
        >>> slopes = alibi_slopes(8)
        >>> mask = alibi_block_mask(slopes, 4096, score_bound=8.0, dtype=torch.bfloat16)
        >>> visited = mask.to_dense()[0].sum((1, 2))
        >>> visited.tolist()
        [63, 63, 93, 150, 228, 375, 522, 528]
        >>> 32 * 33 // 2  # the blocks of a mask that is only causal
        528
    """
    from torch.nn.attention.flex_attention import BlockMask  # costs a second of imports

    who = "alibi_block_mask"
    qk_checks.check_slopes(who, slopes)
    checks.integer(who, "q_len", q_len)
    checks.float_dtype(who, "dtype", dtype)
    checks.integer(who, "block", block)
    bound = qk_checks.check_score_bound(who, score_bound, slopes.shape[-1], slopes)
    given = q_len, k_len, causal, query_offset, document_ids, window, slopes.device
    places = check_places(who, Slopes(slopes), *given, score_bound=bound)
    seen, keys = places.spans(), places.keys
    gap = 2 * SLACK * bound[..., None]
    low, high = prune_keys(seen, slopes, gap, keys, dtype, causal=causal)
    # The keys that some query of a row of blocks needs, and those that all of them see.
    after_last = (0, -places.queries % block)
    lowest = pad(low, after_last, value=keys).unflatten(-1, (-1, block)).amin(-1, keepdim=True)
    highest = pad(high, after_last, value=-1).unflatten(-1, (-1, block)).amax(-1, keepdim=True)
    begin = torch.arange(0, places.queries, block, device=low.device)
    end = (begin + block - 1).clamp(max=places.queries - 1)
    first, last = seen.first[:, None, end, None], seen.last[:, None, begin, None]
    column = torch.arange(0, keys, block, device=low.device)
    visited = (column + block > lowest) & (column <= highest)
    full = visited & (column >= first) & (column + block <= last + 1)
    lists = *_listed(visited & ~full), *_listed(full)
    lengths = places.queries, keys
    return BlockMask.from_kv_blocks(*lists, block, _visible_mod(places), lengths)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks in each row, and their indices, followed by those of the others."""
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices.int()


def _score_mod(
    bias: Slopes | DistanceTable | RunningSum,
    places: Places,
    positions: Tensor | None,
    masked: bool,
    base: ScoreMod | None,
) -> ScoreMod:
    add, sees = _bias_mod(bias, places, positions), _visible_mod(places)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if base is not None:
            score = base(score, b, h, q, k)
        biased = add(score, b, h, q, k)
        return torch.where(sees(b, h, q, k), biased, float("-inf")) if masked else biased

    return score_mod


def _bias_mod(
    bias: Slopes | DistanceTable | RunningSum, places: Places, positions: Tensor | None
) -> ScoreMod:
    """The sum with the bias, which hides nothing, in the fewest operations for each score."""
    values, own_key = bias.values, _own_key(places)
    if isinstance(bias, DistanceTable):
        zero, last = bias.zero, values.shape[1] - 1
        return lambda score, b, h, q, k: (
            score + values[h, (own_key(b, q) - k + zero).clamp(0, last)].to(score.dtype)
        )
    if isinstance(bias, RunningSum):
        total = _by_sequence(values, axes=2)
        return lambda score, b, h, q, k: (
            score + (total(b, h, own_key(b, q)) - total(b, h, k)).to(score.dtype)
        )
    slope = _by_sequence(values)
    if positions is not None:
        position = _by_sequence(positions)
        return lambda score, b, h, q, k: (
            score - slope(b, h) * (position(b, k) - position(b, own_key(b, q))).abs()
        )
    if places.causal:
        return lambda score, b, h, q, k: score + slope(b, h) * (k - own_key(b, q))
    return lambda score, b, h, q, k: score - slope(b, h) * (k - own_key(b, q)).abs()


def _visible_mod(places: Places) -> MaskMod:
    """The mask of the keys that a query sees."""
    own_key, causal, window = _own_key(places), places.causal, places.window
    ends = document_ends(places.ids)
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


def _by_sequence(table: Tensor, axes: int = 1) -> Callable[..., Tensor]:
    """A function that reads ``table`` at a sequence and an index of ``axes`` axes.

    The table is for all sequences, or has an axis for them, of length 1 or B.
    """
    if table.dim() == axes + 1 and table.shape[0] == 1:
        table = table[0]
    by_sequence = table.dim() > axes

    def read(b: Tensor, *index: Tensor) -> Tensor:
        place = (b, *index) if by_sequence else index
        return table[place]

    return read


def _own_key(places: Places) -> Callable[[Tensor, Tensor], Tensor]:
    """A function from a sequence and a query to the query's key index."""
    start = places.start
    # An int would be compiled into the kernel.
    offset = start.int() if isinstance(start, Tensor) else torch.full((), start, dtype=torch.int32)
    offset = offset.to(places.device)
    if offset.dim() == 1 and len(offset) != 1:
        return lambda b, q: q + offset[b]
    offset = offset.reshape(())
    return lambda b, q: q + offset
