"""One launch that rotates queries and keys: each element is read once and written once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from posenc.ops.plan import Constant, Operand, Plan, Target, cdiv, power_of_two
from posenc.ops.rotation.spec import Turn, heads_first
from posenc.ops.rotation.triton.pairs import (
    channels_of,
    heads_of,
    index,
    load_pairs,
    load_tables,
    others_of,
    rotated,
    rows_at,
    store_pairs,
    table_of,
    turn_in,
)

# A call of at most this many tokens takes no longer than its launch, so the launch overlaps
# the previous kernel (programmatic dependent launch).
SHORT = 1024


def plan_rotation(call: Any, plan: Plan, target: Target) -> None:
    """Rotate the tensors of a call into the results, or in place if there are none."""
    first = heads_first(call.xs[0], call.layout)
    turn = turn_in(plan, call, *first.shape[2:])
    apart = turn.spec.interleaved != turn.spec.interleaved_out
    xs, ys, copied = [], [], []
    for i, x in enumerate(call.xs):
        result = plan.results[i] if plan.results else x
        read = plan.with_dense_rows(x)
        # Between two layouts, a kernel in place would overwrite channels before it reads them.
        is_fit = result.has_dense_rows() and not (result is x and apart)
        written = read if result is x and not apart else result if is_fit else None
        if written is None:
            written = plan.empty(x.shape, x.dtype)
        if written is not result:
            copied.append((result, written))
        if x.numel():
            xs.append(heads_first(read, call.layout))
            ys.append(heads_first(written, call.layout))
    if len(xs) == 2 and xs[0].dtype == xs[1].dtype:
        _launch(plan, target, xs, ys, turn)
    else:
        for x, y in zip(xs, ys, strict=True):
            _launch(plan, target, [x], [y], turn)
    for result, written in copied:
        plan.copy(result, written)


def _launch(plan: Plan, target: Target, xs: list[Operand], ys: list[Operand], turn: Turn) -> None:
    q, k, q_out, k_out = xs[0], xs[-1], ys[0], ys[-1]
    cos, sin, rows, spec = turn
    batch, q_heads, length, _ = q.shape
    k_heads = k.shape[1] if len(xs) == 2 else 0
    rounded = cos.dtype == torch.float32
    heads, tokens, warps, split = tile(q, k_heads, cos.shape[-1], spec.interleaved, rounded)
    short, early = batch * length <= SHORT, overlaps_the_launch(q, target)
    blocks = cdiv(q_heads, heads) + cdiv(k_heads, heads)
    table, channels = table_of(cos, sin, rows, spec.transposed), channels_of(q, cos, spec)
    if q.place == q_out.place:
        channels = channels._replace(rest=Constant(0))
    places = () if rows.positions is None else (rows.positions,)
    inputs, results = (heads_of(q), heads_of(k)), (heads_of(q_out), heads_of(k_out))
    none = {"heads": Constant(0)} if len(xs) == 1 else {}
    arguments = (
        inputs[0], results[0], inputs[1]._replace(**none), results[1]._replace(**none),
        table, channels, batch, length,
    )  # fmt: skip
    constants = {
        "INDEX": index(*xs, *ys, cos, *places),
        "BATCH_FIRST": batch > 4,
        "SPLIT": split,
        "EARLY": early,
        "LATE": short,
        "BLOCK_H": heads,
        "BLOCK_T": tokens,
    }
    grid = cdiv(length, tokens) * batch, blocks if split else min(blocks, 1)
    options = {"launch_pdl": True} if early else {}
    plan.launch(_rotate, grid, arguments, constants, num_warps=warps, **options)


def overlaps_the_launch(q: Operand, target: Target) -> bool:
    """Whether the launch overlaps the previous kernel: for short calls, on Hopper or later."""
    return q.shape[0] * q.shape[2] <= SHORT and target.has(9)


def tile(
    q: Operand, k_heads: int, pairs: int, interleaved: bool, rounded: bool
) -> tuple[int, int, int, bool]:
    """Heads and tokens of one step, warps, and whether head blocks get programs of their own.

    Measured on an H200; benchmarks/README.md says how.
    """
    batch, q_heads, length, _ = q.shape
    width = power_of_two(pairs)
    all_heads = power_of_two(max(q_heads, k_heads))
    if length > 1 and (q_heads == 1 or q.stride(1) > q.stride(2)):
        # The tokens of a head are neighbours in memory: one step takes many tokens, and few heads.
        tokens = min(power_of_two(length), 16, max(1, 1024 // width))
        return max(1, 512 // width // tokens), tokens, 4, True
    heads = min(all_heads, max(1, 512 // width))
    if batch * length <= 256:
        return heads, 1, 4 if rounded else 8, True
    if batch * length <= SHORT:
        if rounded and batch * length > 512:
            return min(all_heads, 4 * heads), 1, 4, True
        many = rounded or (not interleaved and q.element_size() == 2)
        return min(all_heads, 2 * heads), 1, 8 if many else 4, True
    if batch * length < 16384:
        # In a short call, loads in flight at once gain more than heads that share tables.
        return heads, 1, 2 if rounded and not interleaved else 4, True
    return (heads, 1, 2, True) if width <= 32 else (heads, 1, 4, False)


@triton.jit
def _heads_of_block(x, block, b, BLOCK_H: tl.constexpr):
    """The heads of a block, and which of them there are."""
    h = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(b.dtype)
    return h, (h < x.heads)[None, :, None]


@triton.jit
def _load_block(x, channels, block, b, t, alive, pair, BLOCK_H: tl.constexpr):
    """The pairs of one block of heads."""
    h, there = _heads_of_block(x, block, b, BLOCK_H)
    present = alive[:, None, None] & there
    return load_pairs(rows_at(x, b, t, h), present, pair, channels, channels.is_interleaved)


@triton.jit
def _store_block(p, q, c, s, x, y, channels, block, b, t, alive, pair, BLOCK_H: tl.constexpr):
    """Rotate the pairs, store them, and copy the other channels."""
    h, there = _heads_of_block(x, block, b, BLOCK_H)
    present = alive[:, None, None] & there
    to = rows_at(y, b, t, h)
    p, q = rotated(p, q, c, s)
    store_pairs(to, present, pair, p, q, channels, channels.is_interleaved_out)
    if channels.rest > 0:
        other = others_of(channels)
        inside = tl.arange(0, channels.block_rest)[None, None, :] < channels.rest
        rest = tl.load(rows_at(x, b, t, h) + other, mask=present & inside)
        tl.store(to + other, rest, mask=present & inside)


@triton.jit
def _rotate_block(
    x, y, table, channels, block, b, t, alive, pair, LATE: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Rotate one block of heads, whose loads are issued before those of the tables."""
    p, q = _load_block(x, channels, block, b, t, alive, pair, BLOCK_H)
    narrow = pair < channels.pairs
    c, s, inside = load_tables(table, b, t, alive, pair, narrow, channels.wide, LATE)
    _store_block(p, q, c, s, x, y, channels, block, b, t, alive, pair, BLOCK_H)
    if LATE:
        tl.device_assert(inside, "position outside the table")


