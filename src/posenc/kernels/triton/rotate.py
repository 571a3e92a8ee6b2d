"""One launch that rotates queries and keys: each element is read once and written once."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from posenc.kernels.spec import Rows, Turn

# Out-of-range rows stop the kernel as torch's own indexing does; the overflow checks that Triton
# would add to every index along with it are not wanted.
ASSERTING: dict[str, Any] = {"debug": True, "sanitize_overflow": False}

# How the pairs of a row lie in memory. A packed pair is one word, so that loads stay wide.
HALVES, STRIDED, PACKED = 0, 1, 2


def rotate_into(
    xs: list[Tensor], ys: list[Tensor], cos: Tensor, sin: Tensor, rows: Rows, turn: Turn
) -> None:
    """Rotate each of ``xs`` into the tensor of ``ys`` beside it, which may be itself."""
    if len(xs) == 2 and xs[0].dtype != xs[1].dtype:
        for x, y in zip(xs, ys, strict=True):
            rotate_into([x], [y], cos, sin, rows, turn)
        return
    if all(x.numel() == 0 for x in xs):
        return
    if any(t.stride(-1) != 1 or t.is_neg() for t in (*xs, *ys)):
        fresh = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
        rotate_into([x.resolve_neg().contiguous() for x in xs], fresh, cos, sin, rows, turn)
        for y, made in zip(ys, fresh, strict=True):
            y.copy_(made)
        return
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    q, k, q_out, k_out = xs[0], xs[-1], ys[0], ys[-1]
    start, positions = rows
    ids = q if positions is None else positions
    # All that Triton specialises a kernel on, so that a known call goes straight to its launch.
    key = (
        len(xs), q is q_out, turn, q.dtype, q.device,
        q.shape, q.stride(), k.shape, k.stride(), q_out.stride(), k_out.stride(),
        cos.shape, cos.stride(), cos.dtype, positions is None, ids.shape, ids.stride(),
        *[t.data_ptr() % 16 for t in (q, k, q_out, k_out, cos, sin, ids)],
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= 4096:
            _PLANS.clear()
        plan = _PLANS[key] = _Plan(xs, ys, cos, rows, turn)
    if plan.grid[0] * plan.grid[1] == 0:
        return
    arguments = (
        q, k, q_out, k_out, *plan.strides, cos, sin, *plan.tables, ids, *plan.ids, start,
        *plan.sizes,
    )  # fmt: skip
    with on_device(q):
        if plan.compiled is None:
            plan.compiled = _rotate[plan.grid[:2]](*arguments, **plan.constants, **plan.options)
        else:
            plan.compiled[plan.grid](*arguments, *plan.constants.values())


class _Plan:
    """What a launch needs besides its pointers, worked out once for calls of one kind."""

    def __init__(
        self, xs: list[Tensor], ys: list[Tensor], cos: Tensor, rows: Rows, turn: Turn
    ) -> None:
        q, k, q_out, k_out = xs[0], xs[-1], ys[0], ys[-1]
        batch, q_heads, length, width = q.shape
        k_heads = k.shape[1] if len(xs) == 2 else 0
        pairs = cos.shape[-1]
        inner, outer = layout(turn.interleaved, turn, *xs), layout(turn.interleaved_out, turn, *ys)
        heads, tokens, warps, split = tile(batch, length, q_heads, k_heads, pairs, q)
        blocks = triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)
        self.compiled: Any = None
        self.grid = (triton.cdiv(length, tokens) * batch, blocks if split else min(blocks, 1), 1)
        self.strides = tuple(
            stride
            for t, how in ((q, inner), (k, inner), (q_out, outer), (k_out, outer))
            for stride in strides(t, how)
        )
        self.tables = table_sizes(cos)
        self.ids = row_strides(rows)
        self.sizes = (batch, length)
        self.options = {"num_warps": warps, **ASSERTING}
        self.constants = {
            "Q_HEADS": q_heads,
            "K_HEADS": k_heads,
            "PAIRS": pairs,
            "COLUMN": turn.column,
            "REST": 0 if q is q_out else width - 2 * pairs,
            "HAS_POSITIONS": rows.positions is not None,
            "ADVANCES": rows.advances(),
            "IN": inner,
            "OUT": outer,
            "TRANSPOSED": turn.transposed,
            "WIDE": wide(q),
            "BATCH_FIRST": batch > 4,
            "SPLIT": split,
            "BLOCK_P": triton.next_power_of_2(pairs),
            "BLOCK_REST": triton.next_power_of_2(max(width - 2 * pairs, 1)),
            "BLOCK_H": heads,
            "BLOCK_T": tokens,
        }


_PLANS: dict[Any, _Plan] = {}


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the device of ``x`` the current one, which is where Triton launches."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def tile(
    batch: int, length: int, q_heads: int, k_heads: int, pairs: int, q: Tensor
) -> tuple[int, int, int, bool]:
    """Heads and tokens of one step, warps, and whether head blocks get programs of their own.

    Measured on an H200; benchmarks/README.md says how.
    """
    width = int(triton.next_power_of_2(pairs))
    most = int(triton.next_power_of_2(max(q_heads, k_heads)))
    if length > 1 and q.stride(1) > q.stride(2):
        # Each head is a stretch of its own: take neighbouring tokens, and heads side by side.
        tokens = min(int(triton.next_power_of_2(length)), 16, max(1, 1024 // width))
        return max(1, 512 // width // tokens), tokens, 4, True
    if batch * length < 16384:
        # A short call needs all its loads under way at once more than it needs to share tables.
        return min(most, max(1, 512 // width)), 1, 4, True
    return min(most, 16, max(1, 1024 // width)), 1, 4, False


def layout(interleaved: bool, turn: Turn, *tensors: Tensor) -> int:
    """How the pairs of ``tensors`` lie: halves, or interleaved and, if aligned, packed in words."""
    if not interleaved:
        return HALVES
    aligned = turn.column % 2 == 0 and all(
        t.element_size() < 8
        and t.data_ptr() % (2 * t.element_size()) == 0
        and all(stride % 2 == 0 for stride in t.stride()[:3])
        for t in tensors
    )
    return PACKED if aligned else STRIDED


def strides(x: Tensor, how: int) -> tuple[int, ...]:
    """Batch, head and token strides, in words if pairs are packed."""
    unit = 2 if how == PACKED else 1
    return tuple(stride // unit for stride in x.stride()[:3])


def wide(x: Tensor) -> Any:
    """The dtype to compute in: one precision up."""
    return tl.float64 if x.dtype in (torch.float32, torch.float64) else tl.float32


def table_sizes(cos: Tensor) -> tuple[int, int, int]:
    """Rows of a table, its batch stride and its row stride."""
    return cos.shape[-2], cos.stride(0) if cos.dim() == 3 else 0, cos.stride(-2)


def row_strides(rows: Rows) -> tuple[int, int]:
    """Batch and token stride of the positions."""
    if rows.positions is None:
        return 0, 0
    (batch, token), (by_sequence, by_token) = rows.positions.shape, rows.positions.stride()
    return by_sequence if batch > 1 else 0, by_token if token > 1 else 0


@triton.jit
def as_words(x, LAYOUT: tl.constexpr):
    """A pointer to elements, or to the words that hold two of them."""
    if LAYOUT == 2:
        if x.dtype.element_ty.primitive_bitwidth == 16:
            x = x.to(tl.pointer_type(tl.int32), bitcast=True)
        else:
            x = x.to(tl.pointer_type(tl.int64), bitcast=True)
    return x


@triton.jit
def load_pairs(
    row, at, mask, COLUMN: tl.constexpr, PAIRS: tl.constexpr, LAYOUT: tl.constexpr,
    ELEMENT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Both channels of each pair; ``row`` is what :func:`as_words` gave, ``at`` counts pairs."""
    if LAYOUT == 0:
        a = tl.load(row + COLUMN + at, mask=mask, other=0)
        b = tl.load(row + COLUMN + PAIRS + at, mask=mask, other=0)
    elif LAYOUT == 1:
        a = tl.load(row + COLUMN + 2 * at, mask=mask, other=0)
        b = tl.load(row + COLUMN + 2 * at + 1, mask=mask, other=0)
    else:
        word = tl.load(row + COLUMN // 2 + at, mask=mask, other=0)
        if ELEMENT.primitive_bitwidth == 16:
            a = word.to(tl.int16).to(ELEMENT, bitcast=True)
            b = (word >> 16).to(tl.int16).to(ELEMENT, bitcast=True)
        else:
            a = word.to(tl.int32).to(ELEMENT, bitcast=True)
            b = (word >> 32).to(tl.int32).to(ELEMENT, bitcast=True)
    return a.to(WIDE), b.to(WIDE)


@triton.jit
def store_pairs(
    row, at, mask, a, b, COLUMN: tl.constexpr, PAIRS: tl.constexpr, LAYOUT: tl.constexpr,
    ELEMENT: tl.constexpr,
):  # fmt: skip
    """The counterpart of :func:`load_pairs`."""
    a, b = a.to(ELEMENT), b.to(ELEMENT)
    if LAYOUT == 0:
        tl.store(row + COLUMN + at, a, mask=mask)
        tl.store(row + COLUMN + PAIRS + at, b, mask=mask)
    elif LAYOUT == 1:
        tl.store(row + COLUMN + 2 * at, a, mask=mask)
        tl.store(row + COLUMN + 2 * at + 1, b, mask=mask)
    elif ELEMENT.primitive_bitwidth == 16:
        low = a.to(tl.uint16, bitcast=True).to(tl.uint32)
        high = b.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        tl.store(row + COLUMN // 2 + at, (low | high).to(tl.int32, bitcast=True), mask=mask)
    else:
        low = a.to(tl.uint32, bitcast=True).to(tl.uint64)
        high = b.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
        tl.store(row + COLUMN // 2 + at, (low | high).to(tl.int64, bitcast=True), mask=mask)


@triton.jit
def load_tables(
    cos, sin, rows, table_b, table_t,
    positions, positions_b, positions_t, start,
    b, t, alive, at, in_pairs,
    HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr, TRANSPOSED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Cosine and sine ``[T, 1, P]`` of tokens ``t`` of sequence ``b``."""
    row = tl.zeros_like(t) + start
    if HAS_POSITIONS:
        row += tl.load(positions + b * positions_b + t * positions_t, mask=alive, other=0)
    if ADVANCES:
        row += t
    tl.device_assert((row >= 0) & (row < rows) | (alive == 0), "position outside the table")
    where = b * table_b + row[:, None, None] * table_t + at
    mask = alive[:, None, None] & in_pairs
    c = tl.load(cos + where, mask=mask, other=0).to(WIDE)
    s = tl.load(sin + where, mask=mask, other=0).to(WIDE)
    if TRANSPOSED:
        s = -s
    return c, s


@triton.jit
def _take(
    source, x_b, x_h, x_t, block, b, t, alive, at,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, COLUMN: tl.constexpr, IN: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The pairs of one block of heads."""
    h = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    mask = alive[:, None, None] & (h < HEADS)[None, :, None] & (at < PAIRS)
    # int64 offsets: tensors pass 2^31 elements.
    where = as_words(source, IN) + (b * x_b + t[:, None] * x_t + h[None, :] * x_h)[:, :, None]
    return load_pairs(where, at, mask, COLUMN, PAIRS, IN, source.dtype.element_ty, WIDE)


@triton.jit
def _give(
    p, q, c, s, source, target, x_b, x_h, x_t, y_b, y_h, y_t, block, b, t, alive, at,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, COLUMN: tl.constexpr, REST: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Turn them, store them, and copy the channels beside them."""
    h = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    present = alive[:, None, None] & (h < HEADS)[None, :, None]
    y_at = (b * y_b + t[:, None] * y_t + h[None, :] * y_h)[:, :, None]
    element: tl.constexpr = source.dtype.element_ty
    where, mask = as_words(target, OUT) + y_at, present & (at < PAIRS)
    store_pairs(where, at, mask, p * c - q * s, p * s + q * c, COLUMN, PAIRS, OUT, element)
    if REST > 0:
        # The channels that are not rotated: all after the pairs, or all before.
        other = (2 * PAIRS if COLUMN == 0 else 0) + tl.arange(0, BLOCK_REST)[None, None, :]
        keep = present & (tl.arange(0, BLOCK_REST)[None, None, :] < REST)
        x_at = (b * x_b + t[:, None] * x_t + h[None, :] * x_h)[:, :, None]
        rest = tl.load(source + x_at * (2 if IN == 2 else 1) + other, mask=keep)
        tl.store(target + y_at * (2 if OUT == 2 else 1) + other, rest, mask=keep)


@triton.jit
def _one_block(
    source, target, x_b, x_h, x_t, y_b, y_h, y_t, block,
    cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start,
    b, t, alive, at,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, COLUMN: tl.constexpr, REST: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A block on its own: its loads are under way before those of the tables are waited for."""
    p, q = _take(
        source, x_b, x_h, x_t, block, b, t, alive, at,
        HEADS, PAIRS, COLUMN, IN, WIDE, BLOCK_H,
    )  # fmt: skip
    c, s = load_tables(
        cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start,
        b, t, alive, at, at < PAIRS, HAS_POSITIONS, ADVANCES, TRANSPOSED, WIDE,
    )  # fmt: skip
    _give(
        p, q, c, s, source, target, x_b, x_h, x_t, y_b, y_h, y_t, block, b, t, alive, at,
        HEADS, PAIRS, COLUMN, REST, IN, OUT, BLOCK_REST, BLOCK_H,
    )  # fmt: skip


@triton.jit(do_not_specialize=["start"])
def _rotate(
    q, k, q_out, k_out,
    q_b, q_h, q_t, k_b, k_h, k_t, qo_b, qo_h, qo_t, ko_b, ko_h, ko_t,
    cos, sin, rows, table_b, table_t,
    positions, positions_b, positions_t, start,
    batch, length,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    PAIRS: tl.constexpr, COLUMN: tl.constexpr, REST: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, TRANSPOSED: tl.constexpr, WIDE: tl.constexpr,
    BATCH_FIRST: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if BATCH_FIRST:
        # In the order of memory.
        steps = tl.cdiv(length, BLOCK_T)
        b, step = program // steps, program % steps
    else:
        # Few sequences: programs that run together share table rows.
        b, step = program % batch, program // batch
    b = b.to(tl.int64)
    t = step.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    alive = t < length
    at = tl.arange(0, BLOCK_P)[None, None, :]
    q_blocks: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    k_blocks: tl.constexpr = (K_HEADS + BLOCK_H - 1) // BLOCK_H
    if SPLIT:
        block = tl.program_id(1)
        if block < q_blocks:
            _one_block(
                q, q_out, q_b, q_h, q_t, qo_b, qo_h, qo_t, block,
                cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start,
                b, t, alive, at, Q_HEADS, PAIRS, COLUMN, REST, HAS_POSITIONS, ADVANCES, IN, OUT,
                TRANSPOSED, WIDE, BLOCK_REST, BLOCK_H,
            )  # fmt: skip
        else:
            _one_block(
                k, k_out, k_b, k_h, k_t, ko_b, ko_h, ko_t, block - q_blocks,
                cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start,
                b, t, alive, at, K_HEADS, PAIRS, COLUMN, REST, HAS_POSITIONS, ADVANCES, IN, OUT,
                TRANSPOSED, WIDE, BLOCK_REST, BLOCK_H,
            )  # fmt: skip
    else:
        # All heads of a token, which share its table row.
        c, s = load_tables(
            cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start,
            b, t, alive, at, at < PAIRS, HAS_POSITIONS, ADVANCES, TRANSPOSED, WIDE,
        )  # fmt: skip
        for block in tl.static_range(q_blocks):
            x, y = _take(
                q, q_b, q_h, q_t, block, b, t, alive, at,
                Q_HEADS, PAIRS, COLUMN, IN, WIDE, BLOCK_H,
            )  # fmt: skip
            _give(
                x, y, c, s, q, q_out, q_b, q_h, q_t, qo_b, qo_h, qo_t, block, b, t, alive, at,
                Q_HEADS, PAIRS, COLUMN, REST, IN, OUT, BLOCK_REST, BLOCK_H,
            )  # fmt: skip
        for block in tl.static_range(k_blocks):
            x, y = _take(
                k, k_b, k_h, k_t, block, b, t, alive, at,
                K_HEADS, PAIRS, COLUMN, IN, WIDE, BLOCK_H,
            )  # fmt: skip
            _give(
                x, y, c, s, k, k_out, k_b, k_h, k_t, ko_b, ko_h, ko_t, block, b, t, alive, at,
                K_HEADS, PAIRS, COLUMN, REST, IN, OUT, BLOCK_REST, BLOCK_H,
            )  # fmt: skip
