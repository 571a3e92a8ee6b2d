"""Attention with a bias: the plans of its calls.

The kernels are in `attention_forward` and `attention_backward`; `terms` and `cope`, whose scores
have more terms, use the functions for sizes, strides and constants.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from posenc.ops.attention.triton import attention_backward, attention_forward, attention_parts
from posenc.ops.plan import Operand, Plan, Target, strides

KINDS = {"without_bias": 0, "slopes": 1, "table": 2, "sums": 3}
LOG2E = math.log2(math.e)
# Fewer keys than this are not pruned: the bounds would cost more than the keys.
PRUNE_FROM = 1025
# Keys that share a bound of their sums, or of their norms, and queries that share a pruned range,
# as in posenc.ops.attention.op.
CHUNK, NORMS, RANGE = 256, 128, 64
OPTIONS = {"debug": False, "enable_fp_fusion": True}
# Key indices of first queries, which may be before the keys, or after them.
STARTS = -(2**30), 2**30

# Queries, keys, warps and stages of a tile, measured on an H200: of halves in heads up to 64, up to
# 128 and wider, then of float32 in heads up to 128 and wider.
FORWARD = ((64, 64, 4, 3), (64, 64, 4, 3), (128, 32, 8, 2), (64, 32, 4, 2), (64, 16, 4, 2))
TO_QUERIES = ((64, 128, 4, 2), (64, 64, 4, 2), (64, 32, 8, 1), (64, 32, 4, 1), (32, 16, 4, 1))
TO_KEYS = ((64, 64, 4, 1), (32, 64, 4, 3), (32, 64, 8, 1), (32, 64, 4, 1), (16, 32, 4, 1))
TO_TABLE = ((64, 4, 2), (64, 4, 2), (32, 4, 1), (32, 4, 1), (32, 4, 1))


def plan_forward(given: Any, call: Any, plan: Plan, target: Target) -> None:
    """Make the output, the log-sum-exp, and the pruned ranges of keys, if they are pruned."""
    plan.least, plan.most = STARTS
    out, lse, *ranges = plan.results
    q, k, v = (plan.with_dense_rows(x) for x in (given.q, given.k, given.v))
    call = with_whole_places(plan, call)
    if _is_short(q, k):
        _plan_split(q, k, v, out, lse, call, plan, target)
        return
    prune = _prunes(q, k, call)
    inputs, steps = _inputs(q, call, plan)
    norms = lows = q
    if prune:
        norms, lows = _key_bounds(k, inputs[0], call, plan)
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    m, n, warps, stages = _tile(FORWARD, q, v)
    spare = math.log2(8 * (1 if call.causal else 2) / torch.finfo(q.dtype).eps)
    arguments = (
        q, k, v, out, lse, *inputs, norms, lows, ranges[0] if prune else q, call.start,
        call.scale * LOG2E, spare, *strides(q, k, v, out), *steps,
        *places_of(call), queries, keys, *_width_and_zero(call), -(-keys // CHUNK),
    )  # fmt: skip
    constants = _constants(q, k, v, call) | {"PTX": target.vendor == "nvidia", "PRUNE": prune}
    constants |= {"BLOCK_M": m, "BLOCK_N": n, "CHUNK": CHUNK, "RANGE": RANGE, "NORMS": NORMS}
    grid = (triton.cdiv(queries, m) * batch * heads,)
    options = {**OPTIONS, "num_warps": warps, "num_stages": stages}
    plan.launch(attention_forward.forward, grid, arguments, constants, **options)


def with_whole_places(plan: Plan, call: Any) -> Any:
    """The call, whose starts and ends of documents have no gaps."""
    found = {name: getattr(call, name) for name in ("starts", "first", "last")}
    whole = {
        name: x if x is None or x.is_contiguous() else plan.contiguous(x)
        for name, x in found.items()
    }
    return call._replace(**whole)


def _key_bounds(k: Operand, sums: Operand, call: Any, plan: Plan) -> tuple[Operand, Operand]:
    """The longest of every few keys, and the least running sum of each chunk of keys."""
    batch, heads, keys, width = k.shape
    parts = -(-keys // NORMS)
    norms = plan.empty((batch, heads, parts), torch.float32)
    block = max(16, triton.next_power_of_2(width))
    constants = {"KV_HEADS": heads, "D": width, "BLOCK_D": block, "NORMS": NORMS}
    arguments = k, norms, 0, *strides(k), keys
    kernel = attention_forward.longest_keys
    plan.launch(kernel, (batch * heads, parts), arguments, constants, **OPTIONS)
    if call.kind != "sums":
        return norms, norms
    grid = -(-keys // CHUNK), sums.shape[1], batch
    lows = plan.empty((batch, sums.shape[1], grid[0]), sums.dtype)
    arguments = sums, lows, sums.stride(0), sums.stride(1), keys
    constants = {"CHUNK": CHUNK}
    plan.launch(attention_forward.least_sums, grid, arguments, constants, **OPTIONS)
    return norms, lows


def _plan_split(
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: Operand,
    call: Any,
    plan: Plan,
    target: Target,
) -> None:
    """Attention by parts of the keys; it reads the bias's numbers as they are."""
    (batch, heads, queries, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    block_n, rows = 64, batch * heads * queries
    wanted = -(-2 * target.processors // (batch * kv_heads))
    parts = max(1, min(wanted, 64, -(-keys // (2 * block_n))))
    part_out, part_lse = out, lse
    if parts > 1:
        part_out = plan.empty((parts, rows, v.shape[3]), torch.float32)
        part_lse = plan.empty((parts, rows), torch.float32)
    places = call.starts, call.first, call.last
    others = [q if x is None else x for x in (_values(call), *places)]
    block_m = max(16, triton.next_power_of_2(heads // kv_heads * queries))
    constants = _constants(q, k, v, call) | {"WHOLE": parts == 1, "BLOCK_M": block_m}
    constants |= {"BLOCK_N": block_n if q.dtype.itemsize == 2 else 32}
    places = (*places_of(call), queries, keys, *_width_and_zero(call))
    numbers = (call.scale * LOG2E, *strides(q, k, v), *_steps(call), *places)
    arguments = q, k, v, *others, part_out, part_lse, call.start, *numbers
    options = {**OPTIONS, "num_warps": 4, "num_stages": 2}
    plan.launch(attention_forward.split, (batch * kv_heads, parts), arguments, constants, **options)
    if parts > 1:
        block = {"BLOCK_S": triton.next_power_of_2(parts), "BLOCK_DV": block_of(v)}
        constants = {"PARTS": parts, "DV": v.shape[3], **block}
        arguments = part_out, part_lse, out, lse, 0, rows
        plan.launch(attention_forward.combine, (rows,), arguments, constants, **OPTIONS)


def plan_backward(given: Any, call: Any, plan: Plan, target: Target) -> None:
    """Make the gradients of q, k, v and the bias's numbers."""
    dq, dk, dv, *to_bias = plan.results
    q, k, v, g = (plan.with_dense_rows(x) for x in (given.q, given.k, given.v, given.g))
    out, lse = whole(plan, given.out), whole(plan, given.lse)
    to_lse = lse if given.g_lse is None else whole(plan, given.g_lse)
    call = with_whole_places(plan, call)
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    to_values = call.to_bias and bool(to_bias)
    kind = call.kind
    delta = plan.empty(lse.shape, lse.dtype)
    inputs, steps = _inputs(q, call, plan)
    prune = _prunes(q, k, call)
    rows_too, first_too, nearest, furthest = to_values, False, 0, -1
    if to_values and kind == "table":
        nearest, furthest, rows_too = _distances(q, k, call)
        first_too = not call.causal
    # Running sums have a gradient for each row, other numbers a part of theirs for each block.
    rows = queries if kind == "sums" else -(-queries // _tile(TO_QUERIES, q, v)[0])
    shape = batch, heads, rows
    by_row = plan.empty(shape, lse.dtype) if rows_too else lse
    before_first = plan.empty(shape, lse.dtype) if first_too else lse
    by_key = plan.empty((batch, heads, keys), lse.dtype) if kind == "sums" else lse
    pruned = whole(plan, given.ranges) if prune else q
    numbers = *places_of(call), queries, keys, *_width_and_zero(call), -(-queries // RANGE)
    constants = _constants(q, k, v, call)
    constants |= {"PTX": target.vendor == "nvidia", "PRUNE": RANGE if prune else 0}

    def launch(
        kernel: Any, tile: Any, owned: int, of: int, tensors: Any, strided: Any, **too: Any
    ) -> None:
        m, n, warps, stages = tile
        scales = call.scale * LOG2E, call.scale
        arguments = *tensors, call.start, *scales, *strides(*strided), *steps, *numbers
        blocks = {"BLOCK_M": m, "BLOCK_N": n}
        options = {**OPTIONS, "num_warps": warps, "num_stages": stages}
        plan.launch(kernel, (owned * batch * of,), arguments, constants | too | blocks, **options)

    tile = _tile(TO_QUERIES, q, v)
    tensors: Any = (q, k, v, g, out, lse, to_lse, *inputs, pruned, dq, delta, by_row, before_first)
    too = {"TO_ROWS": rows_too, "TO_FIRST": first_too, "LSE_TOO": given.g_lse is not None}
    owned, strided = -(-queries // tile[0]), (q, k, v, g, out, dq)
    launch(attention_backward.to_queries, tile, owned, heads, tensors, strided, **too)
    tile = _tile(TO_KEYS, q, v)
    tensors = (q, k, v, g, lse, delta, *inputs, pruned, dk, dv, by_key)
    # Without pruning, the ranges of keys need not be documents.
    narrow = {"NARROW": call.first is not None and call.prune}
    owned, strided = -(-keys // tile[1]), (q, k, v, g, dk, dv)
    launch(attention_backward.to_keys, tile, owned, k.shape[1], tensors, strided, **narrow)
    if not to_values:
        return
    (to,) = to_bias
    if kind == "sums":
        _sum_gradient(by_key, by_row, to, call, plan)
        return
    width, zero = _width_and_zero(call)
    block, warps, stages = _tile(TO_TABLE, q, v)
    diagonals = -(-(furthest - nearest) // block) + 1 if nearest <= furthest else 0
    sums = plan.empty((heads, diagonals, 2, block), torch.float32)
    size = (queries, keys, width, zero, nearest, batch)
    # A table's gradients are sums along diagonals. A slope is a table of one column, which is past
    # its end for every distance.
    arguments = (
        q, k, v, g, lse, delta, *inputs, sums, call.start,
        call.scale * LOG2E, *strides(q, k, v, g), steps[1], *places_of(call), *size,
    )  # fmt: skip
    constants = constants_of(q, k, v, call) | {"CAUSAL": call.causal, "BLOCK": block}
    options = {**OPTIONS, "num_warps": warps, "num_stages": stages}
    plan.launch(attention_backward.to_table, (diagonals, heads), arguments, constants, **options)
    # Slopes may be those of each sequence.
    owners = len(_values(call)) if width else _values(call).numel()
    constants = {"BLOCK": block, "HAS_FIRST": first_too, "HAS_LAST": rows_too}
    sequences = batch * heads // owners
    fold = (width or 1, zero, nearest, furthest, diagonals, sequences, rows)
    arguments = sums, before_first, by_row, to, 0, *fold
    plan.launch(attention_backward.fold_table, (owners,), arguments, constants, **OPTIONS)


def whole(plan: Plan, x: Operand) -> Operand:
    """The tensor, or a copy of it without gaps."""
    return x if x.is_contiguous() else plan.contiguous(x)


def _sum_gradient(by_key: Operand, by_row: Operand, to: Operand, call: Any, plan: Plan) -> None:
    """A key's sum lowers its scores, and a query's own raises all of its scores.

    The sums of a query's scores would be the gradient of its log-sum-exp, but for the rounding of
    the output in ``delta``; without that, gradients of gates, which add all of these, drift.
    """
    (batch, heads, keys), queries, columns = by_key.shape, by_row.shape[2], to.shape[2]
    has_starts = call.starts is not None
    starts = call.starts if has_starts else by_key
    together = batch if to.shape[0] == 1 else 1
    arguments = (
        by_key, by_row, starts, to, call.start, 1 if has_starts and len(starts) > 1 else 0,
        heads, keys, queries, columns, together,
    )  # fmt: skip
    constants = {"HAS_STARTS": has_starts, "BLOCK": 256}
    grid = triton.cdiv(columns, 256), heads, to.shape[0]
    plan.launch(attention_backward.fold_sums, grid, arguments, constants, **OPTIONS)


def _distances(q: Operand, k: Operand, call: Any) -> tuple[int, int, bool]:
    """The nearest and the furthest distance that is seen and has a column; if any is beyond it."""
    width, zero = _width_and_zero(call)
    nearest = max(-zero, 0) if call.causal else -zero
    longest = max(k.shape[2], call.start + q.shape[2]) - 1
    if call.window is not None:
        nearest, longest = max(nearest, -call.window[1]), min(longest, call.window[0])
    last = width - 1 - zero
    return nearest, min(last, longest), last < longest


def _prunes(q: Operand, k: Operand, call: Any) -> bool:
    """Whether far keys are left out."""
    return call.prunes and k.shape[2] >= PRUNE_FROM and not _is_short(q, k)


def _is_short(q: Operand, k: Operand) -> bool:
    """Whether so few queries share a head of keys that the keys are split over programs.

    Up to 16 queries are the smallest block of that kernel, which also converts no numbers.
    """
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    return rows <= 16 or (rows <= 64 and k.shape[2] >= 256)


def _inputs(q: Operand, call: Any, plan: Plan) -> tuple[tuple[Operand, ...], tuple[Any, ...]]:
    """Bias, starts and documents of a call, and the bias's steps from batch and head.

    In the first, ``q`` stands for what the call does not have; no kernel reads it there.
    """
    values, steps = _values(call), (0, 0)
    if call.kind == "table":
        heads, width = values.shape
        size = width + 2 * attention_parts.PAD.value
        padded = plan.empty((heads, size), torch.float32)
        arguments = values, padded, 0, *values.stride(), width
        grid = triton.cdiv(size, 1024), heads
        plan.launch(attention_forward.pad_table, grid, arguments, {"BLOCK": 1024}, **OPTIONS)
        values, steps = padded, (0, size)
    elif values is not None:
        # Float32 or float64; the kernels compute with sums in float64, and with slopes in float32.
        values = whole(plan, values)
        steps = values.stride(0), values.stride(1)
    found = [q if x is None else x for x in (values, call.starts, call.first, call.last)]
    return tuple(found), steps


def _values(call: Any) -> Any:
    """The bias's numbers, or None."""
    return getattr(call.bias, "values", None)


def _steps(call: Any) -> tuple[int, int, int]:
    """Steps of the bias's numbers as they are: from batch, from head, and along a row."""
    if (values := _values(call)) is None:
        return 0, 0, 0
    if call.kind == "slopes":
        return *values.stride(), 0
    return (0, *values.stride()) if call.kind == "table" else values.stride()


def _width_and_zero(call: Any) -> tuple[int, int]:
    """The columns of a table, or of sums: one for each key, and for queries past the keys."""
    if call.kind not in ("table", "sums"):
        return 0, 0
    return _values(call).shape[-1], getattr(call.bias, "zero", 0)


def _tile(table: tuple[Any, ...], q: Operand, v: Operand) -> Any:
    """The entry of one of the tables of tiles for these tensors."""
    width = max(q.shape[3], v.shape[3])
    if q.dtype == torch.float32:
        return table[3 if width <= 128 else 4]
    return table[(width > 64) + (width > 128)]


def _constants(q: Operand, k: Operand, v: Operand, call: Any) -> dict[str, Any]:
    return constants_of(q, k, v, call) | {"KIND": KINDS[call.kind], "CAUSAL": call.causal}


def block_of(x: Operand) -> int:
    """The power of two that holds the channels, and is large enough for a product of matrices."""
    block: int = max(16, triton.next_power_of_2(x.shape[3]))
    return block


def constants_of(q: Operand, k: Operand, v: Operand, call: Any) -> dict[str, Any]:
    """The constants that all attention kernels have: heads, channels, and what a query sees."""
    return {
        "HEADS": q.shape[1],
        "GROUP": q.shape[1] // k.shape[1],
        "D": q.shape[3],
        "DV": v.shape[3],
        "HAS_STARTS": call.starts is not None,
        "DOCUMENTS": call.first is not None,
        "WINDOW": call.window is not None,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        "BLOCK_D": block_of(q),
        "BLOCK_DV": block_of(v),
    }


def places_of(call: Any) -> tuple[int, int, int, int]:
    """Steps from sequence to sequence of the starts and of the documents' ends; the window."""
    starts = 0 if call.starts is None or len(call.starts) == 1 else 1
    ends = 0 if call.first is None or len(call.first) == 1 else call.first.stride(0)
    left, right = call.window or (0, 0)
    return starts, ends, left, right
