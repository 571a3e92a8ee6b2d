"""The exact rotation, by complex multiplication in float64, and the error that is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rotation_cases import BASE, EPS, Workload
from torch import Tensor

# Rounding cos and sin, the two products and the sum to the dtype costs 3 half ulps at the
# magnitude of the pair; rounding the normalized input and its product with a weight, 2 more.
ULPS = 4.0
# Rates and angles in float32: power and reciprocal cost 3 half ulps of the angle, the product
# with the position one more. That is 2e-3 radians at position 8192.
RADIANS_PER_POSITION = 2.0**-22


class Verdict(NamedTuple):
    """Largest error, in ulps at the magnitude of the pair; and a reason if it is too large."""

    ulps: float
    reason: str = ""


def judge(
    work: Workload,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    float32_angles: bool,
    transposed: bool = False,
) -> Verdict:
    """Compare the ``outputs`` of a contestant with the exact rotation of ``inputs``.

    Both are q and k; or, if ``transposed``, the gradients of the outputs and of the inputs, which
    are rotated by the negative angle. ``float32_angles`` allows for angles computed in float32.
    """
    radians = RADIANS_PER_POSITION * work.max_seq_len if float32_angles else 0.0
    weights = work.weights() if work.qk_norm else (None, None)
    rotations = cis(work).conj() if transposed else cis(work)
    errors, excesses = [], []
    for x, y, weight in zip(inputs, outputs, weights, strict=True):
        if y.shape != x.shape or y.dtype != x.dtype:
            got = f"{tuple(y.shape)} {y.dtype} for {tuple(x.shape)} {x.dtype}"
            return Verdict(math.nan, f"wrong kind of output: {got}")
        # One sequence at a time: float64 of a whole batch would need many times its memory.
        for b, rotation in enumerate(rotations.expand(len(x), -1, -1)):
            wide = x[b].double()
            if weight is not None:
                scale = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
                wide = wide * scale * weight.double()
            exact = _pairs(wide, work.interleaved) * rotation
            off = torch.view_as_real(_pairs(y[b], work.interleaved) - exact).abs().amax(-1)
            size = exact.abs()
            spacing = ulp(size, work.dtype)
            errors.append((off / spacing).amax())
            excesses.append((off / (ULPS * spacing + radians * size)).amax())
    # amax() propagates NaN; Python's max() may not.
    worst = float(torch.stack(errors).amax())
    if torch.stack(excesses).amax() <= 1:
        return Verdict(worst)
    spare = f" and {radians:.1e} radians" if radians else ""
    return Verdict(worst, f"off by {worst:.3g} ulp, {ULPS:g} ulp{spare} allowed")


def cis(work: Workload) -> Tensor:
    """cos + i·sin of every angle, complex128 ``[1, T, P]`` or ``[B, T, P]``, from the formula."""
    pairs = torch.arange(work.dim // 2, dtype=torch.float64)
    rates = BASE ** (-2 * pairs / work.dim)
    angles = work.positions().cpu()[..., None] * rates
    return torch.polar(torch.ones_like(angles), angles).to(work.device)


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of ``dtype`` at ``magnitude``."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(magnitude)
    # frexp's mantissa is in [0.5, 1): the exponent is one above the number's own.
    return (info.eps / 2 * torch.exp2(exponent.double())).clamp(min=info.tiny * info.eps)


def _pairs(x: Tensor, interleaved: bool) -> Tensor:
    """Channel pairs of ``[H, T, D]`` as complex128 ``[H, T, P]``."""
    grid, axis = ((-1, 2), -1) if interleaved else ((2, -1), -2)
    return torch.complex(*x.double().unflatten(-1, grid).unbind(axis))
