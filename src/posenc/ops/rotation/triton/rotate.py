"""One launch that rotates queries and keys: each element is read once and written once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from posenc.ops.plan import START, Operand, Plan, Target, strides
from posenc.ops.rotation.spec import Turn, heads_first
from posenc.ops.rotation.triton.pairs import (
    index,
    load_pairs,
    load_tables,
    rotated,
    shared_constants,
    store_pairs,
    table_numbers,
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
    blocks = triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)
    positions: Any = q if rows.positions is None else rows.positions
    arguments = (
        q, k, q_out, k_out, cos, sin, positions, START,
        *strides(q, k, q_out, k_out), *table_numbers(cos, rows), batch, length,
    )  # fmt: skip
    constants = {
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        **shared_constants(q, cos, rows, spec),
        "INDEX": index(*xs, *ys, cos, positions),
        "BATCH_FIRST": batch > 4,
        "SPLIT": split,
        "EARLY": early,
        "LATE": short,
        "BLOCK_H": heads,
        "BLOCK_T": tokens,
    }
    if q.place == q_out.place:
        constants["REST"] = 0
    grid = triton.cdiv(length, tokens) * batch, blocks if split else min(blocks, 1)
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
    width = int(triton.next_power_of_2(pairs))
    all_heads = int(triton.next_power_of_2(max(q_heads, k_heads)))
    if length > 1 and (q_heads == 1 or q.stride(1) > q.stride(2)):
        # The tokens of a head are neighbours in memory: one step takes many tokens, and few heads.
        tokens = min(int(triton.next_power_of_2(length)), 16, max(1, 1024 // width))
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
def _load_block(
    x, block, b, t, alive, pair,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr, IN: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The pairs of one block of heads; ``x`` is a pointer and its strides."""
    source, x_b, x_h, x_t = x
    h = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(b.dtype)
    present = alive[:, None, None] & (h < HEADS)[None, :, None]
    x_at = (b * x_b + t[:, None] * x_t + h[None, :] * x_h)[:, :, None]
    return load_pairs(source + x_at, present, pair, FIRST, PAIRS, IN, WIDE)


@triton.jit
def _store_block(
    p, q, c, s, x, y, block, b, t, alive, pair,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs, store them, and copy the other channels."""
    source, x_b, x_h, x_t = x
    target, y_b, y_h, y_t = y
    h = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(b.dtype)
    present = alive[:, None, None] & (h < HEADS)[None, :, None]
    y_at = (b * y_b + t[:, None] * y_t + h[None, :] * y_h)[:, :, None]
    p, q = rotated(p, q, c, s)
    store_pairs(target + y_at, present, pair, p, q, FIRST, PAIRS, OUT)
    if REST > 0:
        # The channels that are not rotated are all after the pairs, or all before them.
        other = (2 * PAIRS if FIRST == 0 else 0) + tl.arange(0, BLOCK_REST)[None, None, :]
        keep = present & (tl.arange(0, BLOCK_REST)[None, None, :] < REST)
        x_at = (b * x_b + t[:, None] * x_t + h[None, :] * x_h)[:, :, None]
        rest = tl.load(source + x_at + other, mask=keep)
        tl.store(target + y_at + other, rest, mask=keep)


@triton.jit
def _rotate_block(
    x, y, block, table, b, t, alive, pair,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    COLUMN: tl.constexpr, HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr, LATE: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Rotate one block of heads, whose loads are issued before those of the tables."""
    p, q = _load_block(x, block, b, t, alive, pair, HEADS, PAIRS, FIRST, IN, WIDE, BLOCK_H)
    c, s, inside = load_tables(
        table, b, t, alive, pair, pair < PAIRS, COLUMN, HAS_POSITIONS, ADVANCES, TRANSPOSED, WIDE,
        LATE,
    )  # fmt: skip
    _store_block(
        p, q, c, s, x, y, block, b, t, alive, pair,
        HEADS, PAIRS, FIRST, REST, IN, OUT, BLOCK_REST, BLOCK_H,
    )  # fmt: skip
    if LATE:
        tl.device_assert(inside, "position outside the table")


@triton.jit
def _rotate_heads(
    x, y, c, s, b, t, alive, pair,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of a token, which share its table row."""
    for block in tl.static_range((HEADS + BLOCK_H - 1) // BLOCK_H):
        p, q = _load_block(x, block, b, t, alive, pair, HEADS, PAIRS, FIRST, IN, WIDE, BLOCK_H)
        _store_block(
            p, q, c, s, x, y, block, b, t, alive, pair,
            HEADS, PAIRS, FIRST, REST, IN, OUT, BLOCK_REST, BLOCK_H,
        )  # fmt: skip


@triton.jit
def _rotate(
    q, k, q_out, k_out, cos, sin, positions, start,
    q_b, q_h, q_t, k_b, k_h, k_t, qo_b, qo_h, qo_t, ko_b, ko_h, ko_t,
    rows, table_b, table_t, positions_b, positions_t, batch, length,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    COLUMN: tl.constexpr, HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, TRANSPOSED: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, INDEX: tl.constexpr,
    BATCH_FIRST: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr, LATE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
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
    pair = tl.arange(0, BLOCK_P)[None, None, :]
    table = cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start
    q_in, q_to = (q, q_b, q_h, q_t), (q_out, qo_b, qo_h, qo_t)
    k_in, k_to = (k, k_b, k_h, k_t), (k_out, ko_b, ko_h, ko_t)
    if SPLIT:
        block = tl.program_id(1)
        q_blocks: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
        if block < q_blocks:
            _rotate_block(
                q_in, q_to, block, table, b, t, alive, pair, Q_HEADS, PAIRS, FIRST, REST,
                COLUMN, HAS_POSITIONS, ADVANCES, IN, OUT, TRANSPOSED, WIDE, LATE,
                BLOCK_REST, BLOCK_H,
            )  # fmt: skip
        else:
            _rotate_block(
                k_in, k_to, block - q_blocks, table, b, t, alive, pair, K_HEADS, PAIRS, FIRST, REST,
                COLUMN, HAS_POSITIONS, ADVANCES, IN, OUT, TRANSPOSED, WIDE, LATE,
                BLOCK_REST, BLOCK_H,
            )  # fmt: skip
    else:
        c, s, _ = load_tables(
            table, b, t, alive, pair, pair < PAIRS, COLUMN, HAS_POSITIONS, ADVANCES, TRANSPOSED,
            WIDE,
        )  # fmt: skip
        _rotate_heads(
            q_in, q_to, c, s, b, t, alive, pair,
            Q_HEADS, PAIRS, FIRST, REST, IN, OUT, WIDE, BLOCK_REST, BLOCK_H,
        )  # fmt: skip
        _rotate_heads(
            k_in, k_to, c, s, b, t, alive, pair,
            K_HEADS, PAIRS, FIRST, REST, IN, OUT, WIDE, BLOCK_REST, BLOCK_H,
        )  # fmt: skip
