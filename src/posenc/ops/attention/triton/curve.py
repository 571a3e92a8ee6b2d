"""A network of one hidden layer with ReLU, of one number, as the curve that it is (FIRE).

The curve is piecewise linear for each head, a function of ``x = ln(c |i - j| + 1) / ln(c max(L, i)
+ 1)``, where ``i`` counts from the beginning of the query's document. `lines_of` computes it from
the network, and `logs_of` the logarithms of all distances. Of the knots, which all heads share, a
tile computes with those that are among its ``x``. `to_network` takes the gradients back.

A network is a row of numbers: c and L, of which the absolute values count; the hidden units at 0,
and at 1, before ReLU; and the output of each head with no unit, and with each unit at 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from posenc.ops.attention.triton.parts import LOG2E
from posenc.ops.plan import Operand, Plan, cdiv, power_of_two

# A curve as the kernels read it: c and L, then slope and height at x = 0 of the line of each
# segment, the knots, and the slope's change at each of them; slopes and heights in units of log2.
LINES = tl.constexpr(2)
# The ratio of logarithms has a limit where c or L is zero, but no value.
SMALLEST = tl.constexpr(1e-15)


@triton.jit
def log1p(y):
    """The logarithm of one more than ``y``, which is not negative, for small ``y`` too."""
    more = 1.0 + y
    rounded = tl.where(more == 1.0, 1.0, more - 1.0)
    return tl.where(more == 1.0, y, tl.log(more) * (y / rounded))


@triton.jit
def load_scale(network, n):
    """c or L."""
    return tl.maximum(tl.abs(tl.load(network + n).to(tl.float32)), SMALLEST)


@triton.jit
def load_network(network, UNITS: tl.constexpr, BLOCK_U: tl.constexpr):
    """Of each hidden unit: height at 0, slope, whether it rises from there on or is above zero,
    whether it crosses zero later, its knot, and the knot's rank."""
    unit = tl.arange(0, BLOCK_U)
    inside = unit < UNITS
    height = tl.load(network + 2 + unit, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(network + 2 + UNITS + unit, mask=inside, other=0.0).to(tl.float32) - height
    rises = (height > 0) | ((height == 0) & (slope > 0))
    crosses = height * slope < 0
    slope_there = tl.where(crosses, slope, 1.0)
    knot = tl.where(crosses, -height / slope_there, float("inf"))
    same = (knot[None, :] == knot[:, None]) & (unit[None, :] < unit[:, None])
    rank = tl.sum(((knot[None, :] < knot[:, None]) | same).to(tl.int32), 1)
    return height, slope, rises, crosses, knot, rank


@triton.jit
def load_outputs(network, h, HEADS: tl.constexpr, UNITS: tl.constexpr, BLOCK_U: tl.constexpr):
    """A head's output of no unit, and what each unit adds to it."""
    unit = tl.arange(0, BLOCK_U)
    outputs = network + 2 + 2 * UNITS + h
    base = tl.load(outputs).to(tl.float32)
    of_units = tl.load(outputs + (1 + unit) * HEADS, mask=unit < UNITS, other=0.0).to(tl.float32)
    return base, tl.where(unit < UNITS, of_units - base, 0.0)


@triton.jit
def lines_of(network, to, HEADS: tl.constexpr, UNITS: tl.constexpr, BLOCK_U: tl.constexpr):
    """The curve of a head."""
    h = tl.program_id(0)
    unit = tl.arange(0, BLOCK_U)
    height, slope, rises, crosses, knot, rank = load_network(network, UNITS, BLOCK_U)
    base, of_units = load_outputs(network, h, HEADS, UNITS, BLOCK_U)
    change = tl.where(crosses, of_units * tl.abs(slope), 0.0)
    moved = change * tl.where(crosses, knot, 0.0)
    first_slope = tl.sum(tl.where(rises, slope, 0.0) * of_units)
    first_height = tl.sum(tl.maximum(height, 0.0) * of_units) + base
    segment = tl.arange(0, 2 * BLOCK_U)
    before = rank[:, None] < segment[None, :]
    slopes = first_slope + tl.sum(tl.where(before, change[:, None], 0.0), 0)
    heights = first_height - tl.sum(tl.where(before, moved[:, None], 0.0), 0)
    to += h * (4 + 4 * UNITS)
    tl.store(to, load_scale(network, 0))
    tl.store(to + 1, load_scale(network, 1))
    lines = to + LINES + 2 * segment
    tl.store(lines, slopes * LOG2E, mask=segment <= UNITS)
    tl.store(lines + 1, heights * LOG2E, mask=segment <= UNITS)
    knots = to + LINES + 2 * (UNITS + 1) + rank
    tl.store(knots, knot, mask=unit < UNITS)
    tl.store(knots + UNITS, change * LOG2E, mask=unit < UNITS)


@triton.jit
def logs_of(network, to, reach, BLOCK: tl.constexpr):
    """The logarithms of distances, and their derivatives by c."""
    far = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scaled = far.to(tl.float32) * load_scale(network, 0)
    tl.store(to + far, log1p(scaled), mask=far < reach)
    tl.store(to + reach + far, far.to(tl.float32) / (scaled + 1.0), mask=far < reach)


@triton.jit
def to_network(
    network, sums, to, batch, blocks,
    HEADS: tl.constexpr, UNITS: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a network, from the sums of blocks, ``[B H, blocks, 3, BLOCK_U]``."""
    unit = tl.arange(0, BLOCK_U)
    inside = unit < UNITS
    height, slope, rises, crosses, knot, rank = load_network(network, UNITS, BLOCK_U)
    slope_there = tl.where(crosses, slope, 1.0)
    knot = tl.where(crosses, knot, 0.0)
    to_height = tl.zeros((BLOCK_U,), tl.float32)
    to_slope = tl.zeros((BLOCK_U,), tl.float32)
    scales = tl.zeros((BLOCK_U,), tl.float32)
    for h in range(HEADS):
        above = tl.zeros((BLOCK_U,), tl.float32)
        above_x = tl.zeros((BLOCK_U,), tl.float32)
        others = tl.zeros((BLOCK_U,), tl.float32)
        for b in range(batch):
            for first in range(0, blocks, BLOCK):
                block = first + tl.arange(0, BLOCK)
                at = sums + ((b * HEADS + h) * blocks + block[:, None]) * 3 * BLOCK_U
                present = (block < blocks)[:, None] & (unit >= 0)[None, :]
                above += tl.sum(tl.load(at + rank[None, :], mask=present, other=0.0), 0)
                at += BLOCK_U
                above_x += tl.sum(tl.load(at + rank[None, :], mask=present, other=0.0), 0)
                at += BLOCK_U
                others += tl.sum(tl.load(at + unit[None, :], mask=present, other=0.0), 0)
        by_x = tl.sum(tl.where(unit == 0, others, 0.0))
        total = tl.sum(tl.where(unit == 1, others, 0.0))
        scales += others
        _, of_units = load_outputs(network, h, HEADS, UNITS, BLOCK_U)
        to_change = tl.where(crosses, above_x - knot * above, 0.0)
        to_knot = tl.where(crosses, -of_units * tl.abs(slope) * above, 0.0)
        to_units = tl.where(rises, slope, 0.0) * by_x + tl.maximum(height, 0.0) * total
        to_units = tl.where(inside, to_units + tl.abs(slope) * to_change, 0.0)
        to_slope += tl.where(rises, by_x * of_units, 0.0) - to_knot * knot / slope_there
        to_slope += tl.where(slope < 0, -to_change, to_change) * of_units
        to_height += tl.where(height > 0, total * of_units, 0.0) - to_knot / slope_there
        outputs = to + 2 + 2 * UNITS + h
        tl.store(outputs, total - tl.sum(to_units))
        tl.store(outputs + (1 + unit) * HEADS, to_units, mask=inside)
    is_scale = (unit == 2) | (unit == 3)
    given = tl.load(network + unit - 2, mask=is_scale, other=0.0).to(tl.float32)
    scales = tl.where(tl.abs(given) < SMALLEST, 0.0, tl.where(given < 0, -scales, scales))
    tl.store(to + unit - 2, scales, mask=is_scale)
    tl.store(to + 2 + unit, to_height - to_slope, mask=inside)
    tl.store(to + 2 + UNITS + unit, to_slope, mask=inside)


class Curve:
    """The curve of a network: its lines, ``[H, n]``, and the logarithms of ``reach`` distances."""

    def __init__(self, network: Operand, heads: int, reach: int, plan: Plan) -> None:
        self.network = network if network.is_contiguous() else plan.contiguous(network)
        self.plan, self.units = plan, (network.shape[0] - 2 - heads) // (2 + heads)
        self.block = max(power_of_two(self.units), 16)
        self.lines = plan.empty((heads, 4 + 4 * self.units), torch.float32)
        self.logs = plan.empty((2, reach), torch.float32)
        self.sizes = {"HEADS": heads, "UNITS": self.units, "BLOCK_U": self.block}
        plan.launch(lines_of, (heads,), (self.network, self.lines), self.sizes)
        arguments = self.network, self.logs, reach
        grid = (cdiv(reach, 1024),)
        plan.launch(logs_of, grid, arguments, {"BLOCK": 1024})
