"""Every implementation of `rotate_and_cache`, and what a cache has to hold, in float64."""

import torch

from posenc.ops import execute, native
from posenc.ops.cache.cache import by_operations, rotate_and_cache_op
from posenc.ops.rotation.spec import CacheTarget, CacheWrite, TableRows, flatten
from support.assertions import assert_within_ulps
from support.plans import planned
from support.rotations import GPU, expected

GIVEN = {
    "none": lambda batch, length, heads: None,
    "tensor": lambda batch, length, heads: torch.tensor(0.37),
    "head": lambda batch, length, heads: 0.01 + torch.rand(heads),
    "token": lambda batch, length, heads: 0.01 + torch.rand(batch, length, 1),
    "both": lambda batch, length, heads: 0.01 + torch.rand(batch, length, heads),
}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def by_c(write, cos, sin, rows, spec):
    """Native code, which raises RuntimeError where it cannot run."""
    return rotate_and_cache_op.native(*call_of(write, cos, sin, rows, spec))


def call_of(write, cos, sin, rows, spec):
    """The call of the op."""
    q, k, v, slots, (k_cache, k_scale, k_scales), (v_cache, v_scale, v_scales), *others = write
    q_weight, k_weight, norm = others
    written, read = (k_cache, v_cache, k_scales, v_scales), (slots, q_weight, k_weight)
    how = *read, k_scale, v_scale, cos, sin, *flatten(rows, spec), norm.eps, norm.shift
    return q, k, v, *written, *how


def by_triton(write, cos, sin, rows, spec):
    """On the GPU if there is one; what is written there is copied back."""
    there = CacheWrite(*map(moved, write))
    rows = TableRows(rows.start, moved(rows.positions))
    call = call_of(there, cos.to(GPU), sin.to(GPU), rows, spec)
    (y,) = planned(rotate_and_cache_op, *call)
    for mine, made in ((write.k_target, there.k_target), (write.v_target, there.v_target)):
        mine.cache.view(torch.uint8).copy_(made.cache.view(torch.uint8))
        if mine.scales is not None:
            mine.scales.copy_(made.scales)
    return y.cpu()


def moved(value):
    if isinstance(value, CacheTarget):
        return CacheTarget(*map(moved, value))
    return value.to(GPU) if isinstance(value, torch.Tensor) else value


BACKENDS = {"reference": by_operations}
if native.available:
    BACKENDS["c"] = by_c
if execute.installed:
    BACKENDS["triton"] = by_triton


def normed(x, weight, norm):
    """RMSNorm in float64, over each head, or over all heads if the weight is for all of them."""
    x = x.double()
    if weight is None:
        return x
    axes = 3 if weight.shape[0] == x.shape[3] else (1, 3)
    root = torch.sqrt((x * x).mean(dim=axes, keepdim=True) + norm.eps)
    factor = weight.double() + norm.shift
    return x / root * (factor if axes == 3 else factor.view(x.shape[1], 1, x.shape[3]))


def exact_rows(x, weight, cos, sin, index, spec, norm):
    """Norm and rotation in float64, and the magnitude of the pair that each result belongs to."""
    return expected(normed(x, weight, norm), cos, sin, index, spec)


def values_of(dtype):
    """All finite numbers of a dtype of 8 bits, in order, in float64."""
    if dtype == torch.int8:
        return torch.arange(-127, 128).double()
    numbers = torch.arange(256).to(torch.uint8).view(dtype).double()
    return numbers[numbers.isfinite()].unique()


def assert_nearest(got, exact, slack):
    """Of all numbers that its dtype has, ``got`` is the nearest to ``exact``, up to ``slack``."""
    values, limit = values_of(got.dtype), LARGEST[got.dtype]
    exact = exact.clamp(-limit, limit).contiguous()
    above = torch.searchsorted(values, exact).clamp(1, len(values) - 1)
    best = torch.minimum((exact - values[above - 1]).abs(), (exact - values[above]).abs())
    off = (got.double() - exact).abs() - best
    assert (off <= 2 * slack).all(), f"off by {off.max()}"


def assert_holds(rows, exact, magnitude, scale, wide_eps, ulps=0.51):
    """``rows`` of a cache are ``exact`` over ``scale``, rounded once.

    ``magnitude`` times ``wide_eps`` bounds the error of one operation in the wider dtype; norm,
    rotation and scale are some ten of them. The way to 8 bits leads through float32.
    """
    if rows.dtype not in LARGEST:
        ulps = 10 if rows.dtype == torch.float64 else ulps
        return assert_within_ulps(rows, exact, ulps, magnitude)
    exact, magnitude = exact / scale.double(), magnitude / scale.double()
    return assert_nearest(rows, exact, 10 * wide_eps * magnitude + 2**-24 * exact.abs())
