"""Attention with a bias: which kernels run, on which tensors.

The kernels are in `attention_forward` and `attention_backward`; `terms` and `cope`, whose scores
have more terms, use the functions for sizes, strides and constants.
"""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from posenc.kernels.triton import attention_backward, attention_forward, attention_parts
from posenc.kernels.triton.launch import Launch, find_launch, launch_for, signature

KINDS = {"none": 0, "slopes": 1, "table": 2, "sums": 3}
LOG2E = math.log2(math.e)
# Fewer keys than this are not pruned: the bounds would cost more than the keys.
PRUNE_FROM = 1025
# Keys that share a bound of their sums, or of their norms, and queries that share a pruned range.
CHUNK, NORMS, RANGE = 256, 128, 64
OPTIONS = {"debug": False, "enable_fp_fusion": True}

# Queries, keys, warps and stages of a tile, measured on an H200: of halves in heads up to 64, up to
# 128 and wider, then of float32 in heads up to 128 and wider.
FORWARD = ((64, 64, 4, 3), (64, 64, 4, 3), (128, 32, 8, 2), (64, 32, 4, 2), (64, 16, 4, 2))
TO_QUERIES = ((64, 128, 4, 2), (64, 64, 4, 2), (64, 32, 8, 1), (64, 32, 4, 1), (32, 16, 4, 1))
TO_KEYS = ((64, 64, 4, 1), (32, 64, 4, 3), (32, 64, 8, 1), (32, 64, 4, 1), (16, 32, 4, 1))
TO_TABLE = ((64, 4, 2), (64, 4, 2), (32, 4, 1), (32, 4, 1), (32, 4, 1))


def can_run(q: Tensor, v: Tensor) -> bool:
    """Whether there is a kernel for these: no float64, heads of at most 256 channels."""
    narrow = 0 < q.shape[3] <= 256 and 0 < v.shape[3] <= 256
    return narrow and q.dtype != torch.float64 and min(q.shape[:3]) > 0


