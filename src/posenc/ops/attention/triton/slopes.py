"""A line for each head: the bias ``-m |i - j|``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from posenc.ops.attention.triton.parts import KEYS, LOG2E, number_of, sum_blocks
from posenc.ops.attention.triton.walks import (
    NOTHING,
    Above,
    Gradient,
    Prepared,
    Walks,
    hooks,
)
from posenc.ops.plan import Constant, Operand


class Slopes(NamedTuple):
    """Slopes ``(1 or B, H)``, float32 or float64.

    The bias is left out of the rows, and added to the log-sum-exp, unless its rounding would show
    (`is_exact`). A causal line then costs one number for each key.
    """

    hooks: Any
    slopes: Any
    slopes_b: Any
    slopes_h: Any
    to: Any  # a sum for each block of queries, (B, H, blocks), or None
    is_exact: Any
    is_causal: Any


class SlopeRows(NamedTuple):
    """The slope of a block of queries in units of log2, and the first of them."""

    slope: Any
    i0: Any


@triton.jit
def head_slope(bias, b, h):
    return tl.load(bias.slopes + b * bias.slopes_b + h * bias.slopes_h).to(tl.float32) * LOG2E


@triton.jit
def slope_rows(bias, head, sees, block, q):
    return SlopeRows(head, block.i0)


@triton.jit
def distance_of(tile):
    return tl.abs(tile.i[:, None] - tile.j[None, :]).to(tl.float32)


@triton.jit
def add_line(
    scores, state, rows, columns, bias, tile, scale, PLACE: tl.constexpr, WALK: tl.constexpr
):
    scores *= scale
    if bias.is_exact:
        scores -= distance_of(tile) * rows.slope
    elif bias.is_causal:
        scores += ((tile.j - tile.i0).to(tl.float32) * rows.slope)[None, :]
    else:
        near = (tile.i - tile.i0).to(tl.float32)[:, None]
        scores += (near - distance_of(tile)) * rows.slope
    return scores, state, ()


@triton.jit
def line_of_rows(bias, rows, block):
    line = (block.i0 - block.i).to(tl.float32) * rows.slope
    if bias.is_exact:
        line *= 0.0
    return line


@triton.jit
def narrow_by_slope(
    bias, rows, bound, sees, block, begin, edge, after, end, M: tl.constexpr, N: tl.constexpr
):
    """A key is needed if the line lowers its score by no more than the bound."""
    slope = rows.slope
    if bias.is_exact:
        bound += (block.i0 - block.i).to(tl.float32) * slope
    count = -tl.log2(tl.maximum(1.0 - tl.exp2(-slope), 1.0 / sees.keys))
    reach = (bound + count) / slope * 1.000001
    reach = tl.where(slope > 0, reach, float("inf"))
    if not bias.is_causal:
        reach += (block.i - block.i0).to(tl.float32)
    # Queries whose bound is not finite keep every key.
    reach = tl.where(reach < 2.0 * sees.keys, reach, 2.0 * sees.keys)
    sees_a_key = block.low <= block.high
    furthest = tl.max(tl.ceil(tl.where(sees_a_key, reach, -1.0 * M))).to(tl.int32)
    begin = tl.maximum(begin, tl.minimum((block.i0 - furthest) // N, edge))
    if not bias.is_causal:
        last = tl.maximum(block.i0 + M + furthest, 0)
        end = tl.minimum(end, tl.maximum(last // N + 1, after))
    return begin, end


@triton.jit
def open_line(bias, M: tl.constexpr, N: tl.constexpr, WALK: tl.constexpr):
    state = ()
    if bias.to is not None and WALK != KEYS:
        state = tl.zeros((M,), tl.float32)
    return state


@triton.jit
def collect_line(state, ds, dx, rows, columns, bias, tile, PLACE: tl.constexpr, WALK: tl.constexpr):
    if bias.to is not None and WALK != KEYS:
        state -= tl.sum(ds * distance_of(tile), 1)
    return state, dx


@triton.jit
def close_line(state, dx, own, bias, sees, at, WALK: tl.constexpr):
    if bias.to is not None and WALK != KEYS:
        tl.store(bias.to + number_of(at, sees), tl.sum(tl.where(at.present, state, 0.0)))
    return state, dx


@triton.jit
def few_slopes(bias, sees, b, h, i):
    return SlopeRows(head_slope(bias, b, h), i)


@triton.jit
def add_few_lines(products, rows, bias, sees, b, h, i, j, k, seen, scale):
    return products * scale - tl.abs(i[:, None] - j[None, :]).to(tl.float32) * rows.slope[:, None]


HOOKS = hooks(
    head=head_slope,
    rows=slope_rows,
    add=add_line,
    row_part=line_of_rows,
    narrow=narrow_by_slope,
    open=open_line,
    collect=collect_line,
    close=close_line,
    few_rows=few_slopes,
    few=add_few_lines,
)


@triton.jit
def fold_blocks(by_block, to, batch, blocks):
    """The gradient of a slope: the sum of its parts, ``(batch, owners, blocks)``."""
    total = sum_blocks(by_block, batch, blocks)
    tl.store(to + tl.program_id(0), total.to(to.dtype.element_ty))


def prepare(walks: Walks) -> Prepared:
    """The slopes of a call."""
    values = walks.call.bias.values
    bias = Slopes(
        hooks=HOOKS,
        slopes=values,
        slopes_b=values.stride(0),
        slopes_h=values.stride(1),
        to=NOTHING,
        is_exact=Constant(walks.is_exact),
        is_causal=Constant(walks.call.causal),
    )
    return Prepared(bias, walks.number_tiles())


prepare_few = prepare


def gradient_of(
    walks: Walks, prepared: Prepared, above: Above, results: Mapping[str, Operand]
) -> Gradient:
    """A sum for each block of queries, and the sum of these."""
    to, blocks = results["values"], walks.blocks(prepared.tiles.to_queries)
    by_block = walks.plan.empty((*walks.q.shape[:2], blocks), torch.float32)
    sequences = walks.q.shape[0] if to.shape[0] == 1 else 1
    fold: Any = fold_blocks, (to.numel(),), (by_block, to, sequences, blocks), {}
    return Gradient(prepared.bias._replace(to=by_block), (fold,))
