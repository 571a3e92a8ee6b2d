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
    """The op in Python; it refuses what a kernel would access out of bounds."""
    check_rotation(_WHO, (q, k, *arguments[9:14]), v, *arguments[:9])
    write, *how = _write_of(q, k, v, *arguments)
    for x, weight in ((q, write.q_weight), (k, write.k_weight)):
        if weight is not None:
            check_weight(_WHO, weight, x)
    if not _is_in_bounds(write):
        refuse(_WHO, "v, slots, caches and scales must fit q and k", q, k, v, *arguments[:9])
    for cache in (write.k_store.cache, write.v_store.cache):
        check_no_internal_overlap(_WHO, cache)
    return run(write, *how)


def _is_in_bounds(write: Write) -> bool:
    """Whether a kernel stays inside values, slots and caches; queries and keys were checked."""
    q, k, v, slots, k_store, v_store, *_ = write
    return (
        v.dim() == 4
        and (v.shape[0], v.shape[2]) == slots.shape == (q.shape[0], q.shape[2])
        and slots.dtype in (torch.int64, torch.int32)
        and q.dtype == k.dtype == v.dtype
        and _holds(k_store, k)
        and _holds(v_store, v)
        and k_store.slots() == v_store.slots()
    )


def _holds(store: Store, x: Tensor) -> bool:
    """Whether the rows of ``x`` fit the cache, and its scales are those of a cache of 8 bits."""
    cache, scale, scales = store
    if cache.dim() != 4 or (cache.shape[1], cache.shape[3]) != (x.shape[1], x.shape[3]):
        return False
    if cache.stride(3) != 1 or cache.dtype not in (x.dtype, *LARGEST):
        return False
    if scale is not None and scales is not None:
        return False
    numbers, shape = (scales, cache.shape[:3]) if scale is None else (scale, x.shape[:3])
    return numbers is None or (
        cache.dtype in LARGEST and numbers.dtype == torch.float32 and numbers.shape == shape
    )


def _operations(*arguments: Any) -> Tensor:
    return reference_cache.rotate_and_cache(*_write_of(*arguments))


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
