"""Block masks written down from the first and the last key of each query, never from a matrix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from posenc.attention.mods import MaskMod
from posenc.numerics.spans import Spans

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Queries, and keys, of a block: FlexAttention's own default.
BLOCK = 128


class _Ranges(NamedTuple):
    """For each row of blocks, which are visited, and which of these need no mask.

    All ends count, and none falls along the rows. ``full`` ends may leave the visited range, and
    ``full_high < full_low`` says that there are none.
    """

    low: Tensor
    high: Tensor
    full_low: Tensor
    full_high: Tensor


def block_mask(
    seen: Spans, low: Tensor, high: Tensor, keys: int, mask_mod: MaskMod, *, block: int, grad: bool
) -> BlockMask:
    """The blocks that hold every key from ``low`` to ``high``.

    Costs ``H · L / block`` counts. The lists that go with them begin at the diagonal, where no
    head has left anything out yet, so a causal mask has one for all heads.

    Args:
        seen: What each query may see, ``[1 or B, Q]``.
        low: First key it needs, ``[1 or B, 1 or H, Q]``.
        high: Last key it needs.
        keys: ``K``.
        mask_mod: Hides the rest of what ``seen`` leaves of a block.
        block: Queries, and keys, of a block.
        grad: Whether the lists of the backward pass are wanted too.
    """
    from torch.nn.attention.flex_attention import BlockMask  # costs a second of imports

    queries, columns = low.shape[-1], -(-keys // block)
    rows = _rows(seen, low, high, block)
    kv = _lists(rows, columns)
    q: Iterable[Tensor | None] = (None,) * 4
    if grad:
        q = _lists(_transposed(rows, columns), rows.low.shape[-1], backward=True)
    return BlockMask((queries, keys), *kv, *q, (block, block), mask_mod)  # type: ignore[call-arg, arg-type]


def _rows(seen: Spans, low: Tensor, high: Tensor, block: int) -> _Ranges:
    queries = low.shape[-1]
    begin = torch.arange(0, queries, block, device=low.device)
    end = (begin + block - 1).clamp(max=queries - 1)
    # Windows of neighbours differ; a range that never turns back can be read from both sides.
    visited_low = _blocks(low, block, "min").flip(-1).cummin(-1).values.flip(-1) // block
    visited_high = _blocks(high, block, "max").cummax(-1).values // block
    full_low = -(-seen.first[:, None, end] // block)
    full_high = (seen.last[:, None, begin] + 1) // block - 1
    return _Ranges(visited_low, visited_high, full_low, torch.maximum(full_high, full_low - 1))


def _blocks(x: Tensor, block: int, which: str) -> Tensor:
    """Smallest or largest of each ``block`` along the last axis; the last may be shorter."""
    short = -x.shape[-1] % block
    x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], short)), -1).unflatten(-1, (-1, block))
    return x.amin(-1) if which == "min" else x.amax(-1)


def _transposed(rows: _Ranges, columns: int) -> _Ranges:
    """For each column the rows that visit it, counted downwards from zero to keep `_lists`."""

    def below(ends: Tensor, *, right: bool) -> Tensor:
        column = torch.arange(columns, device=ends.device).expand(*ends.shape[:-1], columns)
        return torch.searchsorted(ends.contiguous(), column.contiguous(), right=right)

    last, first = below(rows.low, right=True) - 1, below(rows.high, right=False)
    full_last = below(rows.full_low, right=True) - 1
    full_first = below(rows.full_high, right=False)
    high = torch.maximum(-full_first, -full_last - 1)
    return _Ranges(-last, -first, -full_last, high)


def _lists(ranges: _Ranges, width: int, *, backward: bool = False) -> tuple[Tensor, ...]:
    """Count and indices of the blocks to mask, then of the full ones; int32.

    Both lists run downwards from the high end. Windows move the low end alone as long as the
    attention is causal, so the indices do not depend on the head.
    """
    low, high, full_low, full_high = ranges
    top = torch.minimum(full_high, high)
    full = (top - torch.maximum(full_low, low) + 1).clamp(min=0)
    masked = (high - low + 1).clamp(min=0) - full
    n = torch.arange(width, device=low.device)
    above = (high - top)[..., None]
    beneath = torch.minimum(full_low - 1, high)[..., None] + above - n
    masked_index = torch.where(n < above, high[..., None] - n, beneath)
    full_index = top[..., None] - n
    if backward:
        masked_index, full_index = -masked_index, -full_index
    shape = full.shape[:2]

    def spread(x: Tensor) -> Tensor:
        alike = x.dim() == 4 and x.shape[0] == x.shape[1] == 1
        x = x.expand(*shape, *x.shape[2:])
        if alike:
            return x
        # The kernels step through sequences and heads with one stride, that of the heads, also
        # where there is one head: named here, since a compiler is free to choose another for it.
        x = x.flatten(0, 1).contiguous()
        step = x[0].numel()
        return x.as_strided((*shape, *x.shape[1:]), (shape[1] * step, step, *x.stride()[1:]))

    lists = (masked, masked_index.clamp(0, width - 1), full, full_index.clamp(0, width - 1))
    return tuple(spread(x.int()) for x in lists)
