"""Norm, rotation and the write to a cache, as an op."""

from __future__ import annotations

from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc._contract.overlap import check_no_internal_overlap
from posenc._contract.tracing import device_assert, is_readable
from posenc.ops.op import MaybeWritten, Op, Start, Written, replaced
from posenc.ops.plan import Plan, Target
from posenc.ops.rotation import reference
from posenc.ops.rotation.rotation import (
    check_devices,
    check_rotation,
    check_values,
    check_weight,
    refuse,
    strided_like,
    turn,
)
from posenc.ops.rotation.spec import (
    LARGEST,
    PAGES_OF_TOKENS,
    TOKENS_FIRST,
    CacheTarget,
    CacheWrite,
    Norm,
    SlotOutOfRange,
    Spec,
    TableRows,
    Turn,
    flatten,
    heads_first,
)

_WHO = "posenc::rotate_and_cache"


def rotate_and_cache(
    write: CacheWrite, cos: Tensor, sin: Tensor, rows: TableRows, spec: Spec
) -> Tensor:
    """Rotate ``q`` into a new tensor; rotate ``k``, and write it and ``v`` to their caches.

    A cache is in the dtype of its tensor, or in one of `LARGEST`. Then the numbers stored are
    ``x / scale``, limited to the largest number of the dtype, NaN being 0 in int8. ``scales`` get
    the largest magnitude of the row, NaN aside, divided by the largest number; 1 if that is 0 in
    float32. Everything is computed in the next wider dtype, and rounded to 8 bits by way of
    float32.

    Rows and slots out of range raise an error before anything is written. There is no gradient:
    the caller refuses tensors that require one.
    """
    q, k, v, slots, k_target, v_target, q_weight, k_weight, norm = write
    (k_cache, k_scale, k_scales), (v_cache, v_scale, v_scales) = k_target, v_target
    written = k_cache, v_cache, k_scales, v_scales
    read = slots, q_weight, k_weight, k_scale, v_scale, cos, sin
    numbers = *flatten(rows, spec), norm.eps, norm.shift
    rotated: Tensor = rotate_and_cache_op(q, k, v, *written, *read, *numbers)
    return rotated


def by_operations(
    write: CacheWrite, cos: Tensor, sin: Tensor, rows: TableRows, spec: Spec
) -> Tensor:
    """:func:`rotate_and_cache` in plain torch operations."""
    q, k, v, slots, k_target, v_target, q_weight, k_weight, norm = write
    count = k_target.slots()
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

    queries, keys, is_stored = rotated(q, q_weight).to(q.dtype), rotated(k, k_weight), slots >= 0
    store(k_target, keys, slots, is_stored)
    store(v_target, v.to(reference.wider_dtype(v)), slots, is_stored)
    return queries