@triton.jit
def _rotate_heads(x, y, c, s, channels, b, t, alive, pair, BLOCK_H: tl.constexpr):
    """Rotate all heads of a token, which share its table row."""
    for block in tl.static_range((x.heads + BLOCK_H - 1) // BLOCK_H):
        p, q = _load_block(x, channels, block, b, t, alive, pair, BLOCK_H)
        _store_block(p, q, c, s, x, y, channels, block, b, t, alive, pair, BLOCK_H)


@triton.jit
def _rotate(
    q, q_out, k, k_out, table, channels, batch, length,
    INDEX: tl.constexpr, BATCH_FIRST: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
    LATE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    if EARLY:
        # This kernel may start while the previous one runs: wait for that one's writes, and then
        # let the next kernel start.
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    if BATCH_FIRST:
        # Programs follow the order of memory.
        steps = tl.cdiv(length, BLOCK_T)
        b, step = program // steps, program % steps
    else:
        # There are few sequences: programs that run together share table rows.
        b, step = program % batch, program // batch
    b = b.to(INDEX)
    t = step.to(INDEX) * BLOCK_T + tl.arange(0, BLOCK_T)
    alive = t < length
    pair = tl.arange(0, channels.block)[None, None, :]
    if SPLIT:
        block = tl.program_id(1)
        q_blocks: tl.constexpr = (q.heads + BLOCK_H - 1) // BLOCK_H
        if block < q_blocks:
            _rotate_block(q, q_out, table, channels, block, b, t, alive, pair, LATE, BLOCK_H)
        else:
            block -= q_blocks
            _rotate_block(k, k_out, table, channels, block, b, t, alive, pair, LATE, BLOCK_H)
    else:
        narrow = pair < channels.pairs
        c, s, _ = load_tables(table, b, t, alive, pair, narrow, channels.wide)
        _rotate_heads(q, q_out, c, s, channels, b, t, alive, pair, BLOCK_H)
        _rotate_heads(k, k_out, c, s, channels, b, t, alive, pair, BLOCK_H)
