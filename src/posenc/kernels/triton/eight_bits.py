"""Rounding to the numbers of 8 bits that a cache may have: the `FORMATS` of spec.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """The bits of ``x``, limited to the range of the format, rounded once, to even.

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
    most: tl.constexpr = 448.0 if FORMAT == 1 else 57344.0 if FORMAT == 2 else 127.0
    x = tl.where(x > most, most, tl.where(x < -most, -most, x))
    if x.dtype == tl.float64:
        # Cut off to float32; the last bit says that something was. Then this rounding decides.
        near = x.to(tl.float32)
        back = near.to(tl.float64)
        bits = near.to(tl.int32, bitcast=True) - (tl.abs(back) > tl.abs(x)).to(tl.int32)
        x = (bits | (back != x).to(tl.int32)).to(tl.float32, bitcast=True)
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
