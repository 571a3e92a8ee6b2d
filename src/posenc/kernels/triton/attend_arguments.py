"""Arguments of the attention kernels: numbers, strides, sizes and blocks."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from posenc.kernels.triton import attention_bias
from posenc.kernels.triton.launch import Launch, launch_for

KINDS = {"none": 0, "slopes": 1, "table": 2, "sums": 3}
LOG2E = math.log2(math.e)
# Fewer keys than this are not pruned: the bounds would cost more than the keys.
PRUNE_FROM = 1025
# Keys that share a bound of their sums, or of their norms, and queries that share a pruned range.
CHUNK, NORMS, RANGE = 256, 128, 64
OPTIONS = {"debug": False, "enable_fp_fusion": True}


def prunes(q: Tensor, k: Tensor, call: Any) -> bool:
    """Whether far keys are left out."""
    wanted = call.prune and call.kind in ("slopes", "sums")
    return wanted and k.shape[2] >= PRUNE_FROM and not is_short(q, k)


def is_short(q: Tensor, k: Tensor) -> bool:
    """Whether so few queries share a head of keys that the keys are split over programs.

    Up to 16 queries are the smallest block of that kernel, which also converts no numbers.
    """
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    return rows <= 16 or (rows <= 64 and k.shape[2] >= 256)


def as_dense(x: Tensor) -> Tensor:
    """``x`` with dense rows, copied if need be."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides_of(x: Tensor) -> tuple[int, int, int]:
    """Strides of the batch, the heads and the tokens."""
    return x.stride()[:3]  # type: ignore[return-value]


def inputs_of(q: Tensor, call: Any) -> tuple[tuple[Tensor, ...], list[Tensor], list[int]]:
    """Bias, starts and documents of a call, the ones it has, and the bias's steps.

    In the first, ``q`` stands for what the call does not have; no kernel reads it there.
    """
    values, *steps = numbers_of(call)
    given = (values, call.starts, call.first, call.last)
    present = [x for x in given if x is not None]
    return tuple([q if x is None else x for x in given]), present, steps


def numbers_of(call: Any) -> tuple[Tensor | None, int, int]:
    """The bias's numbers as the kernels read them, and their steps from batch and head."""
    values = call.values
    if call.kind == "none":
        return None, 0, 0
    if call.kind == "table":
        heads, width = values.shape
        size = width + 2 * attention_bias.PAD.value
        padded = values.new_empty((heads, size), dtype=torch.float32)
        tensors = (values, padded)

        def prepare() -> Launch:
            numbers, grid = (*values.stride(), width), (triton.cdiv(size, 1024), heads, 1)
            return Launch(attention_bias.pad_table, grid, numbers, {"BLOCK": 1024}, **OPTIONS)

        launch_for(("pad_table",), tensors, prepare)(tensors, 0)
        return padded, 0, size
    # Float32 or float64; the kernels compute with sums in float64, and with slopes in float32.
    values = values.contiguous()
    return values, values.stride(0) if values.shape[0] > 1 else 0, values.stride(1)


def steps_of(call: Any) -> tuple[int, int, int]:
    """Steps of the bias's numbers as they are: from batch, from head, and along a row."""
    if call.values is None:
        return 0, 0, 0
    steps = call.values.stride()
    if call.kind == "table":
        return 0, *steps
    return steps[0] if call.values.shape[0] > 1 else 0, steps[1], *(steps[2:] or (0,))


def constants_of(q: Tensor, k: Tensor, v: Tensor, call: Any) -> dict[str, Any]:
    """The constants that most kernels have."""
    return {
        "HEADS": q.shape[1],
        "GROUP": q.shape[1] // k.shape[1],
        "D": q.shape[3],
        "DV": v.shape[3],
        "KIND": KINDS[call.kind],
        "CAUSAL": call.causal,
        "HAS_STARTS": call.starts is not None,
        "DOCUMENTS": call.first is not None,
        "WINDOW": call.window is not None,
    }


def widths_of(q: Tensor, v: Tensor) -> dict[str, int]:
    """Powers of two that hold the channels of keys and values."""
    return {
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3])),
        "BLOCK_DV": max(16, triton.next_power_of_2(v.shape[3])),
    }


def places_of(call: Any) -> tuple[int, int, int, int]:
    """Steps from sequence to sequence of the starts and of the documents' ends; the window."""
    starts = 0 if call.starts is None or len(call.starts) == 1 else 1
    ends = 0 if call.first is None or len(call.first) == 1 else call.first.stride(0)
    left, right = call.window or (0, 0)
    return starts, ends, left, right


def kind_of_mask(call: Any) -> tuple[Any, ...]:
    """What a launch is made for: whether there are starts and documents, and the window."""
    return call.starts is None, call.first is None, *(call.window or ())


def width_and_zero(call: Any) -> tuple[int, int]:
    """The columns of a table, or of sums: one for each key, and for queries past the keys."""
    return (call.values.shape[-1], call.zero) if call.kind in ("table", "sums") else (0, 0)


def arithmetic_of(q: Tensor) -> dict[str, Any]:
    """How products of float32 are made, and whether the GPU takes PTX."""
    precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
    return {"PRECISION": precision, "PTX": q.is_cuda and torch.version.cuda is not None}


# Queries, keys, warps and stages of a tile, measured on an H200: of halves in heads up to 64, up to
# 128 and wider, then of float32 in heads up to 128 and wider.
FORWARD = ((64, 64, 4, 3), (64, 64, 4, 3), (128, 32, 8, 2), (64, 32, 4, 2), (64, 16, 4, 2))
TO_QUERIES = ((64, 128, 4, 2), (64, 64, 4, 2), (64, 32, 8, 1), (64, 32, 4, 1), (32, 16, 4, 1))
TO_KEYS = ((64, 64, 4, 1), (32, 64, 4, 3), (32, 64, 8, 1), (32, 64, 4, 1), (16, 32, 4, 1))
TO_TABLE = ((64, 4, 2), (64, 4, 2), (32, 4, 1), (32, 4, 1), (32, 4, 1))


def blocks_for(table: tuple[Any, ...], q: Tensor, v: Tensor) -> Any:
    """The entry of one of the tables above for these tensors."""
    width = max(q.shape[3], v.shape[3])
    if q.dtype == torch.float32:
        return table[3 if width <= 128 else 4]
    return table[(width > 64) + (width > 128)]
