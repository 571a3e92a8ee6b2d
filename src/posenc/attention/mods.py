"""ALiBi as FlexAttention takes it: functions of one score, and of one pair of places."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks
from posenc.numerics.spans import Ends, run_ends

ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_Read: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def alibi_score_mod(
    slopes: Tensor,
    *,
    causal: bool = True,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    documents: Tensor | None = None,
    head_offset: int = 0,
    masked: bool = True,
    base: ScoreMod | None = None,
) -> ScoreMod:
    """Score modification for ``flex_attention``: adds the bias, and hides what is not seen.

    Everything it needs is held in tensors, so another offset, or another document, does not
    compile another kernel.

    Args:
        slopes: Shape ``(H,)`` or ``(B, H)``, on the device of the attention.
        causal: Whether a query sees only keys up to its own.
        offset: Key of the first query: an int, or an integer tensor ``()`` or ``(B,)``.
        position_ids: Position of each key, ``(K,)`` or ``(B, K)``, instead of its index.
        documents: Ids ``(K,)`` or ``(B, K)``; a run of equal ids is a document.
        head_offset: Where the attention's heads begin among those of ``slopes``.
        masked: Whether to hide the future and other documents here. False leaves that to a
            block mask made with :func:`alibi_mask_mod`, which is faster.
        base: A score_mod of your own, applied first.

    Examples:
        >>> from posenc.functional import alibi_slopes
        >>> mod = alibi_score_mod(alibi_slopes(8))
        >>> one = torch.tensor(1)
        >>> mod(torch.tensor(0.0), 0 * one, 0 * one, 5 * one, 3 * one)
        tensor(-1.)
    """
    who = "alibi_score_mod"
    slopes = qk_checks.slopes(who, slopes)
    steep = _by_sequence(slopes[..., checks.integer(who, "head_offset", head_offset, least=0) :])
    ids = _ids(who, "position_ids", position_ids, slopes.device)
    runs = _ids(who, "documents", documents, slopes.device)
    start = _place(who, offset, slopes.device, ids, runs)
    qk_checks.check_batches(
        who,
        ("slopes", slopes, 2),
        ("offset", start, 1),
        ("position_ids", ids, 2),
        ("documents", runs, 2),
    )
    own = _own_key(start)
    place = None if ids is None else _by_sequence(ids)
    sees = pair_mod(
        start, None if runs is None else run_ends(runs), checks.boolean(who, "causal", causal)
    )

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if base is not None:
            score = base(score, b, h, q, k)
        ahead = k - own(b, q) if place is None else place(b, k) - place(b, own(b, q))
        biased = score - steep(b, h) * ahead.abs()
        return torch.where(sees(b, h, q, k), biased, float("-inf")) if masked else biased

    return score_mod


def alibi_mask_mod(
    *,
    causal: bool = True,
    offset: int | Tensor = 0,
    documents: Tensor | None = None,
    device: torch.device | str = "cpu",
    base: MaskMod | None = None,
) -> MaskMod:
    """Mask for ``create_block_mask``: what a query sees.

    Args:
        causal: Whether a query sees only keys up to its own.
        offset: Key of the first query: an int, or an integer tensor ``()`` or ``(B,)``.
        documents: Ids ``(K,)`` or ``(B, K)``; a run of equal ids is a document.
        device: Of the attention.
        base: A mask_mod of your own; a pair has to pass both.

    Examples:
        >>> mod = alibi_mask_mod(offset=2)
        >>> place = torch.tensor(0)
        >>> mod(place, place, place, place + 2), mod(place, place, place, place + 3)
        (tensor(True), tensor(False))
    """
    who = "alibi_mask_mod"
    checks.boolean(who, "causal", causal)
    ids = _ids(who, "documents", documents, device)
    start = _place(who, offset, device, ids)
    qk_checks.check_batches(who, ("offset", start, 1), ("documents", ids, 2))
    sees = pair_mod(start, None if ids is None else run_ends(ids), causal)
    if base is None:
        return sees
    return lambda b, h, q, k: sees(b, h, q, k) & base(b, h, q, k)


def pair_mod(offset: Tensor, ends: Ends | None, causal: bool) -> MaskMod:
    """What a query sees, from tensors that are already checked."""
    own = _own_key(offset)
    first, last = (None, None) if ends is None else map(_by_sequence, ends)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at = own(b, q)
        seen = k <= at if causal else k == k
        if first is not None and last is not None:
            seen = seen & (k >= first(b, at)) & (k <= last(b, at))
        return seen

    return mask_mod


def bias_mod(slopes: Tensor, offset: Tensor, *, causal: bool) -> ScoreMod:
    """The bare bias where a mask hides the rest: the least work for each score."""
    steep, own = _by_sequence(slopes), _own_key(offset)
    if causal:
        return lambda score, b, h, q, k: score + steep(b, h) * (k - own(b, q))
    return lambda score, b, h, q, k: score - steep(b, h) * (k - own(b, q)).abs()


def _by_sequence(table: Tensor) -> _Read:
    """Read ``table`` at a place; a leading axis of more than one is the sequence's."""
    if table.dim() == 2 and table.shape[0] == 1:
        table = table[0]
    if table.dim() == 1:
        return lambda b, i: table[i]
    return lambda b, i: table[b, i]


def _own_key(offset: Tensor) -> _Read:
    """The key of a query."""
    if offset.dim() == 1 and len(offset) != 1:
        return lambda b, q: q + offset[b]
    start = offset.reshape(())
    return lambda b, q: q + start


def _place(
    who: str, offset: int | Tensor, device: torch.device | str, *ids: Tensor | None
) -> Tensor:
    """The offset as an int32 tensor, always: a number would be compiled in.

    ``ids`` say how many keys there are, if any are given; queries are counted at the call, so one
    is all that is known of them.
    """
    if offset is None:
        checks.integer(who, "offset", offset)
    keys = min([checks.FARTHEST, *[x.shape[-1] for x in ids if x is not None]])
    start = qk_checks.offset(who, offset, 1, keys, device)
    if isinstance(start, Tensor):
        return start.to(torch.int32)
    return torch.full((), start, dtype=torch.int32, device=device)


def _ids(who: str, name: str, ids: Tensor | None, device: torch.device | str) -> Tensor | None:
    keys = ids.shape[-1] if isinstance(ids, Tensor) and ids.dim() else 0
    return qk_checks.ids(who, name, ids, keys, device)
