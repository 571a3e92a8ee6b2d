"""One launch that rotates queries, and writes rotated keys, and values, to their caches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from posenc.ops.plan import Constant, Operand, Plan, Target, cdiv, power_of_two, strides
from posenc.ops.rotation.spec import FORMATS, is_of_all_heads
from posenc.ops.rotation.triton.norm import (
    Norm,
    load_channels,
    norm_factors,
    norm_of,
    norm_scale,
)
from posenc.ops.rotation.triton.pairs import (
    channels_of,
    heads_of,
    index,
    load_tables,
    others_of,
    rotated,
    rows_at,
    store_pairs,
    table_of,
    turn_in,
)
from posenc.ops.rotation.triton.rotate import overlaps_the_launch


class Pages(NamedTuple):
    """A cache ``(pages, H, page, D)``, and its scales, by their strides; None if it has none.

    Scales are `is_given`, for each sequence, head and token, or worked out and stored as the rows.
    """

    at: Any
    page: Any
    head: Any
    place: Any
    size: Any
    format: Any  # see `FORMATS` in spec.py
    scale: Any
    scale_first: Any
    scale_head: Any
    scale_last: Any
    is_given: Any


class Slots(NamedTuple):
    """The place of each token, ``(B, T)``, of so many `places` of a cache."""

    at: Any
    b: Any
    t: Any
    places: Any


def plan_cache(call: Any, y: Operand, plan: Plan, target: Target) -> None:
    """Rotate queries into ``y``, and write keys and values; see `cache/cache.py`.

    The call is in the usual form: (B, H, T, D), (pages, H, page, D) and scales of three axes.
    """
    q, k, v = call.q, call.k, call.v
    if q.shape[0] * q.shape[2] == 0:
        return
    cos, sin, rows, spec = turn_in(plan, call, *q.shape[2:])
    weights = [
        w if w is None or w.is_contiguous() else plan.contiguous(w)
        for w in (call.q_weight, call.k_weight)
    ]
    batch, _, length, _ = q.shape
    norms = [_norm_of(x, w, call) for x, w in zip((q, k), weights, strict=True)]
    channels, warps = tile(batch * length)
    sizes = (q, weights[0]), (k, weights[1]), (v, None)
    blocks = [_heads(x, w, channels) for x, w in sizes]
    early = overlaps_the_launch(q, target)
    constants = {
        "ONE_SEQUENCE": batch == 1,
        "V_WIDTH": v.shape[3],
        # Instructions for float8 round float32, not float64.
        "NATIVE": q.element_size() == 2 and target.has(9),
        "INDEX": index(q, k, v, y, cos),
        "EARLY": early,
        "BLOCK_V": power_of_two(v.shape[3]),
        "Q_BLOCK": blocks[0],
        "K_BLOCK": blocks[1],
        "V_BLOCK": blocks[2],
    }
    caches = (
        _pages_of(call.k_cache, call.k_scale, call.k_scales),
        _pages_of(call.v_cache, call.v_scale, call.v_scales),
    )
    places = call.k_cache.shape[0] * call.k_cache.shape[2]
    slots = Slots(call.slots, call.slots.stride(0), call.slots.stride(1), places)
    arguments = (
        heads_of(q), norms[0], heads_of(y), heads_of(k), norms[1], heads_of(v), *caches, slots,
        table_of(cos, sin, rows, spec.transposed), channels_of(q, cos, spec), length,
    )  # fmt: skip
    count = sum(cdiv(x.shape[1], n) for x, n in zip((q, k, v), blocks, strict=True))
    options = {"launch_pdl": True} if early else {}
    plan.launch(
        write_cache, (batch * length, count), arguments, constants, num_warps=warps, **options
    )


def _pages_of(cache: Operand, scale: Operand | None, scales: Operand | None) -> Pages:
    """A cache as kernels read it, and its scale or scales."""
    code, found = FORMATS.get(cache.dtype, 0), scales if scale is None else scale
    page, head, place = strides(cache)
    first, of_head, last = (0, 0, 0) if found is None else found.stride()
    return Pages(
        at=cache.view(torch.uint8) if code else cache,
        page=page,
        head=head,
        place=place,
        size=cache.shape[2],
        format=Constant(code),
        scale=Constant(None) if found is None else found,
        scale_first=first,
        scale_head=of_head,
        scale_last=last,
        is_given=Constant(scale is not None),
    )


def _norm_of(x: Operand, weight: Operand | None, call: Any) -> Norm:
    """The norm of queries or keys; without a weight there is none."""
    if weight is not None:
        return norm_of(x, weight, call)
    return Norm(Constant(None), *map(Constant, (x.shape[3], False, 0.0, 0.0)))


def tile(tokens: int) -> tuple[int, int]:
    """Channels and warps of a program, measured on an H200; benchmarks/README.md says how."""
    for limit, sizes in ((64, (2048, 8)), (128, (2048, 4)), (256, (1024, 4)), (1024, (4096, 4))):
        if tokens <= limit:
            return sizes
    return 1024, 1


def _heads(x: Operand, weight: Operand | None, channels: int) -> int:
    """Heads of one program: all for a norm over all heads, else as many as ``channels`` hold."""
    all_heads = power_of_two(max(x.shape[1], 1))
    if weight is not None and is_of_all_heads(weight, x):
        return all_heads
    return min(all_heads, max(1, channels // power_of_two(x.shape[3])))


@triton.jit
def rotated_block(x, norm, table, channels, block, b, t, pair, other, BLOCK_H: tl.constexpr):
    """Norm and rotation of a block of heads."""
    h = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(b.dtype)
    present = (h < x.heads)[None, :, None]
    keep = present & (other < norm.width)
    p, q, rest = load_channels(
        rows_at(x, b, t, h), present, pair, other, keep, channels, channels.is_interleaved
    )
    narrow = pair < channels.pairs
    c, s, inside = load_tables(table, b, t, t >= 0, pair, narrow, channels.wide, True)
    if norm.weight is not None:
        wp, wq, wr = norm_factors(norm, x, h, pair, other, channels, channels.is_interleaved)
        scale = norm_scale(p, q, rest, norm, x, channels)
        p, q, rest = p * scale * wp, q * scale * wq, rest * scale * wr
    p, q = rotated(p, q, c, s)
    return p, q, rest, h, present, keep, inside


@triton.jit
def largest_magnitude(x):
    """The largest magnitude of each row, NaN aside."""
    return tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=2, keep_dims=True)


@triton.jit
def row_factor(x, largest, to, b, t, h, page, place, is_stored, WIDE: tl.constexpr):
    """One over the scale of each row, ``[1, H, 1]``, which is loaded, or worked out and stored."""
    present = (h < x.heads)[None, :, None]
    if to.is_given:
        where = b * to.scale_first + h[None, :] * to.scale_head + t[:, None] * to.scale_last
        divisor = tl.load(to.scale + where[:, :, None], mask=present, other=1.0)
    else:
        limit: tl.constexpr = 448.0 if to.format == 1 else 57344.0 if to.format == 2 else 127.0
        if tl.float32 == WIDE:
            divisor = tl.div_rn(largest, tl.full(largest.shape, limit, tl.float32))
        else:
            divisor = (largest / limit).to(tl.float32)
        divisor = tl.where(divisor == 0.0, 1.0, divisor)
        where = page[:, None] * to.scale_first + h[None, :] * to.scale_head
        where += place[:, None] * to.scale_last
        mask = present & is_stored[:, None, None]
        tl.store(to.scale + where[:, :, None], divisor, mask=mask)
    return 1.0 / divisor.to(WIDE)


@triton.jit
def place_of(slots, b, t, size):
    """Page and row of a token, whether it is stored, and whether its slot is in range."""
    slot = tl.load(slots.at + b * slots.b + t * slots.t).to(tl.int64)
    inside = (slot >= -1) & (slot < slots.places)
    is_stored, slot = (slot >= 0) & inside, slot.to(slots.places.dtype)
    return (slot // size).to(tl.int64), (slot % size).to(tl.int64), is_stored, inside


@triton.jit
def rows_in(to, page, place, h):
    """The rows ``[1, H, 1]`` of a cache."""
    rows = page[:, None] * to.page + h[None, :] * to.head + place[:, None] * to.place
    return to.at + rows[:, :, None]


@triton.jit
def store_keys(
    p, q, rest, x, h, present, keep, pair, other, to, channels, b, t, page, place, is_stored,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Store rotated rows in a cache."""
    if to.scale is not None:
        largest = tl.maximum(largest_magnitude(p), largest_magnitude(q))
        if channels.rest > 0:
            largest = tl.maximum(largest, largest_magnitude(rest))
        factor = row_factor(x, largest, to, b, t, h, page, place, is_stored, channels.wide)
        p, q, rest = p * factor, q * factor, rest * factor
    if to.format > 0:
        if channels.is_interleaved_out:
            # One instruction rounds both numbers of a pair.
            p, q = tl.split(encode(tl.join(p, q), to.format, NATIVE))
        else:
            p, q = encode(p, to.format, NATIVE), encode(q, to.format, NATIVE)
        rest = encode(rest, to.format, NATIVE)
    is_stored = is_stored[:, None, None]
    rows = rows_in(to, page, place, h)
    store_pairs(rows, present & is_stored, pair, p, q, channels, channels.is_interleaved_out)
    if channels.rest > 0:
        tl.store(rows + other, rest.to(to.at.dtype.element_ty), mask=keep & is_stored)


