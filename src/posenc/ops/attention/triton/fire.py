"""FIRE: a network of one hidden layer with ReLU, as the curve that it is; see `curve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from posenc.ops.attention.triton.curve import LINES, Curve, log1p, to_network
from posenc.ops.attention.triton.parts import LN2, QUERIES, number_of
from posenc.ops.attention.triton.walks import (
    NOTHING,
    Above,
    Gradient,
    Prepared,
    Tiles,
    Walks,
    hooks,
)
from posenc.ops.plan import Constant, Operand


class Fire(NamedTuple):
    """The curve of each head, ``(H, n)``, and the logarithms of ``reach`` distances."""

    hooks: Any
    lines: Any
    lines_h: Any
    logs: Any
    reach: Any
    units: Any
    block: Any  # the power of two that holds the units
    sums: Any  # for each block of queries, ``(B, H, blocks, 3, block)``, or None
    lse: Any
    g_lse: Any


class FireRows(NamedTuple):
    """The head's curve, and one over the logarithms that queries divide by."""

    curve: Any
    rates: Any


class FireSums(NamedTuple):
    """Sums over keys: `by_log` of ``ds`` times the slope times the logarithm, `by_c` times its
    derivative by c; `by_x` of ``ds`` times x; and for each knot of ``ds``, and times x, above it.
    """

    by_log: Any
    by_c: Any
    by_x: Any
    above: Any
    above_x: Any


class FireTile(NamedTuple):
    """The distances of a tile, their logarithms, ``x``, and the knots among these."""

    far: Any
    logs: Any
    x: Any
    begin: Any
    end: Any


@triton.jit
def head_curve(bias, b, h):
    return FireRows(bias.lines + h * bias.lines_h, h)


@triton.jit
def positions_of(sees, b, i):
    """The positions of queries in their documents."""
    position = i
    if sees.first is not None:
        at = b * sees.ends_b + tl.minimum(tl.maximum(i, 0), sees.keys - 1)
        position = i - tl.load(sees.first + at).to(tl.int32)
    return position.to(tl.float32)


@triton.jit
def fire_rows(bias, head, sees, block, q):
    position = positions_of(sees, block.b, block.i)
    longest = tl.maximum(position, tl.load(head.curve + 1))
    return FireRows(head.curve, 1.0 / log1p(longest * tl.load(head.curve)))


@triton.jit
def fire_tile(bias, rows, tile):
    M: tl.constexpr = tile.i.shape[0]
    N: tl.constexpr = tile.j.shape[0]
    distance = tile.i0 - tile.j0
    row = distance + tl.arange(0, M)
    far = tl.minimum(tl.abs(row[:, None] - tl.arange(0, N)[None, :]), bias.reach - 1)
    logs = tl.load(bias.logs + far)
    low = distance - (N - 1)
    high = distance + M - 1
    nearest = tl.minimum(tl.maximum(tl.maximum(low, -high), 0), bias.reach - 1)
    furthest = tl.minimum(tl.maximum(high, -low), bias.reach - 1)
    least = tl.load(bias.logs + nearest) * tl.min(rows.rates) * 0.999999
    most = tl.load(bias.logs + furthest) * tl.max(rows.rates) * 1.000001
    unit = tl.arange(0, bias.block)
    at = rows.curve + LINES + 2 * (bias.units + 1) + unit
    knots = tl.load(at, mask=unit < bias.units, other=float("inf"))
    begin = tl.sum((knots <= least).to(tl.int32))
    end = tl.sum((knots < most).to(tl.int32))
    return FireTile(far, logs, logs * rows.rates[:, None], begin, end)


@triton.jit
def add_curve(
    scores, state, rows, columns, bias, tile, scale, PLACE: tl.constexpr, WALK: tl.constexpr
):
    part = fire_tile(bias, rows, tile)
    line = rows.curve + LINES + 2 * part.begin
    # Apart from the scores, whose layout would be converted for each knot.
    curve = part.x * tl.load(line) + tl.load(line + 1)
    knots = rows.curve + LINES + 2 * (bias.units + 1)
    for n in tl.range(part.begin, part.end):
        change = tl.load(knots + bias.units + n)
        curve += tl.maximum(part.x - tl.load(knots + n), 0.0) * change
    return scores * scale + curve, state, ()


@triton.jit
def open_curve(bias, M: tl.constexpr, N: tl.constexpr, WALK: tl.constexpr):
    state = ()
    if bias.sums is not None and WALK == QUERIES:
        rows = tl.zeros((M,), tl.float32)
        knots = tl.zeros((bias.block,), tl.float32)
        state = FireSums(rows, rows, tl.zeros((), tl.float32), knots, knots)
    return state


@triton.jit
def collect_curve(
    state, ds, dx, rows, columns, bias, tile, PLACE: tl.constexpr, WALK: tl.constexpr
):
    if bias.sums is not None and WALK == QUERIES:
        part = fire_tile(bias, rows, tile)
        unit = tl.arange(0, bias.block)
        slope = part.x * 0.0 + tl.load(rows.curve + LINES + 2 * part.begin)
        ds_x = ds * part.x
        total_x = tl.sum(tl.sum(ds_x, 1))
        above = state.above + tl.where(unit < part.begin, tl.sum(tl.sum(ds, 1)), 0.0)
        above_x = state.above_x + tl.where(unit < part.begin, total_x, 0.0)
        knots = rows.curve + LINES + 2 * (bias.units + 1)
        for n in tl.range(part.begin, part.end):
            past = part.x > tl.load(knots + n)
            slope += tl.where(past, tl.load(knots + bias.units + n), 0.0)
            above += tl.where(unit == n, tl.sum(tl.sum(tl.where(past, ds, 0.0), 1)), 0.0)
            above_x += tl.where(unit == n, tl.sum(tl.sum(tl.where(past, ds_x, 0.0), 1)), 0.0)
        slope *= ds * LN2
        by_log = state.by_log + tl.sum(slope * part.logs, 1)
        by_c = state.by_c + tl.sum(slope * tl.load(bias.logs + bias.reach + part.far), 1)
        state = FireSums(by_log, by_c, state.by_x + total_x, above, above_x)
    return state, dx


