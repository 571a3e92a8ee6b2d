"""Attention with a bias: which kernels run, on which tensors."""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from posenc.kernels.triton import attention, attention_bias, attention_split
from posenc.kernels.triton.attend_arguments import (
    CHUNK,
    FORWARD,
    LOG2E,
    NORMS,
    OPTIONS,
    RANGE,
    arithmetic_of,
    as_dense,
    blocks_for,
    constants_of,
    inputs_of,
    is_short,
    kind_of_mask,
    places_of,
    prunes,
    steps_of,
    strides_of,
    width_and_zero,
    widths_of,
)
from posenc.kernels.triton.attend_gradients import backward
from posenc.kernels.triton.launch import Launch, find_launch, launch_for

__all__ = ["backward", "can_run", "forward", "ranges_like"]


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
    if is_short(q, k):
        _run_split(q, k, v, out, lse, call)
        return out, lse, None
    prune = prunes(q, k, call)
    ranges = ranges_like(q, k, v, call) if prune else None
    inputs, present, steps = inputs_of(q, call)
    norms = lows = q
    if prune:
        norms, lows = _key_bounds(k, inputs[0], call)
    saved = q if ranges is None else ranges
    tensors = (q, k, v, out, lse, *inputs, norms, lows, saved)
    described = ("attend", *call[4:6], *call[7:9], prune, *kind_of_mask(call))
    prepare = partial(_forward_launch, q, k, v, out, steps, prune, call)
    launch_for(described, (q, k, v, *present), prepare)(tensors, call.start)
    return out, lse, ranges


def _forward_launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, steps: Any, prune: bool, call: Any
) -> Launch:
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    m, n, warps, stages = blocks_for(FORWARD, q, v)
    spare = math.log2(8 * (1 if call.causal else 2) / torch.finfo(q.dtype).eps)
    chunks = -(-keys // CHUNK)
    places = (*places_of(call), queries, keys, *width_and_zero(call), chunks)
    strides = (*strides_of(q), *strides_of(k), *strides_of(v), *strides_of(out))
    numbers = (call.scale * LOG2E, spare, *strides, *steps, *places)
    constants = constants_of(q, k, v, call) | {"PRUNE": prune, **arithmetic_of(q)}
    constants |= {"BLOCK_M": m, "BLOCK_N": n, **widths_of(q, v), "CHUNK": CHUNK}
    constants |= {"RANGE": RANGE, "NORMS": NORMS}
    grid = (triton.cdiv(queries, m) * batch * heads, 1, 1)
    options = {**OPTIONS, "num_warps": warps, "num_stages": stages}
    return Launch(attention.forward, grid, numbers, constants, **options)


def _key_bounds(k: Tensor, sums: Tensor, call: Any) -> tuple[Tensor, Tensor]:
    """The longest of every few keys, and the least running sum of each chunk of keys."""
    batch, heads, keys, width = k.shape
    parts = -(-keys // NORMS)
    norms = k.new_empty((batch, heads, parts), dtype=torch.float32)

    def prepare() -> Launch:
        block = max(16, triton.next_power_of_2(width))
        constants = {"KV_HEADS": heads, "D": width, "BLOCK_D": block, "NORMS": NORMS}
        numbers, grid = (*strides_of(k), keys), (batch * heads, parts, 1)
        return Launch(attention_bias.longest_keys, grid, numbers, constants, **OPTIONS)

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
    given = call[:4]
    present = [x for x in given if x is not None]
    tensors = (q, k, v, *[q if x is None else x for x in given], part_out, part_lse)
    widths, group = widths_of(q, v), heads // kv_heads

    def prepare() -> Launch:
        block_m = max(16, triton.next_power_of_2(group * queries))
        constants = constants_of(q, k, v, call) | {
            "PRECISION": arithmetic_of(q)["PRECISION"],
            "WHOLE": parts == 1,
            "BLOCK_M": block_m,
        }
        constants |= {"BLOCK_N": block_n if q.dtype.itemsize == 2 else 32, **widths}
        places = (*places_of(call), queries, keys, *width_and_zero(call))
        strides = (*strides_of(q), *strides_of(k), *strides_of(v))
        numbers = (call.scale * LOG2E, *strides, *steps_of(call), *places)
        grid = (batch * kv_heads, parts, 1)
        options = {**OPTIONS, "num_warps": 4, "num_stages": 2}
        return Launch(attention_split.split, grid, numbers, constants, **options)

    def prepare_combine() -> Launch:
        block = {"BLOCK_S": triton.next_power_of_2(parts), "BLOCK_DV": widths["BLOCK_DV"]}
        constants = {"PARTS": parts, "DV": v.shape[3], **block}
        return Launch(attention_split.combine, (rows, 1, 1), (rows,), constants, **OPTIONS)

    described = ("split", *call[4:6], *call[7:9], *kind_of_mask(call))
    # The results are new and aligned, and their shapes follow from the others.
    launch_for(described, (q, k, v, *present), prepare)(tensors, call.start)
    if parts > 1:
        key = ("combine", q.device, q.dtype, parts, rows, v.shape[3])
        find_launch(key, prepare_combine)((part_out, part_lse, out, lse), 0)
