"""Norm, rotation and the write to a cache in plain torch operations, as `reference.py` does."""

from __future__ import annotations

from types import EllipsisType

import torch
from torch import Tensor

from posenc._contract.tracing import device_assert, is_readable
from posenc.kernels import reference
from posenc.kernels.spec import LARGEST, Norm, Rows, SlotOutOfRange, Spec, Store, Write


def rotate_and_cache(write: Write, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> Tensor:
    """Rotate ``q`` into a new tensor; rotate ``k``, and write it and ``v`` to their caches.

    A cache is in the dtype of its tensor, or in one of `LARGEST`. Then the numbers stored are
    ``x / scale``, limited to the largest number of the dtype, NaN being 0 in int8. ``scales`` get
    the largest magnitude of the row, NaN aside, divided by the largest number; 1 if that is 0 in
    float32. Everything is computed in the next wider dtype and rounded once.

    Rows and slots out of range raise an error before anything is written.

    A kernel is ``cache_into(write, y, ...)`` with these arguments, where ``q``, ``k`` and ``v`` are
    dense along their last axis, and ``y``, like ``q``, gets the result.
    """
    q, k, v, slots, k_store, v_store, q_weight, k_weight, norm = write
    _check_slots(slots, k_store)
    how = cos, sin, rows, spec, norm
    rotated = _rotated(q, q_weight, *how).to(q.dtype)
    keys = _rotated(k, k_weight, *how)
    kept = slots >= 0
    store(k_store, keys, slots, kept)
    store(v_store, v.to(reference.wider_dtype(v)), slots, kept)
    return rotated


def _check_slots(slots: Tensor, store: Store) -> None:
    count = store.slots()
    outside = (slots < -1) | (slots >= count)
    if not is_readable(slots):
        device_assert(~outside.any(), f"slots must be in [-1, {count}).")
    elif outside.any():
        raise SlotOutOfRange(int(slots[outside][0]), count)


def _rotated(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    spec: Spec,
    norm: Norm,
) -> Tensor:
    """Norm and rotation of ``x``, in the next wider dtype."""
    wide = x.to(reference.wider_dtype(x))
    if weight is None:
        return reference.rotate(wide, cos, sin, rows, spec)
    norm = norm._replace(all_heads=weight.shape[0] != x.shape[3])
    return reference.norm_rotate(wide, weight, cos, sin, rows, spec, norm)


def store(to: Store, x: Tensor, slots: Tensor, kept: Tensor | EllipsisType) -> None:
    """Store the rows of ``x``, in a wide dtype, of all tokens that are ``kept``; ``...`` is all."""
    cache, scale, scales = to
    taken = slots[kept].long()
    page = cache.shape[2]
    pages, places = taken // page, taken % page
    x = x.transpose(1, 2)[kept]  # [tokens, H, D]
    if scales is not None:
        largest = torch.where(x.isnan(), 0, x.abs()).amax(-1)
        made = (largest / LARGEST[cache.dtype]).to(torch.float32)
        made = torch.where(made == 0, 1, made)
        scales[pages, :, places] = made
        x = x / made.unsqueeze(-1)
    elif scale is not None:
        x = x / scale.transpose(1, 2)[kept].unsqueeze(-1)
    if cache.dtype in LARGEST:
        # Not every device can index float8.
        cache.view(torch.uint8)[pages, :, places] = encode(x, cache.dtype).view(torch.uint8)
    else:
        cache[pages, :, places] = x.to(cache.dtype)


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x``, float32 or float64, limited and rounded once to a dtype of `LARGEST`."""
    x = x.clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        return x.nan_to_num(0.0).round().to(dtype)
    if x.dtype == torch.float64:
        # torch converts by way of float32. Rounding to odd there makes the second rounding right:
        # the number is cut off, and its last bit says that something was.
        near = x.to(torch.float32)
        beyond, inexact = near.double().abs() > x.abs(), near.double() != x
        bits = near.view(torch.int32) - beyond.to(torch.int32)
        x = (bits | inexact.to(torch.int32)).view(torch.float32)
    return x.to(dtype)
