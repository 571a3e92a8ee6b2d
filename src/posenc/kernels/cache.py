"""Norm, rotation and the write to a cache, as an op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from posenc._contract.overlap import check_no_internal_overlap
from posenc.kernels import reference, reference_cache, rotation
from posenc.kernels.backends import kernel_for
from posenc.kernels.op import Op
from posenc.kernels.rotation import check_rotation, check_weight, dense, has_dense_rows, refuse
from posenc.kernels.spec import LARGEST, Norm, Rows, Spec, Store, Write, flatten, unflatten


def rotate_and_cache(write: Write, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> Tensor:
    """Rotate ``q``, and write ``k`` and ``v``; see `reference_cache.rotate_and_cache`.

    There is no gradient: the caller refuses tensors that require one.
    """
    q, k, v, slots, k_store, v_store, q_weight, k_weight, norm = write
    (k_cache, k_scale, k_scales), (v_cache, v_scale, v_scales) = k_store, v_store
    written = k_cache, v_cache, k_scales, v_scales
    read = slots, q_weight, k_weight, k_scale, v_scale, cos, sin
    how = *flatten(rows, spec), norm.eps, norm.shift
    rotated: Tensor = rotate_and_cache_op(q, k, v, *written, *read, *how)
    return rotated


def run(write: Write, *how: Any) -> Tensor:
    """Run a kernel from Python; the result has the strides of `torch.empty_like`."""
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


def _write_of(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Any, ...]:
    """The arguments of the op as those of :func:`run`."""
    k_cache, v_cache, k_scales, v_scales, slots, q_weight, k_weight, k_scale, v_scale, *how = (
        arguments
    )
    k_store, v_store = Store(k_cache, k_scale, k_scales), Store(v_cache, v_scale, v_scales)
    _, _, cos, sin, rows, spec = unflatten((q, k, *how[:5]))
    write = Write(q, k, v, slots, k_store, v_store, q_weight, k_weight, Norm(*how[5:]))
    return write, cos, sin, rows, spec


def _run(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    """The op in Python; it checks what a kernel would access out of bounds."""
    check_rotation(_WHO, (q, k, *arguments[9:14]), v, *arguments[:9])
    tokens, batch = (q.shape[0], q.shape[2]), (*v.shape[:1], *v.shape[2:3])
    if v.dim() != 4 or batch != tokens or not q.dtype == k.dtype == v.dtype:
        refuse(_WHO, "v must be (B, H, T, D) like q and k, and of their dtype", q, k, v)
    write, *how = _write_of(q, k, v, *arguments)
    slots, k_store, v_store = write.slots, write.k_store, write.v_store
    if slots.shape != tokens or slots.dtype not in (torch.int64, torch.int32):
        refuse(_WHO, f"slots must be int64 or int32, {tuple(tokens)}", slots)
    for x, weight in ((q, write.q_weight), (k, write.k_weight)):
        if weight is not None:
            check_weight(_WHO, weight, x)
    for x, store in ((k, k_store), (v, v_store)):
        _check_store(x, store)
    if k_store.slots() != v_store.slots():
        rule = "caches must have one number of slots"
        refuse(_WHO, rule, k_store.cache, v_store.cache)
    return run(write, *how)


def _operations(*arguments: Any) -> Tensor:
    return reference_cache.rotate_and_cache(*_write_of(*arguments))


def _check_store(x: Tensor, store: Store) -> None:
    cache, scale, scales = store
    if (
        cache.dim() != 4
        or (cache.shape[1], cache.shape[3]) != (x.shape[1], x.shape[3])
        or (cache.dtype != x.dtype and cache.dtype not in LARGEST)
        or cache.stride(3) != 1
    ):
        refuse(_WHO, "a cache must be (pages, H, page, D), and dense along D", cache, x)
    check_no_internal_overlap(_WHO, cache)
    both = scale is not None and scales is not None
    if both or ((scale is not None or scales is not None) and cache.dtype == x.dtype):
        refuse(
            _WHO,
            "only a cache of 8 bits may have a scale or scales, and must not have both",
            scale,
            scales,
            cache,
        )
    for given, shape in ((scale, x.shape[:3]), (scales, cache.shape[:3])):
        if given is not None and (given.shape != shape or given.dtype != torch.float32):
            refuse(_WHO, f"this scale must be float32, {tuple(shape)}", given)


rotate_and_cache_op = Op(
    "rotate_and_cache",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!)? k_scales, Tensor(d!)? v_scales, Tensor slots, Tensor? q_weight, "
    "Tensor? k_weight, Tensor? k_scale, Tensor? v_scale, "
    f"{rotation.HOW}, float eps, float shift) -> Tensor",
    _run,
    _operations,
    rotation.fake_like("rotate_and_cache", 1),
    writes=(3, 4, 5, 6),
)
