"""One launch that rotates queries, and writes rotated keys, and values, to their caches."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from posenc.ops.plan import START, Operand, Plan, Target, strides
from posenc.ops.rotation.spec import FORMATS
from posenc.ops.rotation.triton.norm import load_channels, norm_factors, sum_products
from posenc.ops.rotation.triton.pairs import (
    index,
    load_tables,
    rotated,
    shared_constants,
    store_pairs,
    table_numbers,
    turn_in,
)
from posenc.ops.rotation.triton.rotate import overlaps_the_launch

# Norms: 0 for none, 1 of each head, 2 over all heads. Scales: 0 for none, 1 given, 2 worked out.
# Formats: see `FORMATS` in spec.py.


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
    k_cache, k_scale, (k_format, k_origin) = _target(call.k_cache, call.k_scale, call.k_scales)
    v_cache, v_scale, (v_format, v_origin) = _target(call.v_cache, call.v_scale, call.v_scales)
    others = rows.positions, *weights, k_scale, v_scale
    (batch, heads, length, width), values = q.shape, v.shape[3]
    norms = [0 if w is None else 1 if w.shape[0] == width else 2 for w in weights]
    numbers = (
        *strides(q, k, v, y),
        *strides(k_cache), k_cache.shape[2], *strides(v_cache), v_cache.shape[2],
        *_steps(k_scale), *_steps(v_scale),
        *call.slots.stride(), k_cache.shape[0] * k_cache.shape[2], *table_numbers(cos, rows),
        length,
    )  # fmt: skip
    channels, warps = tile(batch * length)
    sizes = (q, norms[0]), (k, norms[1]), (v, 0)
    blocks = [_heads(x, kind, channels) for x, kind in sizes]
    early = overlaps_the_launch(q, target)
    constants = {
        # As arguments these would be float32.
        "EPS": call.eps, "SHIFT": call.shift, "ONE_SEQUENCE": batch == 1,
        "Q_HEADS": heads, "K_HEADS": k.shape[1], "V_HEADS": v.shape[1],
        "WIDTH": width, "V_WIDTH": values,
        **shared_constants(q, cos, rows, spec),
        "Q_NORM": norms[0], "K_NORM": norms[1],
        "K_FORMAT": k_format, "V_FORMAT": v_format, "K_SCALING": k_origin, "V_SCALING": v_origin,
        # Instructions for float8 round float32, not float64.
        "NATIVE": q.element_size() == 2 and target.has(9),
        "INDEX": index(q, k, v, y, cos), "EARLY": early,
        "BLOCK_V": triton.next_power_of_2(values),
        "Q_BLOCK": blocks[0], "K_BLOCK": blocks[1], "V_BLOCK": blocks[2],
    }  # fmt: skip
    # The kernel reads nothing of the tensor that stands for an absent one.
    read = [q if x is None else x for x in others]
    arguments = q, k, v, y, k_cache, v_cache, call.slots, cos, sin, *read, START, *numbers
    count = sum(triton.cdiv(x.shape[1], n) for x, n in zip((q, k, v), blocks, strict=True))
    options = {"launch_pdl": True} if early else {}
    plan.launch(
        write_cache, (batch * length, count), arguments, constants, num_warps=warps, **options
    )


def _target(
    cache: Operand, scale: Operand | None, scales: Operand | None
) -> tuple[Operand, Operand | None, tuple[int, int]]:
    """The cache, its scale or scales, its format, and where the scale comes from."""
    code = FORMATS.get(cache.dtype, 0)
    origin = 1 if scale is not None else 2 if scales is not None else 0
    view = cache.view(torch.uint8) if code else cache
    return view, scales if origin == 2 else scale, (code, origin)


def _steps(scale: Operand | None) -> Any:
    return (0, 0, 0) if scale is None else scale.stride()


def tile(tokens: int) -> tuple[int, int]:
    """Channels and warps of a program, measured on an H200; benchmarks/README.md says how."""
    for limit, sizes in ((64, (2048, 8)), (128, (2048, 4)), (256, (1024, 4)), (1024, (4096, 4))):
        if tokens <= limit:
            return sizes
    return 1024, 1


def _heads(x: Operand, norm: int, channels: int) -> int:
    """Heads of one program: all for a norm over all heads, else as many as ``channels`` hold."""
    all_heads = int(triton.next_power_of_2(max(x.shape[1], 1)))
    if norm == 2:
        return all_heads
    return min(all_heads, max(1, channels // int(triton.next_power_of_2(x.shape[3]))))


@triton.jit
def rotated_block(
    x, weight, block, table, b, t, pair, other,
    EPS: tl.constexpr, SHIFT: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, COLUMN: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr, IN: tl.constexpr,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr, NORM: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of a block of heads; ``x`` is a pointer and its strides."""
    source, x_b, x_h, x_t = x
    h = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(b.dtype)
    present = (h < HEADS)[None, :, None]
    keep = present & (other < WIDTH)
    x_at = (b * x_b + t[:, None] * x_t + h[None, :] * x_h)[:, :, None]
    p, q, rest = load_channels(
        source + x_at, present, pair, other, keep, PAIRS, FIRST, REST, IN, WIDE
    )
    c, s, inside = load_tables(
        table, b, t, t >= 0, pair, pair < PAIRS, COLUMN, HAS_POSITIONS, ADVANCES, TRANSPOSED, WIDE,
        True,
    )  # fmt: skip
    if NORM > 0:
        count: tl.constexpr = WIDTH * HEADS if NORM == 2 else WIDTH
        wp, wq, wr = norm_factors(
            weight, h, pair, other, SHIFT,
            WIDTH, PAIRS, FIRST, REST, IN, NORM == 2, WIDE, HEADS,
        )  # fmt: skip
        scale = sum_products(p, q, rest, p, q, rest, REST, NORM == 2) / count + EPS
        scale = tl.rsqrt(scale).to(WIDE)
        p, q, rest = p * scale * wp, q * scale * wq, rest * scale * wr
    p, q = rotated(p, q, c, s)
    return p, q, rest, h, present, keep, inside


