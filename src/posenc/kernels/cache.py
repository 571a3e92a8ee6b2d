"""Norm, rotation and the write to a cache, as an op."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from posenc._contract.overlap import check_no_internal_overlap
from posenc._contract.tracing import device_assert, is_readable
from posenc.kernels import reference, rotation
from posenc.kernels.backends import kernel_for
from posenc.kernels.op import Op
from posenc.kernels.rotation import check_rotation, check_weight, refuse, with_dense_rows
from posenc.kernels.spec import (
    LARGEST,
    Norm,
    Rows,
    SlotOutOfRange,
    Spec,
    Store,
    Write,
    flatten,
    unflatten,
)

_WHO = "posenc::rotate_and_cache"


def rotate_and_cache(write: Write, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> Tensor:
    """Rotate ``q`` into a new tensor; rotate ``k``, and write it and ``v`` to their caches.

    A cache is in the dtype of its tensor, or in one of `LARGEST`. Then the numbers stored are
    ``x / scale``, limited to the largest number of the dtype, NaN being 0 in int8. ``scales`` get
    the largest magnitude of the row, NaN aside, divided by the largest number; 1 if that is 0 in
    float32. Everything is computed in the next wider dtype, and rounded to 8 bits by way of
    float32.

    Rows and slots out of range raise an error before anything is written. There is no gradient:
    the caller refuses tensors that require one.
    """
    q, k, v, slots, k_store, v_store, q_weight, k_weight, norm = write
    (k_cache, k_scale, k_scales), (v_cache, v_scale, v_scales) = k_store, v_store
    written = k_cache, v_cache, k_scales, v_scales
    read = slots, q_weight, k_weight, k_scale, v_scale, cos, sin
    how = *flatten(rows, spec), norm.eps, norm.shift
    rotated: Tensor = rotate_and_cache_op(q, k, v, *written, *read, *how)
    return rotated


def by_operations(write: Write, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> Tensor:
    """:func:`rotate_and_cache` in plain torch operations."""
    q, k, v, slots, k_store, v_store, q_weight, k_weight, norm = write
    count = k_store.slots()
    outside = (slots < -1) | (slots >= count)
    if not is_readable(slots):
        device_assert(~outside.any(), f"slots must be in [-1, {count}).")
    elif outside.any():
        raise SlotOutOfRange(int(slots[outside][0]), count)

    def rotated(x: Tensor, weight: Tensor | None) -> Tensor:
        """Norm and rotation of ``x``, in the next wider dtype."""
        wide = x.to(reference.wider_dtype(x))
        if weight is None:
            return reference.rotate(wide, cos, sin, rows, spec)
        return reference.norm_rotate(wide, weight, cos, sin, rows, spec, norm)

    queries, keys, kept = rotated(q, q_weight).to(q.dtype), rotated(k, k_weight), slots >= 0
    store(k_store, keys, slots, kept)
    store(v_store, v.to(reference.wider_dtype(v)), slots, kept)
    return queries


def store(to: Store, x: Tensor, slots: Tensor, kept: Tensor | EllipsisType) -> None:
    """Store the rows of ``x``, in a wide dtype, of all tokens that are ``kept``; ``...`` is all."""
    cache, scale, scales = to
    taken = slots[kept].long()
    page = cache.shape[2]
    pages, places = taken // page, taken % page
    x = x.transpose(1, 2)[kept]  # [tokens, H, D]
    if scales is not None:
        largest = torch.where(x.isnan(), 0, x.abs()).amax(-1)
        divisor = (largest / LARGEST[cache.dtype]).to(torch.float32)
        divisor = torch.where(divisor == 0, 1, divisor)
        scales[pages, :, places] = divisor
        x = x / divisor.unsqueeze(-1)
    elif scale is not None:
        x = x / scale.transpose(1, 2)[kept].unsqueeze(-1)
    if cache.dtype in LARGEST:
        # Not every device can index float8.
        cache.view(torch.uint8)[pages, :, places] = encode(x, cache.dtype).view(torch.uint8)
    else:
        cache[pages, :, places] = x.to(cache.dtype)


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` limited and rounded to a dtype of `LARGEST`, by way of float32."""
    x = x.to(torch.float32).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (x.nan_to_num(0.0).round() if dtype == torch.int8 else x).to(dtype)


def _write_of(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Any, ...]:
    """The arguments of the op as those of :func:`by_operations`."""
    k_cache, v_cache, k_scales, v_scales, slots, q_weight, k_weight, k_scale, v_scale, *how = (
        arguments
    )
    k_store, v_store = Store(k_cache, k_scale, k_scales), Store(v_cache, v_scale, v_scales)
    _, _, cos, sin, rows, spec = unflatten((q, k, *how[:5]))
    write = Write(q, k, v, slots, k_store, v_store, q_weight, k_weight, Norm(*how[5:]))
    return write, cos, sin, rows, spec


def _run(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    """The op in Python; it refuses what a kernel would access out of bounds."""
    check_rotation((q, k, *arguments[9:14]), v, *arguments[:9])
    write, *how = _write_of(q, k, v, *arguments)
    for x, weight in ((q, write.q_weight), (k, write.k_weight)):
        if weight is not None:
            check_weight(weight, x)
    if not _is_in_bounds(write):
        refuse(_WHO, "v, slots, caches and scales must fit q and k", q, k, v, *arguments[:9])
    for cache in (write.k_store.cache, write.v_store.cache):
        check_no_internal_overlap(_WHO, cache)
    kernel = kernel_for(q)
    if kernel is reference:
        return rotation.strided_like(by_operations(write, *how), q)
    dense = write._replace(k=with_dense_rows(k), v=with_dense_rows(v))
    increment_version([t for t in arguments[:4] if t is not None])
    return rotation.on_dense_rows(q, lambda q, y: kernel.cache_into(dense._replace(q=q), y, *how))[
        0
    ]


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


rotate_and_cache_op = Op(
    "rotate_and_cache",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!)? k_scales, Tensor(d!)? v_scales, Tensor slots, Tensor? q_weight, "
    "Tensor? k_weight, Tensor? k_scale, Tensor? v_scale, "
    f"{rotation.HOW}, float eps, float shift) -> Tensor",
    _run,
    lambda *arguments: by_operations(*_write_of(*arguments)),
    rotation.fake_like(1),
    writes=(3, 4, 5, 6),
)