@triton.jit
def close_curve(state, dx, own, bias, sees, at, WALK: tl.constexpr):
    """Write what `to_network` needs of a block of queries."""
    if bias.sums is not None and WALK == QUERIES:
        total = 0.0
        if bias.g_lse is not None:
            of_head = (at.b * sees.heads + at.h) * sees.queries + at.rows
            lse = tl.load(bias.lse + of_head, mask=at.present, other=float("-inf"))
            seen = at.present & (lse > float("-inf"))
            total = tl.sum(tl.load(bias.g_lse + of_head, mask=seen, other=0.0))
        position = positions_of(sees, at.b, at.i)
        c = tl.load(own.curve)
        least = tl.load(own.curve + 1)
        longest = tl.maximum(position, least)
        # x is a quotient of logarithms, of the distance and of the longest.
        of_longest = -state.by_log * own.rates * own.rates / (1.0 + c * longest)
        to_c = tl.sum(state.by_c * own.rates + of_longest * longest)
        to_least = tl.sum(tl.where(position < least, of_longest * c, 0.0))
        to = bias.sums + number_of(at, sees).to(tl.int64) * 3 * bias.block
        unit = tl.arange(0, bias.block)
        tl.store(to + unit, state.above)
        tl.store(to + bias.block + unit, state.above_x)
        others = tl.where(unit == 0, state.by_x, tl.where(unit == 1, total, 0.0))
        others = tl.where(unit == 2, to_c, tl.where(unit == 3, to_least, others))
        tl.store(to + 2 * bias.block + unit, others)
    return state, dx


@triton.jit
def few_curves(bias, sees, b, h, i):
    curve = bias.lines + h * bias.lines_h
    longest = tl.maximum(positions_of(sees, b, i), tl.load(curve + 1))
    return FireRows(curve, 1.0 / log1p(longest * tl.load(curve)))


@triton.jit
def add_few_curves(products, rows, bias, sees, b, h, i, j, k, seen, scale):
    """The line of the first segment, and the change of slope at each knot."""
    far = tl.minimum(tl.abs(i[:, None] - j[None, :]), bias.reach - 1)
    x = tl.load(bias.logs + far) * rows.rates[:, None]
    line = rows.curve + LINES
    scores = products * scale + x * tl.load(line)[:, None] + tl.load(line + 1)[:, None]
    knots = rows.curve + LINES + 2 * (bias.units + 1)
    for n in tl.range(0, bias.units):
        change = tl.load(knots + bias.units + n)
        # A unit that crosses zero nowhere has its knot at infinity.
        past = tl.maximum(x - tl.load(knots + n)[:, None], 0.0)
        scores += tl.where(past > 0.0, past * change[:, None], 0.0)
    return scores


HOOKS = hooks(
    masks_all=True,
    keys_first=False,
    head=head_curve,
    rows=fire_rows,
    add=add_curve,
    open=open_curve,
    collect=collect_curve,
    close=close_curve,
    few_rows=few_curves,
    few=add_few_curves,
)


# Queries and keys of a tile, warps and stages: of halves in heads up to 64, up to 128 and wider,
# then of float32 in the same heads.
TILES = (
    Tiles((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1)),
    Tiles((64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1)),
    Tiles((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    Tiles((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    Tiles((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    Tiles((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
)


def prepare(walks: Walks) -> Prepared:
    """The curve of a network."""
    reach = walks.q.shape[2] + walks.k.shape[2]
    found = Curve(walks.call.bias.network, walks.q.shape[1], reach, walks.plan)
    bias = Fire(
        hooks=HOOKS,
        lines=found.lines,
        lines_h=found.lines.stride(0),
        logs=found.logs,
        reach=reach,
        units=Constant(found.units),
        block=Constant(found.block),
        sums=NOTHING,
        lse=NOTHING,
        g_lse=NOTHING,
    )
    at = (walks.width > 64) + (walks.width > 128) + (3 if walks.is_exact else 0)
    return Prepared(bias, TILES[at], found)


prepare_few = prepare


def gradient_of(
    walks: Walks, prepared: Prepared, above: Above, results: Mapping[str, Operand]
) -> Gradient:
    """What the gradient of a network needs of each block of queries, and that gradient."""
    found, to, batch = prepared.more, results["network"], walks.q.shape[0]
    shape = walks.sequences, walks.blocks(prepared.tiles.to_queries), 3, found.block
    by_block = walks.plan.empty(shape, torch.float32)
    bias = prepared.bias._replace(sums=by_block, lse=above.lse, g_lse=above.g_lse)
    arguments = found.network, by_block, to, batch, shape[1]
    fold = to_network, (1,), arguments, {**found.sizes, "BLOCK": 32}
    return Gradient(bias, (fold,))
