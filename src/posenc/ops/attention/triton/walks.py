"""What plans of all kinds of bias share: the call as kernels read it, and launches of walks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from posenc.ops.attention.triton import backward, forward, parts
from posenc.ops.plan import Constant, Operand, Plan, Target, cdiv, power_of_two, strides

LOG2E = math.log2(math.e)
NORMS, RANGE = parts.NORMS.value, parts.RANGE.value
# Fewer keys than this are not pruned: the bounds would cost more than the keys.
PRUNE_FROM = 1025
OPTIONS: dict[str, Any] = {"debug": False, "enable_fp_fusion": True}
# Key indices of first queries, which may be before the keys, or after them.
STARTS = -(2**30), 2**30
NOTHING = Constant(None)

# Queries, keys, warps and stages.
Tile = tuple[int, int, int, int]


class Tiles(NamedTuple):
    """The tiles of the walks."""

    forward: Tile
    to_queries: Tile
    to_keys: Tile
    to_bias: Tile


# For numbers of distances, measured on an H200: of halves in heads up to 64, up to 128 and wider,
# then of float32 in heads up to 128 and wider.
TILES = (
    Tiles((64, 128, 4, 2), (64, 128, 4, 2), (64, 64, 4, 1), (64, 64, 8, 3)),
    Tiles((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3), (64, 64, 8, 3)),
    Tiles((128, 32, 8, 2), (64, 32, 8, 1), (32, 64, 8, 1), (32, 32, 4, 1)),
    Tiles((64, 32, 4, 2), (64, 32, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1)),
    Tiles((64, 16, 4, 2), (32, 16, 4, 1), (16, 32, 4, 1), (32, 32, 4, 1)),
)


class Walks(NamedTuple):
    """The tensors of a call, what its queries see, and the plan."""

    plan: Plan
    target: Target
    q: Operand
    k: Operand
    v: Operand
    call: Any
    sees: parts.Sees
    is_backward: bool

    @property
    def is_exact(self) -> bool:
        """Whether the scores are float32: the rounding of what is left out of them would show."""
        return self.q.dtype == torch.float32

    @property
    def precision(self) -> str:
        """That of products."""
        return "tf32x3" if self.is_exact else "tf32"

    @property
    def few_keys(self) -> int:
        """Keys of a tile of few queries."""
        return 32 if self.is_exact else 64

    @property
    def is_short(self) -> bool:
        """Whether so few queries share a head of keys that the keys are split over programs.

        Up to 16 queries are the smallest block of that kernel, which also converts no numbers.
        """
        rows, keys = self.q.shape[1] // self.k.shape[1] * self.q.shape[2], self.k.shape[2]
        return rows <= 16 or (rows <= 64 and keys >= 256)

    @property
    def prunes(self) -> bool:
        """Whether far keys are left out."""
        return self.call.prunes and self.k.shape[2] >= PRUNE_FROM and not self.is_short

    @property
    def width(self) -> int:
        """The widest head."""
        return max(self.q.shape[3], self.v.shape[3])

    @property
    def sequences(self) -> int:
        """Sequences times heads."""
        return self.q.shape[0] * self.q.shape[1]

    def number_tiles(self) -> Tiles:
        """The tiles for a number for each distance."""
        if self.is_exact:
            return TILES[3 if self.width <= 128 else 4]
        return TILES[(self.width > 64) + (self.width > 128)]

    def blocks(self, tile: Tile) -> int:
        """Blocks of queries of a head."""
        return cdiv(self.q.shape[2], tile[0])

    def launch(self, kernel: Any, tile: Tile, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch a walk."""
        m, n, warps, stages = tile
        constants = {"M": m, "N": n, "PRECISION": self.precision}
        constants = {x: y for x, y in constants.items() if x in kernel.arg_names}
        options = {**OPTIONS, "num_warps": warps, "num_stages": stages}
        self.plan.launch(kernel, grid, arguments, constants, **options)