@triton.jit
def largest_magnitude(x):
    """The largest magnitude of each row, NaN aside."""
    return tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=2, keep_dims=True)


@triton.jit
def row_factor(
    largest, scale, b, t, h, page, place, is_stored,
    HEADS: tl.constexpr, FORMAT: tl.constexpr, SCALING: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One over the scale of each row, ``[1, H, 1]``, which is loaded, or worked out and stored."""
    pointer, by_first, by_head, by_last = scale
    present = (h < HEADS)[None, :, None]
    if SCALING == 1:
        where = pointer + (b * by_first + h[None, :] * by_head + t[:, None] * by_last)[:, :, None]
        divisor = tl.load(where, mask=present, other=1.0)
    else:
        limit: tl.constexpr = 448.0 if FORMAT == 1 else 57344.0 if FORMAT == 2 else 127.0
        if tl.float32 == WIDE:
            divisor = tl.div_rn(largest, tl.full(largest.shape, limit, tl.float32))
        else:
            divisor = (largest / limit).to(tl.float32)
        divisor = tl.where(divisor == 0.0, 1.0, divisor)
        where = (
            pointer
            + (page[:, None] * by_first + h[None, :] * by_head + place[:, None] * by_last)[
                :, :, None
            ]
        )
        tl.store(where, divisor, mask=present & is_stored[:, None, None])
    return 1.0 / divisor.to(WIDE)


@triton.jit
def place_of(slots, b, t, slots_b, slots_t, count, size):
    """Page and row of a token, whether it is stored, and whether its slot is in range."""
    slot = tl.load(slots + b * slots_b + t * slots_t).to(tl.int64)
    inside = (slot >= -1) & (slot < count)
    is_stored, slot = (slot >= 0) & inside, slot.to(count.dtype)
    return (slot // size).to(tl.int64), (slot % size).to(tl.int64), is_stored, inside


@triton.jit
def store_keys(
    p, q, rest, h, present, keep, pair, other, to, scale, b, t, page, place, is_stored,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    OUT: tl.constexpr, FORMAT: tl.constexpr, SCALING: tl.constexpr, WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Store rotated rows in a cache; ``to`` is a pointer and its strides."""
    target, by_page, by_head, by_place = to
    if SCALING > 0:
        largest = tl.maximum(largest_magnitude(p), largest_magnitude(q))
        if REST > 0:
            largest = tl.maximum(largest, largest_magnitude(rest))
        factor = row_factor(
            largest, scale, b, t, h, page, place, is_stored, HEADS, FORMAT, SCALING, WIDE
        )
        p, q, rest = p * factor, q * factor, rest * factor
    if FORMAT > 0:
        if OUT:
            # One instruction rounds both numbers of a pair.
            p, q = tl.split(encode(tl.join(p, q), FORMAT, NATIVE))
        else:
            p, q = encode(p, FORMAT, NATIVE), encode(q, FORMAT, NATIVE)
        rest = encode(rest, FORMAT, NATIVE)
    is_stored = is_stored[:, None, None]
    where = (page[:, None] * by_page + h[None, :] * by_head + place[:, None] * by_place)[:, :, None]
    store_pairs(target + where, present & is_stored, pair, p, q, FIRST, PAIRS, OUT)
    if REST > 0:
        tl.store(target + where + other, rest.to(target.dtype.element_ty), mask=keep & is_stored)


@triton.jit
def store_values(
    x, block, to, scale, b, t, page, place, is_stored,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr, SCALING: tl.constexpr,
    WIDE: tl.constexpr, NATIVE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store a block of heads of ``x``, a pointer and its strides, in a cache."""
    source, x_b, x_h, x_t = x
    target, by_page, by_head, by_place = to
    h = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(b.dtype)
    channel = tl.arange(0, BLOCK_V)[None, None, :]
    mask = (h < HEADS)[None, :, None] & (channel < WIDTH)
    x_at = (b * x_b + t[:, None] * x_t + h[None, :] * x_h)[:, :, None]
    value = tl.load(source + x_at + channel, mask=mask, other=0.0)
    if FORMAT > 0:
        value = value.to(WIDE)
        if SCALING > 0:
            factor = row_factor(
                largest_magnitude(value),
                scale,
                b,
                t,
                h,
                page,
                place,
                is_stored,
                HEADS,
                FORMAT,
                SCALING,
                WIDE,
            )
            value = value * factor
        value = encode(value, FORMAT, NATIVE)
    where = (page[:, None] * by_page + h[None, :] * by_head + place[:, None] * by_place)[:, :, None]
    tl.store(target + where + channel, value, mask=mask & is_stored[:, None, None])


@triton.jit
def write_cache(
    q, k, v, y, k_cache, v_cache, slots, cos, sin, positions, q_weight, k_weight, k_scale, v_scale,
    start, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, y_b, y_h, y_t,
    kc_p, kc_h, kc_t, k_page, vc_p, vc_h, vc_t, v_page, ks_b, ks_h, ks_t, vs_b, vs_h, vs_t,
    slots_b, slots_t, count,
    rows, table_b, table_t, positions_b, positions_t, length,
    EPS: tl.constexpr, SHIFT: tl.constexpr, ONE_SEQUENCE: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    COLUMN: tl.constexpr, HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, K_SCALING: tl.constexpr,
    V_SCALING: tl.constexpr, NATIVE: tl.constexpr, INDEX: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_V: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
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
    q_blocks: tl.constexpr = (Q_HEADS + Q_BLOCK - 1) // Q_BLOCK
    k_blocks: tl.constexpr = (K_HEADS + K_BLOCK - 1) // K_BLOCK
    pair = tl.arange(0, BLOCK_P)[None, None, :]
    other = (2 * PAIRS if FIRST == 0 else 0) + tl.arange(0, BLOCK_REST)[None, None, :]
    # Past the channels that are not rotated, as `keep` expects.
    other = tl.where(tl.arange(0, BLOCK_REST)[None, None, :] < REST, other, WIDTH)
    table = cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start
    if block < q_blocks:
        p, r, rest, h, present, keep, inside = rotated_block(
            (q, q_b, q_h, q_t), q_weight, block, table, b, t, pair, other,
            EPS, SHIFT, Q_HEADS, WIDTH, PAIRS, FIRST, REST, COLUMN, HAS_POSITIONS, ADVANCES, IN,
            TRANSPOSED, WIDE, Q_NORM, Q_BLOCK,
        )  # fmt: skip
        y_at = (b * y_b + t[:, None] * y_t + h[None, :] * y_h)[:, :, None]
        store_pairs(y + y_at, present, pair, p, r, FIRST, PAIRS, OUT)
        if REST > 0:
            tl.store(y + y_at + other, rest.to(y.dtype.element_ty), mask=keep)
        tl.device_assert(inside, "position outside the table")
    elif block < q_blocks + k_blocks:
        page, place, is_stored, fits = place_of(slots, b, t, slots_b, slots_t, count, k_page)
        p, r, rest, h, present, keep, inside = rotated_block(
            (k, k_b, k_h, k_t), k_weight, block - q_blocks, table, b, t, pair, other,
            EPS, SHIFT, K_HEADS, WIDTH, PAIRS, FIRST, REST, COLUMN, HAS_POSITIONS, ADVANCES, IN,
            TRANSPOSED, WIDE, K_NORM, K_BLOCK,
        )  # fmt: skip
        store_keys(
            p, r, rest, h, present, keep, pair, other, (k_cache, kc_p, kc_h, kc_t),
            (k_scale, ks_b, ks_h, ks_t), b, t, page, place, is_stored & inside,
            K_HEADS, PAIRS, FIRST, REST, OUT, K_FORMAT, K_SCALING, WIDE, NATIVE,
        )  # fmt: skip
        tl.device_assert(inside & fits, "position outside the table, or slot outside the cache")
    else:
        page, place, is_stored, fits = place_of(slots, b, t, slots_b, slots_t, count, v_page)
        store_values(
            (v, v_b, v_h, v_t), block - q_blocks - k_blocks, (v_cache, vc_p, vc_h, vc_t),
            (v_scale, vs_b, vs_h, vs_t), b, t, page, place, is_stored,
            V_HEADS, V_WIDTH, V_FORMAT, V_SCALING, WIDE, NATIVE, V_BLOCK, BLOCK_V,
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