def ranges_like(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    """The pruned range of keys of each block of queries, not yet written."""
    batch, heads, queries, _ = q.shape
    # A few queries are not pruned either; a compiler's graph serves all lengths.
    blocks = (queries + RANGE - 1) // RANGE if call.prune and call.kind in ("slopes", "sums") else 0
    # One axis for blocks and both ends: a compiler would make a graph for one block alone.
    return q.new_empty((batch, heads, 2 * blocks), dtype=torch.int32)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, the log-sum-exp, and the pruned ranges of keys, if they were pruned."""
    q, k, v = as_dense(q), as_dense(k), as_dense(v)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if _is_short(q, k):
        _run_split(q, k, v, out, lse, call)
        return out, lse, None
    prune = _prunes(q, k, call)
    ranges = ranges_like(q, k, v, call) if prune else None
    inputs, present, steps = _inputs(q, call)
    norms = lows = q
    if prune:
        norms, lows = _key_bounds(k, inputs[0], call)
    saved = q if ranges is None else ranges
    tensors = (q, k, v, out, lse, *inputs, norms, lows, saved)

    def prepare() -> Launch:
        (batch, heads, queries, _), keys = q.shape, k.shape[2]
        m, n, warps, stages = _tile(FORWARD, q, v)
        spare = math.log2(8 * (1 if call.causal else 2) / torch.finfo(q.dtype).eps)
        places = (*places_of(call), queries, keys, *_width_and_zero(call), -(-keys // CHUNK))
        numbers = (call.scale * LOG2E, spare, *strides_of(q, k, v, out), *steps, *places)
        constants = _constants(q, k, v, call) | {"PTX": _takes_ptx(q), "PRUNE": prune}
        constants |= {"BLOCK_M": m, "BLOCK_N": n, "CHUNK": CHUNK, "RANGE": RANGE, "NORMS": NORMS}
        grid = (triton.cdiv(queries, m) * batch * heads, 1, 1)
        options = {**OPTIONS, "num_warps": warps, "num_stages": stages}
        return Launch(attention_forward.forward, grid, numbers, constants, **options)

    key = ("attend", prune, *key_of(call))
    launch_for(key, (q, k, v, *present), prepare)(tensors, call.start)
    return out, lse, ranges


def _key_bounds(k: Tensor, sums: Tensor, call: Any) -> tuple[Tensor, Tensor]:
    """The longest of every few keys, and the least running sum of each chunk of keys."""
    batch, heads, keys, width = k.shape
    parts = -(-keys // NORMS)
    norms = k.new_empty((batch, heads, parts), dtype=torch.float32)

    def prepare() -> Launch:
        block = max(16, triton.next_power_of_2(width))
        constants = {"KV_HEADS": heads, "D": width, "BLOCK_D": block, "NORMS": NORMS}
        numbers, grid = (*strides_of(k), keys), (batch * heads, parts, 1)
        return Launch(attention_forward.longest_keys, grid, numbers, constants, **OPTIONS)

    launch_for(("longest_keys",), (k, norms), prepare)((k, norms), 0)
    if call.kind != "sums":
        return norms, norms
    padded = F.pad(sums, (0, -sums.shape[-1] % CHUNK), value=float("inf"))
    lows = padded.unflatten(-1, (-1, CHUNK)).amin(-1)
    return norms, lows.expand(k.shape[0], -1, -1).contiguous()


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def _run_split(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Any) -> None:
    """Attention by parts of the keys; it reads the bias's numbers as they are."""
    (batch, heads, queries, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    block_n, rows = 64, batch * heads * queries
    wanted = -(-2 * _processors(q.device) // (batch * kv_heads))
    parts = max(1, min(wanted, 64, -(-keys // (2 * block_n))))
    part_out, part_lse = out, lse
    if parts > 1:
        part_out = q.new_empty((parts, rows, v.shape[3]), dtype=torch.float32)
        part_lse = q.new_empty((parts, rows), dtype=torch.float32)
    given = (call.values, call.starts, call.first, call.last)
    present = [x for x in given if x is not None]
    tensors = (q, k, v, *[q if x is None else x for x in given], part_out, part_lse)

    def prepare() -> Launch:
        block_m = max(16, triton.next_power_of_2(heads // kv_heads * queries))
        constants = _constants(q, k, v, call) | {"WHOLE": parts == 1, "BLOCK_M": block_m}
        constants |= {"BLOCK_N": block_n if q.dtype.itemsize == 2 else 32}
        places = (*places_of(call), queries, keys, *_width_and_zero(call))
        numbers = (call.scale * LOG2E, *strides_of(q, k, v), *_steps(call), *places)
        grid = (batch * kv_heads, parts, 1)
        options = {**OPTIONS, "num_warps": 4, "num_stages": 2}
        return Launch(attention_forward.split, grid, numbers, constants, **options)

    def prepare_combine() -> Launch:
        block = {"BLOCK_S": triton.next_power_of_2(parts), "BLOCK_DV": block_of(v)}
        constants = {"PARTS": parts, "DV": v.shape[3], **block}
        return Launch(attention_forward.combine, (rows, 1, 1), (rows,), constants, **OPTIONS)

    # The results are new and aligned, and their shapes follow from the others.
    launch_for(("split", *key_of(call)), (q, k, v, *present), prepare)(tensors, call.start)
    if parts > 1:
        key = ("combine", q.device, q.dtype, parts, rows, v.shape[3])
        find_launch(key, prepare_combine)((part_out, part_lse, out, lse), 0)


def backward(
    g: Tensor, g_lse: Tensor | None, saved: Any, call: Any, to_values: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and the bias's numbers; see `posenc.attention.op`."""
    q, k, v, out, lse, ranges = saved
    q, k, v, g = as_dense(q), as_dense(k), as_dense(v), as_dense(g)
    g_lse = None if g_lse is None else g_lse.float().contiguous()
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    delta = torch.empty_like(lse)
    inputs, present, steps = _inputs(q, call)
    prune = _prunes(q, k, call)
    rows_too, first_too, nearest, furthest = to_values, False, 0, -1
    if to_values and call.kind == "table":
        nearest, furthest, rows_too = _distances(q, k, call)
        first_too = not call.causal
    # Running sums have a gradient for each row, other numbers a part of theirs for each block.
    rows = queries if call.kind == "sums" else -(-queries // _tile(TO_QUERIES, q, v)[0])
    shape = batch, heads, rows
    by_row, before_first = (lse.new_empty(shape) if x else lse for x in (rows_too, first_too))
    by_key = lse.new_empty((batch, heads, keys)) if call.kind == "sums" else lse
    key = (call.prune, prune, rows_too, first_too, g_lse is None, *key_of(call))
    key = (*key, *signature((q, k, v, g, out, *present)))
    pruned, to_lse = q if ranges is None else ranges, lse if g_lse is None else g_lse
    shared = _Shared(q, k, v, g, steps, prune, call)
    tensors: tuple[Tensor, ...] = (q, k, v, g, out, lse, to_lse, *inputs, pruned, dq, delta)
    tensors = (*tensors, by_row, before_first)
    prepare = partial(shared.to_queries, out, dq, (rows_too, first_too, g_lse is not None))
    find_launch(("to_queries", *key), prepare)(tensors, call.start)
    tensors = (q, k, v, g, lse, delta, *inputs, pruned, dk, dv, by_key)
    find_launch(("to_keys", *key), partial(shared.to_keys, dk, dv))(tensors, call.start)
    if not to_values:
        return dq, dk, dv, None
    if call.kind == "sums":
        to = _sum_gradient(by_key, by_row, call).to(call.values.dtype)
    else:
        read = (q, k, v, g, lse, delta, *inputs)
        parts = (before_first, first_too), (by_row, rows_too), rows
        to = _number_gradient(shared, read, (nearest, furthest), parts, key)
    return dq, dk, dv, to


class _Shared:
    """What the launches of the backward pass have in common."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, steps: Any, prune: bool, call: Any
    ) -> None:
        self.tensors, self.steps, self.prune, self.call = (q, k, v, g), steps, prune, call

    def _launch(
        self, kernel: Any, tile: Any, strides: Any, owned: int, heads: int, others: Any
    ) -> Launch:
        (q, k, v, _), call = self.tensors, self.call
        m, n, warps, stages = tile
        ranges = -(-q.shape[2] // RANGE)
        places = (*places_of(call), q.shape[2], k.shape[2], *_width_and_zero(call), ranges)
        numbers = (call.scale * LOG2E, call.scale, *strides, *self.steps, *places)
        constants = _constants(q, k, v, call) | {"PTX": _takes_ptx(q), **others}
        constants |= {"PRUNE": RANGE if self.prune else 0, "BLOCK_M": m, "BLOCK_N": n}
        grid = (owned * q.shape[0] * heads, 1, 1)
        options = {**OPTIONS, "num_warps": warps, "num_stages": stages}
        return Launch(kernel, grid, numbers, constants, **options)

    def to_queries(self, out: Tensor, dq: Tensor, too: tuple[bool, bool, bool]) -> Launch:
        q, k, v, g = self.tensors
        tile = _tile(TO_QUERIES, q, v)
        strides, owned = strides_of(q, k, v, g, out, dq), -(-q.shape[2] // tile[0])
        others = dict(zip(("TO_ROWS", "TO_FIRST", "LSE_TOO"), too, strict=True))
        kernel = attention_backward.to_queries
        return self._launch(kernel, tile, strides, owned, q.shape[1], others)

    def to_keys(self, dk: Tensor, dv: Tensor) -> Launch:
        q, k, v, g = self.tensors
        tile = _tile(TO_KEYS, q, v)
        strides, owned = strides_of(q, k, v, g, dk, dv), -(-k.shape[2] // tile[1])
        # Without pruning, the ranges of keys need not be documents.
        others = {"NARROW": self.call.first is not None and self.call.prune}
        kernel = attention_backward.to_keys
        return self._launch(kernel, tile, strides, owned, k.shape[1], others)

    def to_table(self, nearest: int, diagonals: int, tile: tuple[int, int, int]) -> Launch:
        (q, k, v, g), call = self.tensors, self.call
        block, warps, stages = tile
        size = (q.shape[2], k.shape[2], *_width_and_zero(call), nearest, q.shape[0])
        strides = strides_of(q, k, v, g)
        numbers = (call.scale * LOG2E, *strides, self.steps[1], *places_of(call), *size)
        constants = constants_of(q, k, v, call) | {"CAUSAL": call.causal, "BLOCK": block}
        options = {**OPTIONS, "num_warps": warps, "num_stages": stages}
        grid = (diagonals, q.shape[1], 1)
        return Launch(attention_backward.to_table, grid, numbers, constants, **options)


def _sum_gradient(by_key: Tensor, by_row: Tensor, call: Any) -> Tensor:
    """A key's sum lowers its scores, and a query's own raises all of its scores.

    The sums of a query's scores would be the gradient of its log-sum-exp, but for the rounding of
    the output in ``delta``; without that, gradients of gates, which add all of these, drift.
    """
    past, queries = call.values.shape[2] - by_key.shape[2], by_row.shape[2]
    to = F.pad(by_key.neg_(), (0, past)) if past else by_key.neg_()
    if call.starts is None:
        to[:, :, call.start : call.start + queries] += by_row
    else:
        own = call.starts[:, None] + torch.arange(queries, device=by_row.device)
        own = own[:, None].expand_as(by_row)
        to = to.scatter(2, own, to.gather(2, own) + by_row)
    return to if call.values.shape[0] > 1 else to.sum(0, keepdim=True)


def _distances(q: Tensor, k: Tensor, call: Any) -> tuple[int, int, bool]:
    """The nearest and the furthest distance that is seen and has a column; if any is beyond it."""
    width, zero = _width_and_zero(call)
    nearest = max(-zero, 0) if call.causal else -zero
    longest = max(k.shape[2], call.start + q.shape[2]) - 1
    if call.window is not None:
        nearest, longest = max(nearest, -call.window[1]), min(longest, call.window[0])
    last = width - 1 - zero
    return nearest, min(last, longest), last < longest


def _number_gradient(
    shared: _Shared, read: tuple[Tensor, ...], distances: tuple[int, int], parts: Any, key: Any
) -> Tensor:
    """The gradient of a table, or of slopes, by launches only, which native code can repeat.

    A table's are sums along diagonals. ``parts`` are the sums of `to_queries` for distances before
    the first column and for those beyond the last, if any, and how many blocks of queries they are
    of. A slope is a table of one column, which has only the latter.
    """
    (q, _, v, _), call = shared.tensors, shared.call
    (nearest, furthest), (width, zero) = distances, _width_and_zero(call)
    key, tile = (*distances, *key), _tile(TO_TABLE, q, v)
    diagonals = -(-(furthest - nearest) // tile[0]) + 1 if nearest <= furthest else 0
    sums = q.new_empty((q.shape[1], diagonals, 2, tile[0]), dtype=torch.float32)
    if diagonals:
        prepare = partial(shared.to_table, nearest, diagonals, tile)
        find_launch(("to_table", *key), prepare)((*read, sums), call.start)
    (before_first, has_first), (beyond_last, has_last), blocks = parts
    to: Tensor = call.values.new_empty(call.values.shape)

    def prepare_fold() -> Launch:
        # Slopes may be those of each sequence.
        heads = len(call.values) if width else call.values.numel()
        constants = {"BLOCK": tile[0], "HAS_FIRST": has_first, "HAS_LAST": has_last}
        sequences = q.shape[0] * q.shape[1] // heads
        numbers = (width or 1, zero, *distances, diagonals, sequences, blocks)
        return Launch(attention_backward.fold_table, (heads, 1, 1), numbers, constants, **OPTIONS)

    tensors = sums, before_first, beyond_last, to
    find_launch(("fold_table", to.dtype, *key), prepare_fold)(tensors, 0)
    return to


def _prunes(q: Tensor, k: Tensor, call: Any) -> bool:
    """Whether far keys are left out."""
    wanted = call.prune and call.kind in ("slopes", "sums")
    return wanted and k.shape[2] >= PRUNE_FROM and not _is_short(q, k)


def _is_short(q: Tensor, k: Tensor) -> bool:
    """Whether so few queries share a head of keys that the keys are split over programs.

    Up to 16 queries are the smallest block of that kernel, which also converts no numbers.
    """
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    return rows <= 16 or (rows <= 64 and k.shape[2] >= 256)


def _inputs(q: Tensor, call: Any) -> tuple[tuple[Tensor, ...], list[Tensor], list[int]]:
    """Bias, starts and documents of a call, the ones it has, and the bias's steps.

    In the first, ``q`` stands for what the call does not have; no kernel reads it there.
    """
    values, *steps = _numbers(call)
    given = (values, call.starts, call.first, call.last)
    present = [x for x in given if x is not None]
    return tuple([q if x is None else x for x in given]), present, steps


def _numbers(call: Any) -> tuple[Tensor | None, int, int]:
    """The bias's numbers as the kernels read them, and their steps from batch and head."""
    values = call.values
    if call.kind == "none":
        return None, 0, 0
    if call.kind == "table":
        heads, width = values.shape
        size = width + 2 * attention_parts.PAD.value
        padded = values.new_empty((heads, size), dtype=torch.float32)
        tensors = (values, padded)

        def prepare() -> Launch:
            numbers, grid = (*values.stride(), width), (triton.cdiv(size, 1024), heads, 1)
            return Launch(attention_forward.pad_table, grid, numbers, {"BLOCK": 1024}, **OPTIONS)

        launch_for(("pad_table",), tensors, prepare)(tensors, 0)
        return padded, 0, size
    # Float32 or float64; the kernels compute with sums in float64, and with slopes in float32.
    values = values.contiguous()
    return values, values.stride(0) if values.shape[0] > 1 else 0, values.stride(1)


def _steps(call: Any) -> tuple[int, int, int]:
    """Steps of the bias's numbers as they are: from batch, from head, and along a row."""
    if call.values is None:
        return 0, 0, 0
    steps = call.values.stride()
    if call.kind == "table":
        return 0, *steps
    return steps[0] if call.values.shape[0] > 1 else 0, steps[1], *(steps[2:] or (0,))


def _width_and_zero(call: Any) -> tuple[int, int]:
    """The columns of a table, or of sums: one for each key, and for queries past the keys."""
    return (call.values.shape[-1], call.zero) if call.kind in ("table", "sums") else (0, 0)


def _tile(table: tuple[Any, ...], q: Tensor, v: Tensor) -> Any:
    """The entry of one of the tables of tiles for these tensors."""
    width = max(q.shape[3], v.shape[3])
    if q.dtype == torch.float32:
        return table[3 if width <= 128 else 4]
    return table[(width > 64) + (width > 128)]


def _constants(q: Tensor, k: Tensor, v: Tensor, call: Any) -> dict[str, Any]:
    return constants_of(q, k, v, call) | {"KIND": KINDS[call.kind], "CAUSAL": call.causal}


def _takes_ptx(q: Tensor) -> bool:
    return q.is_cuda and torch.version.cuda is not None


def as_dense(x: Tensor) -> Tensor:
    """``x`` with dense rows, copied if need be."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides_of(*tensors: Tensor) -> list[int]:
    """Strides of the batch, the heads and the tokens of each tensor."""
    return [step for x in tensors for step in x.stride()[:3]]


def block_of(x: Tensor) -> int:
    """The power of two that holds the channels, and is large enough for a product of matrices."""
    block: int = max(16, triton.next_power_of_2(x.shape[3]))
    return block


def constants_of(q: Tensor, k: Tensor, v: Tensor, call: Any) -> dict[str, Any]:
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


def key_of(call: Any) -> tuple[Any, ...]:
    """What a launch depends on, of a call, in addition to its tensors."""
    present = call.starts is None, call.first is None
    return call.kind, call.zero, call.scale, call.causal, call.window, *present
