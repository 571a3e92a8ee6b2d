"""exp(-a) and log1p(u), which softplus is made of, in polynomials that `tools/softplus` prints.

Triton's own log1p does not run in its interpreter. Its exp2 is exact enough for half precision.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Highest power first. For results in float32, computed in float64; then for half precision.
_EXP_64 = tl.constexpr((
    0.00019907569310848288, 0.0013948578326459795, 0.008333283538708528, 0.041666218319291945,
    0.16666666786308587, 0.5000000107729166, 0.999999999995509, 0.9999999999595618,
))  # fmt: skip
_LOG_64 = tl.constexpr((
    0.0011261745502929483, -0.008009632563823666, 0.02666285302885365, -0.056546791059659804,
    0.08907937721356587, -0.11697161413148038, 0.14084001010579714, -0.1663354003469392,
    0.19996719986775702, -0.24999829427637563, 0.3333332981138023, -0.4999999998780975,
))  # fmt: skip
_LOG_32 = tl.constexpr((
    -0.011684066983334834, 0.05476871895059311, -0.12181987872771625, 0.18663247910600975,
    -0.24796362119440318, 0.3332116616580786, -0.49999876948614136,
))  # fmt: skip


@triton.jit
def _filled(like, NUMBER: tl.constexpr):
    """A constant in the dtype of ``like``: Triton would round a Python float to float32."""
    return tl.full(like.shape, NUMBER, like.dtype)


@triton.jit
def _polynomial(x, NUMBERS: tl.constexpr, COUNT: tl.constexpr):
    p = _filled(x, NUMBERS[0])
    for i in tl.static_range(1, COUNT):
        p = tl.fma(p, x, _filled(x, NUMBERS[i]))
    return p


@triton.jit
def decay_of(x, WIDE: tl.constexpr):
    """``exp(-|x|)`` of a float32 in ``WIDE``; zero in float32 where ``|x|`` is large."""
    if tl.float64 == WIDE:
        a = tl.minimum(tl.abs(x), 150.0).to(tl.float64)
        # Near this number, floats are integers, and the lower bits of the sum are those of n.
        whole = _filled(a, 6755399441055744.0)
        shifted = tl.fma(a, _filled(a, 1.4426950408889634), whole)
        r = tl.fma(shifted - whole, _filled(a, 0.6931471805599453), a * -1)
        p = _polynomial(r, _EXP_64, 8).to(tl.int64, bitcast=True)
        return (p - (shifted.to(tl.int64, bitcast=True) << 52)).to(tl.float64, bitcast=True)
    else:
        # A GPU's exp2 has no subnormal results, a product has.
        root = tl.exp2(tl.abs(x) * -0.7213475204444817)
        return root * root


@triton.jit
def softplus(x, decay):
    """``max(x, 0) + log1p(decay)``, where ``decay`` is :func:`decay_of` ``x``."""
    wide: tl.constexpr = decay.dtype == tl.float64
    p = _polynomial(decay, _LOG_64, 12) if wide else _polynomial(decay, _LOG_32, 7)
    positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL).to(decay.dtype)
    return positive + tl.fma(decay * decay, p, decay)


@triton.jit
def softplus_slope(x, decay):
    """The derivative of softplus; NaN where ``x`` is."""
    one = _filled(decay, 1.0)
    return tl.where(x < 0, decay, tl.where(x >= 0, one, x.to(decay.dtype))) / (one + decay)