def store(target: CacheTarget, x: Tensor, slots: Tensor, is_stored: Tensor | EllipsisType) -> None:
    """Store the rows of ``x``, in a wide dtype, of tokens that ``is_stored``; ``...`` is all."""
    cache, scale, scales = target
    taken = slots[is_stored].long()
    page = cache.shape[2]
    pages, places = taken // page, taken % page
    x = x.transpose(1, 2)[is_stored]  # [tokens, H, D]
    if scales is not None:
        largest = torch.where(x.isnan(), 0, x.abs()).amax(-1)
        divisor = (largest / LARGEST[cache.dtype]).to(torch.float32)
        divisor = torch.where(divisor == 0, 1, divisor)
        scales[pages, :, places] = divisor
        x = x / divisor.unsqueeze(-1)
    elif scale is not None:
        x = x / scale.transpose(1, 2)[is_stored].unsqueeze(-1)
    if cache.dtype in LARGEST:
        # Not every device can index float8.
        cache.view(torch.uint8)[pages, :, places] = encode(x, cache.dtype).view(torch.uint8)
    else:
        cache[pages, :, places] = x.to(cache.dtype)


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` limited and rounded to a dtype of `LARGEST`, by way of float32."""
    x = x.to(torch.float32).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (x.nan_to_num(0.0).round() if dtype == torch.int8 else x).to(dtype)


class CacheCall(NamedTuple):
    """Rotate queries, and write rotated keys, and values, to caches."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Written
    v_cache: Written
    k_scales: MaybeWritten
    v_scales: MaybeWritten
    slots: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    start: Start
    layout: int
    eps: float
    shift: float

    @property
    def xs(self) -> list[Tensor]:
        """The tensors that are rotated."""
        return [self.q, self.k]


def _in_usual_form(call: CacheCall) -> CacheCall:
    """A call of (B, H, T, D), (pages, H, page, D) and scales of three axes."""
    q, k, v, slots, layout = call.q, call.k, call.v, call.slots, call.layout
    if q.dim() == k.dim() == v.dim() == 3 and slots.dim() == 1:
        # Tokens (T, H, D).
        q, k, v, slots, layout = q[None], k[None], v[None], slots[None], layout | TOKENS_FIRST
    if q.dim() == k.dim() == v.dim() == 4:
        q, k, v = (heads_first(x, layout) for x in (q, k, v))
    caches = [call.k_cache, call.v_cache, call.k_scales, call.v_scales]
    if layout & PAGES_OF_TOKENS:
        caches = [x if x is None or x.dim() < 3 else x.transpose(1, 2) for x in caches]
    k_cache, v_cache, k_scales, v_scales = caches
    forms: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "slots": slots,
        "k_cache": k_cache,
        "v_cache": v_cache,
    }
    forms |= {"k_scales": k_scales, "v_scales": v_scales}
    forms |= {"k_scale": _of_all(call.k_scale, k), "v_scale": _of_all(call.v_scale, v)}
    forms |= {"layout": layout & ~(TOKENS_FIRST | PAGES_OF_TOKENS)}
    return replaced(call, forms)


def _of_all(scale: Tensor | None, x: Tensor) -> Tensor | None:
    """A scale () or (H,) as (B, H, T), with strides of zero."""
    if scale is None or scale.dim() > 1 or x.dim() != 4:
        return scale
    if scale.dim() == 1 and scale.shape[0] not in (1, x.shape[1]):
        return scale
    return scale.reshape(1, -1, 1).expand(x.shape[:3])


def _write_of(call: CacheCall) -> tuple[Any, ...]:
    """A call in the usual form as the arguments of :func:`by_operations`."""
    k_target = CacheTarget(call.k_cache, call.k_scale, call.k_scales)
    v_target = CacheTarget(call.v_cache, call.v_scale, call.v_scales)
    norm = Norm(call.eps, call.shift)
    weights = call.q_weight, call.k_weight
    write = CacheWrite(call.q, call.k, call.v, call.slots, k_target, v_target, *weights, norm)
    return write, *turn(call)


def _check(call: CacheCall) -> Turn:
    """Refuse a call in the usual form with which a kernel would access memory out of bounds."""
    written = call.k_cache, call.v_cache, call.k_scales, call.v_scales
    read = call.slots, call.q_weight, call.k_weight, call.k_scale, call.v_scale
    others = *written, *read
    rotation = check_rotation(call, call.v, *others)
    for x, weight in ((call.q, call.q_weight), (call.k, call.k_weight)):
        if weight is not None:
            check_weight(weight, x)
    if not _is_in_bounds(call):
        refuse(
            _WHO, "v, slots, caches and scales must fit q and k", call.q, call.k, call.v, *others
        )
    for cache in (call.k_cache, call.v_cache):
        check_no_internal_overlap(_WHO, cache)
    return rotation


def _run(call: CacheCall) -> tuple[Tensor, ...]:
    usual = _in_usual_form(call)
    check_values(usual, _check(usual))
    y = by_operations(*_write_of(usual))
    return (strided_like(_back(y, call), call.q),)


def _back(y: Any, call: CacheCall) -> Any:
    """Rotated queries in the form of those of the call."""
    return y.transpose(1, 2)[0] if call.q.dim() == 3 else heads_first(y, call.layout)


def _is_in_bounds(call: CacheCall) -> bool:
    """Whether a kernel stays inside values, slots and caches; queries and keys were checked."""
    q, k, v, slots = call.q, call.k, call.v, call.slots
    k_cache, v_cache = call.k_cache, call.v_cache
    return (
        v.dim() == 4
        and (v.shape[0], v.shape[2]) == slots.shape == (q.shape[0], q.shape[2])
        and slots.dtype in (torch.int64, torch.int32)
        and q.dtype == k.dtype == v.dtype
        and _holds(CacheTarget(k_cache, call.k_scale, call.k_scales), k)
        and _holds(CacheTarget(v_cache, call.v_scale, call.v_scales), v)
        and k_cache.shape[0] * k_cache.shape[2] == v_cache.shape[0] * v_cache.shape[2]
    )


def _holds(target: CacheTarget, x: Tensor) -> bool:
    """Whether the rows of ``x`` fit the cache, and its scales are those of a cache of 8 bits."""
    cache, scale, scales = target
    if cache.dim() != 4 or (cache.shape[1], cache.shape[3]) != (x.shape[1], x.shape[3]):
        return False
    if (cache.shape[3] > 1 and cache.stride(3) != 1) or cache.dtype not in (x.dtype, *LARGEST):
        return False
    if scale is not None and scales is not None:
        return False
    numbers, shape = (scales, cache.shape[:3]) if scale is None else (scale, x.shape[:3])
    return numbers is None or (
        cache.dtype in LARGEST and numbers.dtype == torch.float32 and numbers.shape == shape
    )


def _plan(call: CacheCall, plan: Plan, target: Target) -> None:
    from posenc.ops.cache.triton import cache as kernels

    _check(_in_usual_form(call))
    (result,) = plan.results
    rows = {name: plan.with_dense_rows(getattr(call, name)) for name in ("q", "k", "v")}
    written = result if result.has_dense_rows() else plan.empty(result.shape, result.dtype)
    dense = _in_usual_form(replaced(call, rows))
    y: Any = _in_usual_form(replaced(call, {**rows, "q": written})).q
    kernels.plan_cache(dense, y, plan, target)
    if written is not result:
        plan.copy(result, written)


def _results(call: CacheCall) -> tuple[Tensor, ...]:
    check_devices(_WHO, *call)
    return (torch.empty_like(call.q),)


def _operations(call: CacheCall) -> tuple[Tensor, ...]:
    return (_back(by_operations(*_write_of(_in_usual_form(call))), call),)


rotate_and_cache_op = Op("rotate_and_cache", CacheCall, _results, 1, _run, _operations, plan=_plan)