@triton.jit
def store_values(
    x, block, to, b, t, page, place, is_stored,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, NATIVE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store a block of heads in a cache."""
    h = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(b.dtype)
    channel = tl.arange(0, BLOCK_V)[None, None, :]
    mask = (h < x.heads)[None, :, None] & (channel < WIDTH)
    value = tl.load(rows_at(x, b, t, h) + channel, mask=mask, other=0.0)
    if to.format > 0:
        value = value.to(WIDE)
        if to.scale is not None:
            largest = largest_magnitude(value)
            value *= row_factor(x, largest, to, b, t, h, page, place, is_stored, WIDE)
        value = encode(value, to.format, NATIVE)
    rows = rows_in(to, page, place, h)
    tl.store(rows + channel, value, mask=mask & is_stored[:, None, None])


@triton.jit
def write_cache(
    q, q_norm, y, k, k_norm, v, k_cache, v_cache, slots, table, channels, length,
    ONE_SEQUENCE: tl.constexpr, V_WIDTH: tl.constexpr, NATIVE: tl.constexpr, INDEX: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_V: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):  # fmt: skip
    """One token, and one block of its heads: of queries, of keys, or of values."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(INDEX)
    if ONE_SEQUENCE:
        # A division takes a tenth of the instructions of a short call.
        b, t = token * 0, token + tl.arange(0, 1)
    else:
        b, t = token // length, token % length + tl.arange(0, 1)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (q.heads + Q_BLOCK - 1) // Q_BLOCK
    k_blocks: tl.constexpr = (k.heads + K_BLOCK - 1) // K_BLOCK
    pair = tl.arange(0, channels.block)[None, None, :]
    # Past the channels that are not rotated, as `keep` expects.
    is_other = tl.arange(0, channels.block_rest)[None, None, :] < channels.rest
    other = tl.where(is_other, others_of(channels), q_norm.width)
    if block < q_blocks:
        p, r, rest, h, present, keep, inside = rotated_block(
            q, q_norm, table, channels, block, b, t, pair, other, Q_BLOCK
        )
        rows = rows_at(y, b, t, h)
        store_pairs(rows, present, pair, p, r, channels, channels.is_interleaved_out)
        if channels.rest > 0:
            tl.store(rows + other, rest.to(y.at.dtype.element_ty), mask=keep)
        tl.device_assert(inside, "position outside the table")
    elif block < q_blocks + k_blocks:
        page, place, is_stored, fits = place_of(slots, b, t, k_cache.size)
        p, r, rest, h, present, keep, inside = rotated_block(
            k, k_norm, table, channels, block - q_blocks, b, t, pair, other, K_BLOCK
        )
        store_keys(
            p, r, rest, k, h, present, keep, pair, other, k_cache, channels, b, t, page, place,
            is_stored & inside, NATIVE,
        )  # fmt: skip
        tl.device_assert(inside & fits, "position outside the table, or slot outside the cache")
    else:
        page, place, is_stored, fits = place_of(slots, b, t, v_cache.size)
        store_values(
            v, block - q_blocks - k_blocks, v_cache, b, t, page, place, is_stored,
            V_WIDTH, channels.wide, NATIVE, V_BLOCK, BLOCK_V,
        )  # fmt: skip
        tl.device_assert(fits, "slot outside the cache")


@triton.jit
def encode(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """The bits of ``x``, as a float32, limited to the range of the format, rounded to even.

    ``NATIVE`` says that ``x`` is float32 and the GPU has instructions for float8.
    """
    if NATIVE and FORMAT == 1:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif NATIVE and FORMAT == 2:
        code = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        code = _encode(x, FORMAT)
    return code


@triton.jit
def _encode(x, FORMAT: tl.constexpr):
    limit: tl.constexpr = 448.0 if FORMAT == 1 else 57344.0 if FORMAT == 2 else 127.0
    x = x.to(tl.float32)
    x = tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))
    if FORMAT == 3:
        # The last bits of this sum are the integer.
        bits = (x + 12582912.0).to(tl.int32, bitcast=True)
        code = tl.where(x == x, bits, 0)
    else:
        dropped: tl.constexpr = 20 if FORMAT == 1 else 21
        bias: tl.constexpr = 7 if FORMAT == 1 else 15
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        even = (magnitude >> dropped) & 1
        normal = (magnitude + ((1 << (dropped - 1)) - 1) + even) >> dropped
        normal -= (127 - bias) << (23 - dropped)
        # Below the least normal number, steps are even: they are those of a float32 at this sum.
        steps: tl.constexpr = 16384.0 if FORMAT == 1 else 128.0
        small = (tl.abs(x) + steps).to(tl.int32, bitcast=True)
        code = tl.where(magnitude < ((128 - bias) << 23), small & 0xFF, normal)
        code = tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)
    return (code & 0xFF).to(tl.uint8)