class Prepared(NamedTuple):
    """A bias as kernels get it, without places for its gradient, and the tiles of its walks."""

    bias: Any
    tiles: Tiles
    more: Any = None  # what only the kind knows of


class Gradient(NamedTuple):
    """A bias with places for its gradient, and what is launched after the walks to make it."""

    bias: Any
    folds: tuple[tuple[Any, ...], ...] = ()  # arguments of `Plan.launch`
    diagonals: int = 0  # those that `to_bias` walks along, from the distance `nearest` on
    nearest: int = 0
    parts: int = 1  # of each diagonal


class Above(NamedTuple):
    """What comes to a backward pass, without gaps, and its ``delta``."""

    g: Operand
    g_lse: Any
    out: Operand
    lse: Operand
    delta: Operand


def walks_of(args: Any, call: Any, plan: Plan, target: Target) -> Walks:
    """The walks of a call."""
    q, k, v = (plan.with_dense_rows(x) for x in (args.q, args.k, args.v))
    starts, first, last = (
        None if x is None else whole(plan, x) for x in (call.starts, call.first, call.last)
    )
    left, right = call.window or (NOTHING, NOTHING)
    padding = None if call.padding is None else whole(plan, call.padding)
    sees = parts.Sees(
        heads=Constant(q.shape[1]),
        group=Constant(q.shape[1] // k.shape[1]),
        queries=q.shape[2],
        keys=k.shape[2],
        start=call.start,
        starts=NOTHING if starts is None else starts,
        starts_b=0 if starts is None or len(starts) == 1 else 1,
        first=NOTHING if first is None else first,
        last=NOTHING if last is None else last,
        ends_b=0 if first is None or len(first) == 1 else first.stride(0),
        left=left,
        right=right,
        padding=NOTHING if padding is None else padding,
        padding_b=0 if padding is None or len(padding) == 1 else padding.stride(0),
        is_causal=Constant(call.causal),
        is_cut=Constant((first, call.window, padding) != (None, None, None)),
        # Without pruning, the ranges of keys need not be documents.
        is_narrow=Constant(first is not None and call.prune),
    )
    return Walks(plan, target, q, k, v, call, sees, "g" in args._fields)


def above_of(walks: Walks, args: Any) -> Above:
    """The gradients of the output and the log-sum-exp, and these."""
    plan = walks.plan
    out, lse = whole(plan, args.out), whole(plan, args.lse)
    g_lse = NOTHING if args.g_lse is None else whole(plan, args.g_lse)
    return Above(plan.with_dense_rows(args.g), g_lse, out, lse, plan.empty(lse.shape, lse.dtype))


def launch_forward(
    walks: Walks, prepared: Prepared, out: Operand, lse: Operand, ranges: Operand | None
) -> None:
    """Attention; far keys are left out if there is a place for the ranges of keys."""
    plan, q, k, v = walks.plan, walks.q, walks.k, walks.v
    prune = parts.Prune(NOTHING, NOTHING, 0.0)
    if ranges is not None:
        (batch, heads), keys = k.shape[:2], k.shape[2]
        norms = plan.empty((batch, heads, cdiv(keys, NORMS)), torch.float32)
        grid = batch * heads, norms.shape[2]
        arguments = rows_of(k), norms, keys
        plan.launch(forward.longest_keys, grid, arguments, {"KV_HEADS": heads}, **OPTIONS)
        spare = math.log2(8 * (1 if walks.call.causal else 2) / torch.finfo(q.dtype).eps)
        prune = parts.Prune(norms, ranges, spare)
    tile = prepared.tiles.forward
    grid = (walks.blocks(tile) * walks.sequences,)
    tensors = (*map(rows_of, (q, k, v, out)), lse)
    others = prepared.bias, walks.sees, prune, walks.call.scale * LOG2E
    walks.launch(forward.forward, tile, grid, *tensors, *others)


def launch_few(walks: Walks, bias: Any, out: Operand, lse: Operand) -> None:
    """Attention of few queries, by parts of the keys."""
    plan, q, k, v = walks.plan, walks.q, walks.k, walks.v
    (batch, heads, queries, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    rows = batch * heads * queries
    wanted = cdiv(2 * walks.target.processors, batch * kv_heads)
    count = max(1, min(wanted, 64, cdiv(keys, 128)))
    part_out, part_lse = out, lse
    if count > 1:
        part_out = plan.empty((count, rows, v.shape[3]), torch.float32)
        part_lse = plan.empty((count, rows), torch.float32)
    constants = {
        "M": max(16, power_of_two(heads // kv_heads * queries)),
        "N": walks.few_keys,
        "WHOLE": count == 1,
        "PRECISION": walks.precision,
    }
    tensors = (*map(rows_of, (q, k, v)), part_out, part_lse)
    arguments: Any = (*tensors, bias, walks.sees, walks.call.scale * LOG2E)
    options = {**OPTIONS, "num_warps": 4, "num_stages": 2}
    plan.launch(forward.split, (batch * kv_heads, count), arguments, constants, **options)
    if count > 1:
        sizes = {"PARTS": count, "BLOCK_S": power_of_two(count)}
        sizes |= {"WIDTH": v.shape[3], "BLOCK": block_of(v)}
        arguments = part_out, part_lse, out, lse, rows
        plan.launch(forward.combine, (rows,), arguments, sizes, **OPTIONS)


def launch_backward(
    walks: Walks, tiles: Tiles, above: Above, results: Any, gradient: Gradient, ranges: Any
) -> None:
    """The walks to queries, to keys, and to the bias."""
    q, k, v, sees, (dq, dk, dv) = walks.q, walks.k, walks.v, walks.sees, results
    scale, natural = walks.call.scale * LOG2E, walks.call.scale
    heads, kv_heads = q.shape[1], k.shape[1]
    g, lse, bias = above.g, above.lse, gradient.bias
    others = above.delta, bias, sees, ranges, scale, natural

    grid: tuple[int, ...] = (walks.blocks(tiles.to_queries) * walks.sequences,)
    tensors = (*map(rows_of, (q, k, v, g, above.out, dq)), lse, above.g_lse)
    walks.launch(backward.to_queries, tiles.to_queries, grid, *tensors, *others)

    grid = (cdiv(k.shape[2], tiles.to_keys[1]) * k.shape[0] * kv_heads,)
    tensors = (*map(rows_of, (q, k, v, g, dk, dv)), lse)
    walks.launch(backward.to_keys, tiles.to_keys, grid, *tensors, *others)

    if gradient.diagonals:
        grid = gradient.diagonals, heads, gradient.parts
        tensors = (*map(rows_of, (q, k, v, g)), lse, above.delta)
        numbers = scale, gradient.nearest, q.shape[0]
        walks.launch(backward.to_bias, tiles.to_bias, grid, *tensors, bias, sees, *numbers)
    for fold in gradient.folds:
        walks.plan.launch(*fold, **OPTIONS)


def hooks(**others: Any) -> parts.Hooks:
    """The hooks of a bias, and the defaults of all others, as parts of an aggregate."""
    return parts.Hooks(*map(Constant, parts.NO_HOOKS._replace(**others)))


def whole(plan: Plan, x: Operand) -> Operand:
    """The tensor, or a copy of it without gaps."""
    return x if x.is_contiguous() else plan.contiguous(x)


def block_of(x: Operand) -> int:
    """The power of two that holds the channels, and is large enough for a product of matrices."""
    return max(16, power_of_two(x.shape[3]))


def rows_of(x: Operand) -> parts.Rows:
    """A tensor as kernels read its rows."""
    b, h, t = strides(x)
    return parts.Rows(x, b, h, t, Constant(x.shape[3]), Constant(block_of(x)))
