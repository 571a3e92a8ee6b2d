"""Norm, rotation and the write to a cache: the kernel, and its parts."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from posenc.kernels.triton.eight_bits import encode
from posenc.kernels.triton.norm import load_channels, norm_factors, sum_products
from posenc.kernels.triton.pairs import load_tables, rotated, store_pairs

# Norms: 0 for none, 1 of each head, 2 over all heads. Scales: 0 for none, 1 given, 2 worked out.
# Formats: see `FORMATS` in spec.py.


@triton.jit
def rotated_block(
    x, weight, block, table, b, t, at, other,
    EPS: tl.constexpr, SHIFT: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    ADVANCES: tl.constexpr, IN: tl.constexpr, TRANSPOSED: tl.constexpr, WIDE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of a block of heads; ``x`` is a pointer and its strides."""
    source, x_b, x_h, x_t = x
    h = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(b.dtype)
    present = (h < HEADS)[None, :, None]
    keep = present & (other < WIDTH)
    x_at = (b * x_b + t[:, None] * x_t + h[None, :] * x_h)[:, :, None]
    p, q, rest = load_channels(
        source + x_at, present, at, other, keep, PAIRS, FIRST, REST, IN, WIDE
    )
    c, s, inside = load_tables(
        table, b, t, t >= 0, at, at < PAIRS, HAS_POSITIONS, ADVANCES, TRANSPOSED, WIDE, True
    )
    if NORM > 0:
        count: tl.constexpr = WIDTH * HEADS if NORM == 2 else WIDTH
        wp, wq, wr = norm_factors(
            weight, h, at, other, SHIFT,
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
    largest, scale, b, t, h, page, place, kept,
    HEADS: tl.constexpr, FORMAT: tl.constexpr, SCALING: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One over the scale of each row, ``[1, H, 1]``, which is loaded, or worked out and stored."""
    at, by_first, by_head, by_last = scale
    present = (h < HEADS)[None, :, None]
    if SCALING == 1:
        where = at + (b * by_first + h[None, :] * by_head + t[:, None] * by_last)[:, :, None]
        found = tl.load(where, mask=present, other=1.0)
    else:
        most: tl.constexpr = 448.0 if FORMAT == 1 else 57344.0 if FORMAT == 2 else 127.0
        if tl.float32 == WIDE:
            found = tl.div_rn(largest, tl.full(largest.shape, most, tl.float32))
        else:
            found = (largest / most).to(tl.float32)
        found = tl.where(found == 0.0, 1.0, found)
        where = (
            at
            + (page[:, None] * by_first + h[None, :] * by_head + place[:, None] * by_last)[
                :, :, None
            ]
        )
        tl.store(where, found, mask=present & kept[:, None, None])
    return 1.0 / found.to(WIDE)


@triton.jit
def place_of(slots, b, t, slots_b, slots_t, count, size):
    """Page and row of a token, whether it is stored, and whether its slot is in range."""
    slot = tl.load(slots + b * slots_b + t * slots_t).to(tl.int64)
    inside = (slot >= -1) & (slot < count)
    kept, slot = (slot >= 0) & inside, slot.to(count.dtype)
    return (slot // size).to(tl.int64), (slot % size).to(tl.int64), kept, inside


@triton.jit
def store_keys(
    p, q, rest, h, present, keep, at, other, to, scale, b, t, page, place, kept,
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
            largest, scale, b, t, h, page, place, kept, HEADS, FORMAT, SCALING, WIDE
        )
        p, q, rest = p * factor, q * factor, rest * factor
    if FORMAT > 0:
        if OUT:
            # One instruction rounds both numbers of a pair.
            p, q = tl.split(encode(tl.join(p, q), FORMAT, NATIVE))
        else:
            p, q = encode(p, FORMAT, NATIVE), encode(q, FORMAT, NATIVE)
        rest = encode(rest, FORMAT, NATIVE)
    kept = kept[:, None, None]
    where = (page[:, None] * by_page + h[None, :] * by_head + place[:, None] * by_place)[:, :, None]
    store_pairs(target + where, present & kept, at, p, q, FIRST, PAIRS, OUT)
    if REST > 0:
        tl.store(target + where + other, rest.to(target.dtype.element_ty), mask=keep & kept)


@triton.jit
def store_values(
    x, block, to, scale, b, t, page, place, kept,
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
                kept,
                HEADS,
                FORMAT,
                SCALING,
                WIDE,
            )
            value = value * factor
        value = encode(value, FORMAT, NATIVE)
    where = (page[:, None] * by_page + h[None, :] * by_head + place[:, None] * by_place)[:, :, None]
    tl.store(target + where + channel, value, mask=mask & kept[:, None, None])


@triton.jit(do_not_specialize=["start", "count"])
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
    HAS_POSITIONS: tl.constexpr, ADVANCES: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
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
    at = tl.arange(0, BLOCK_P)[None, None, :]
    other = (2 * PAIRS if FIRST == 0 else 0) + tl.arange(0, BLOCK_REST)[None, None, :]
    # Past the channels that are not rotated, as `keep` expects.
    other = tl.where(tl.arange(0, BLOCK_REST)[None, None, :] < REST, other, WIDTH)
    table = cos, sin, rows, table_b, table_t, positions, positions_b, positions_t, start
    if block < q_blocks:
        p, r, rest, h, present, keep, inside = rotated_block(
            (q, q_b, q_h, q_t), q_weight, block, table, b, t, at, other,
            EPS, SHIFT, Q_HEADS, WIDTH, PAIRS, FIRST, REST, HAS_POSITIONS, ADVANCES, IN,
            TRANSPOSED, WIDE, Q_NORM, Q_BLOCK,
        )  # fmt: skip
        y_at = (b * y_b + t[:, None] * y_t + h[None, :] * y_h)[:, :, None]
        store_pairs(y + y_at, present, at, p, r, FIRST, PAIRS, OUT)
        if REST > 0:
            tl.store(y + y_at + other, rest.to(y.dtype.element_ty), mask=keep)
        tl.device_assert(inside, "position outside the table")
    elif block < q_blocks + k_blocks:
        page, place, kept, fits = place_of(slots, b, t, slots_b, slots_t, count, k_page)
        p, r, rest, h, present, keep, inside = rotated_block(
            (k, k_b, k_h, k_t), k_weight, block - q_blocks, table, b, t, at, other,
            EPS, SHIFT, K_HEADS, WIDTH, PAIRS, FIRST, REST, HAS_POSITIONS, ADVANCES, IN,
            TRANSPOSED, WIDE, K_NORM, K_BLOCK,
        )  # fmt: skip
        store_keys(
            p, r, rest, h, present, keep, at, other, (k_cache, kc_p, kc_h, kc_t),
            (k_scale, ks_b, ks_h, ks_t), b, t, page, place, kept & inside,
            K_HEADS, PAIRS, FIRST, REST, OUT, K_FORMAT, K_SCALING, WIDE, NATIVE,
        )  # fmt: skip
        tl.device_assert(inside & fits, "position outside the table, or slot outside the cache")
    else:
        page, place, kept, fits = place_of(slots, b, t, slots_b, slots_t, count, v_page)
        store_values(
            (v, v_b, v_h, v_t), block - q_blocks - k_blocks, (v_cache, vc_p, vc_h, vc_t),
            (v_scale, vs_b, vs_h, vs_t), b, t, page, place, kept,
            V_HEADS, V_WIDTH, V_FORMAT, V_SCALING, WIDE, NATIVE, V_BLOCK, BLOCK_V,
        )  # fmt: skip
        tl.device_assert(fits, "slot outside the cache")
