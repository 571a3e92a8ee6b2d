"""One launch that rotates queries, and writes rotated keys, and values, to their caches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from posenc.kernels.spec import FORMATS, Norm, Rows, Spec, Store, Write
from posenc.kernels.triton.cache_kernel import write_cache
from posenc.kernels.triton.launch import Launch, launch_for
from posenc.kernels.triton.pairs import (
    index,
    shared_constants,
    table_numbers,
)
from posenc.kernels.triton.rotate import has_capability, overlaps_the_launch


def cache_into(write: Write, y: Tensor, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> None:
    """Rotate ``q`` into ``y``, write ``k`` and ``v``; see `reference_cache.rotate_and_cache`."""
    q, k, v, slots, k_store, v_store, q_weight, k_weight, norm = write
    if q.shape[0] * q.shape[2] == 0:
        return
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    positions = rows.positions
    weights = _dense(q_weight), _dense(k_weight)
    k_cache, k_scale, k_kind = _target(k_store)
    v_cache, v_scale, v_kind = _target(v_store)
    others = positions, *weights, k_scale, v_scale
    present = (q, k, v, y, k_cache, v_cache, slots, cos, sin, *[t for t in others if t is not None])
    # The kernel reads nothing of the tensor that stands for an absent one.
    tensors = (*present[:9], *[q if t is None else t for t in others])
    absent = tuple(t is None for t in others)
    described = ("cache", k_kind, v_kind, absent, spec, norm)
    prepare = partial(_launch, tensors, weights, (k_kind, v_kind), rows, spec, norm)
    launch_for(described, present, prepare)(tensors, rows.start)


def _dense(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.resolve_neg().contiguous()


def _target(store: Store) -> tuple[Tensor, Tensor | None, tuple[int, int]]:
    """The cache, its scale or scales, its format, and where the scale comes from."""
    cache, scale, scales = store
    code = FORMATS.get(cache.dtype, 0)
    origin = 1 if scale is not None else 2 if scales is not None else 0
    return (
        cache.view(torch.uint8) if code else cache,
        scales if origin == 2 else scale,
        (code, origin),
    )


def _launch(
    tensors: tuple[Tensor, ...], weights: Any, kinds: Any, rows: Rows, spec: Spec, norm: Norm
) -> Launch:
    q, k, v, y, k_cache, v_cache, slots, cos, _, _, _, _, k_scale, v_scale = tensors
    (batch, heads, length, width), values = q.shape, v.shape[3]
    norms = [0 if w is None else 1 if w.shape[0] == width else 2 for w in weights]
    (k_format, k_origin), (v_format, v_origin) = kinds
    numbers = (
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *y.stride()[:3],
        *k_cache.stride()[:3], k_cache.shape[2], *v_cache.stride()[:3], v_cache.shape[2],
        *(k_scale.stride() if k_origin else (0, 0, 0)),
        *(v_scale.stride() if v_origin else (0, 0, 0)),
        *slots.stride(), k_cache.shape[0] * k_cache.shape[2], *table_numbers(cos, rows), length,
    )  # fmt: skip
    channels, warps = tile(batch * length)
    sizes = (q, norms[0]), (k, norms[1]), (v, 0)
    blocks = [_heads(x, kind, channels) for x, kind in sizes]
    early = overlaps_the_launch(q)
    constants = {
        # As arguments these would be float32.
        "EPS": norm.eps, "SHIFT": norm.shift, "ONE_SEQUENCE": batch == 1,
        "Q_HEADS": heads, "K_HEADS": k.shape[1], "V_HEADS": v.shape[1],
        "WIDTH": width, "V_WIDTH": values,
        **shared_constants(q, cos, rows, spec),
        "Q_NORM": norms[0], "K_NORM": norms[1],
        "K_FORMAT": k_format, "V_FORMAT": v_format, "K_SCALING": k_origin, "V_SCALING": v_origin,
        # Instructions for float8 round float32, not float64.
        "NATIVE": q.element_size() == 2 and has_capability(q, 9, 0),
        "INDEX": index(q, k, v, y, cos), "EARLY": early,
        "BLOCK_V": triton.next_power_of_2(values),
        "Q_BLOCK": blocks[0], "K_BLOCK": blocks[1], "V_BLOCK": blocks[2],
    }  # fmt: skip
    count = sum(triton.cdiv(x.shape[1], n) for x, n in zip((q, k, v), blocks, strict=True))
    grid, options = (batch * length, count, 1), {"launch_pdl": True} if early else {}
    return Launch(write_cache, grid, numbers, constants, num_warps=warps, **options)


def tile(tokens: int) -> tuple[int, int]:
    """Channels and warps of a program, measured on an H200; benchmarks/README.md says how."""
    for most, found in ((64, (2048, 8)), (128, (2048, 4)), (256, (1024, 4)), (1024, (4096, 4))):
        if tokens <= most:
            return found
    return 1024, 1


def _heads(x: Tensor, norm: int, channels: int) -> int:
    """Heads of one program: all for a norm over all heads, else as many as ``channels`` hold."""
    most = int(triton.next_power_of_2(x.shape[1]))
    if norm == 2:
        return most
    return min(most, max(1, channels // int(triton.next_power_of_2(x.shape[3]))))
