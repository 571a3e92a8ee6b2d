"""Norm, rotation and the write to a cache: the choice of the kernel, and the op.

As in `dispatch.py`, a plain eager call runs its kernel directly, and torch.compile and dispatch
modes call the op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from posenc._contract.overlap import check_no_internal_overlap
from posenc._contract.tracing import in_transform, is_exporting, is_plain
from posenc.kernels import ops, reference, reference_cache
from posenc.kernels.dispatch import dense, has_dense_rows, kernel_for
from posenc.kernels.spec import LARGEST, Norm, Rows, Spec, Store, Write, flatten


def rotate_and_cache(write: Write, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> Tensor:
    """Rotate ``q``, and write ``k`` and ``v``; see `reference_cache.rotate_and_cache`.

    There is no gradient: the caller refuses tensors that require one.
    """
    q, k, v, slots, k_store, v_store, q_weight, k_weight, norm = write
    if is_plain(q, k, v, slots, k_store.cache, v_store.cache, cos, sin) and not q.is_meta:
        return run(write, cos, sin, rows, spec)
    if is_exporting() or in_transform(q):
        return reference_cache.rotate_and_cache(write, cos, sin, rows, spec)
    (k_cache, k_scale, k_scales), (v_cache, v_scale, v_scales) = k_store, v_store
    written = k_cache, v_cache, k_scales, v_scales
    read = slots, q_weight, k_weight, k_scale, v_scale, cos, sin
    how = *flatten(rows, spec), norm.eps, norm.shift
    rotated: Tensor = torch.ops.posenc.rotate_and_cache.default(q, k, v, *written, *read, *how)
    return rotated


def run(write: Write, *how: Any) -> Tensor:
    """Run the kernel; the result has the strides of `torch.empty_like`."""
    q, k, v, _, k_store, v_store, *_ = write
    kernel, y = kernel_for(q), torch.empty_like(q)
    if kernel is reference:
        made = reference_cache.rotate_and_cache(write, *how)
        return made if made.stride() == y.stride() else y.copy_(made)
    if not has_dense_rows(q, k, v):
        write = write._replace(q=dense(q), k=dense(k), v=dense(v))
    made = y if y.stride(-1) == 1 else torch.empty(y.shape, dtype=y.dtype, device=y.device)
    kernel.cache_into(write, made, *how)
    written = k_store.cache, v_store.cache, k_store.scales, v_store.scales
    increment_version([t for t in written if t is not None])
    return y if made is y else y.copy_(made)


_WHO = "posenc::rotate_and_cache"


def _op(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    """The op; it checks what a kernel would access out of bounds, except slots and positions."""
    k_cache, v_cache, k_scales, v_scales, slots, q_weight, k_weight, k_scale, v_scale, *how = (
        arguments
    )
    k_store, v_store = Store(k_cache, k_scale, k_scales), Store(v_cache, v_scale, v_scales)
    _, cos, sin, rows, spec = ops.check_rotation(_WHO, (q, k, *how[:8]), v, *arguments[:9])
    tokens, batch = (q.shape[0], q.shape[2]), (*v.shape[:1], *v.shape[2:3])
    if v.dim() != 4 or batch != tokens or not q.dtype == k.dtype == v.dtype:
        ops.refuse(_WHO, "v must be (B, H, T, D) like q and k, and of their dtype", q, k, v)
    if slots.shape != tokens or slots.dtype not in (torch.int64, torch.int32):
        ops.refuse(_WHO, f"slots must be int64 or int32, {tuple(tokens)}", slots)
    for x, weight in ((q, q_weight), (k, k_weight)):
        if weight is not None:
            ops.check_weight(_WHO, weight, x, weight.shape != x.shape[3:])
    for x, store in ((k, k_store), (v, v_store)):
        _check_store(x, store)
    if k_store.slots() != v_store.slots():
        ops.refuse(_WHO, "caches must have one number of slots", k_cache, v_cache)
    norm = Norm(*how[8:])
    write = Write(q, k, v, slots, k_store, v_store, q_weight, k_weight, norm)
    return run(write, cos, sin, rows, spec)


def _check_store(x: Tensor, store: Store) -> None:
    cache, scale, scales = store
    if (
        cache.dim() != 4
        or (cache.shape[1], cache.shape[3]) != (x.shape[1], x.shape[3])
        or (cache.dtype != x.dtype and cache.dtype not in LARGEST)
        or cache.stride(3) != 1
    ):
        ops.refuse(_WHO, "a cache must be (pages, H, page, D), and dense along D", cache, x)
    check_no_internal_overlap(_WHO, cache)
    both = scale is not None and scales is not None
    if both or ((scale is not None or scales is not None) and cache.dtype == x.dtype):
        ops.refuse(
            _WHO,
            "only a cache of 8 bits may have a scale or scales, and must not have both",
            scale,
            scales,
            cache,
        )
    for given, shape in ((scale, x.shape[:3]), (scales, cache.shape[:3])):
        if given is not None and (given.shape != shape or given.dtype != torch.float32):
            ops.refuse(_WHO, f"this scale must be float32, {tuple(shape)}", given)


ops.define_op(
    "rotate_and_cache",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!)? k_scales, Tensor(d!)? v_scales, Tensor slots, Tensor? q_weight, "
    "Tensor? k_weight, Tensor? k_scale, Tensor? v_scale, "
    f"{ops.HOW}, float eps, float shift) -> Tensor",
    _op,
    ops.fake_like("rotate_and_cache", 1),
)
