"""From positions to cosines and sines, all in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posenc._contract.sharding import replicate_like
from posenc.numerics.constants import constant
from posenc.numerics.frequencies import Spectrum, scaled_rates, turn_steps

_HALF = 2**32 - 1
# The bits of a float64's fraction that float32 lacks.
_PAST_FLOAT32 = 2**29 - 1
# DTensor treats the operators >> and << as in-place operations, and does nothing.
_right, _left = torch.bitwise_right_shift, torch.bitwise_left_shift


def angles(positions: Tensor, rates: Spectrum | Tensor, seq_len: Tensor | None = None) -> Tensor:
    r"""Angle of each pair at each position, in float64.

    .. math:: \phi_{p,i} = p\,\theta_i

    Whole positions within :math:`\pm 2^{31}` and the rates of a `Spectrum` are multiplied in 64-bit
    fixed point modulo one turn, in two 32-bit halves, so that nothing overflows and nothing is
    lost: the error is below 1.5e-15 rad, where a float64 product is off by 1e-7 rad. (A scaling
    rule's rates are float64 numbers, whose own error is below 5e-16 rad for each position.) If
    positions are floats, rates are a tensor, or lengths are a tensor (for a rule that depends on
    them), the product is a differentiable float64 product.

    The result is float64 ``[*positions.shape, P]``. If the spectrum has ``axes``, it lacks the
    leading axis of ``positions``, the coordinates.

    Examples:
        >>> angles(torch.tensor([0, 1, 7]), Spectrum(4))
        tensor([[0.0000, 0.0000],
                [1.0000, 0.0100],
                [0.7168, 0.0700]], dtype=torch.float64)
        >>> angles(torch.tensor([0.5]), torch.tensor([1.0, 0.25], dtype=torch.float64))
        tensor([[0.5000, 0.1250]], dtype=torch.float64)
    """
    at = positions.unsqueeze(-1)
    if isinstance(rates, Spectrum) and rates.axes is not None:
        followed = rates.axes.followed(rates.dim // 2)
        at = positions[constant(followed, torch.int64, positions.device)].movedim(0, -1)
    if isinstance(rates, Spectrum) and (positions.is_floating_point() or seq_len is not None):
        rates = scaled_rates(rates, positions.device, seq_len)
    if isinstance(rates, Tensor):
        return at.to(torch.float64) * replicate_like(at, rates.to(torch.float64))
    steps, rests = turn_steps(rates)
    device = positions.device
    upper = replicate_like(at, constant(tuple([n >> 32 for n in steps]), torch.int64, device))
    lower = replicate_like(at, constant(tuple([n & _HALF for n in steps]), torch.int64, device))
    rest = replicate_like(at, constant(rests, torch.float64, device))
    low = at * lower
    # The shift drops whole turns, and its sign puts the angle between minus and plus half a turn.
    units = _left(at * upper + _right(low, 32), 32) + (low & _HALF)
    # Exporters round a Python number to float32, so the unit is a tensor.
    unit = replicate_like(at, constant((math.tau / 2**64,), torch.float64, device))
    return (units + at * rest) * unit


def cos_sin(positions: Tensor, spectrum: Spectrum) -> tuple[Tensor, Tensor]:
    """Rotary tables ``[*positions.shape, P]``, times the gain, in the device's widest float."""
    phi = angles(positions.to(float64_device(positions.device)), spectrum)
    return of_angles(phi, positions.device, spectrum.gain())


def of_angles(
    phi: Tensor, device: torch.device, gain: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of float64 angles, times ``gain``, on ``device``."""
    # With several axes, angles come from a movedim, and the table would be stored by columns.
    phi = phi.contiguous()
    cos, sin = phi.cos(), phi.sin()
    if isinstance(gain, float) and gain != 1.0:
        gain = replicate_like(phi, constant((gain,), torch.float64, phi.device))
    if isinstance(gain, Tensor):
        cos, sin = cos * gain, sin * gain
    dtype = widest(device)
    return cos.to(dtype).to(device), sin.to(dtype).to(device)


def sinusoid(
    positions: Tensor, spectrum: Spectrum, dtype: torch.dtype, *, concatenated: bool = False
) -> Tensor:
    """Sinusoidal table ``[*positions.shape, D]``: sine in even channels, cosine in odd ones.

    If ``concatenated``, for an even ``D``, all sines come before all cosines.
    """
    phi = angles(positions.to(float64_device(positions.device)), spectrum)
    parts = phi.sin(), phi.cos()
    table = torch.cat(parts, -1) if concatenated else torch.stack(parts, -1).flatten(-2)
    return round_once(table[..., : spectrum.dim], dtype).to(positions.device)


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round ``x``, float64, to the nearest numbers of ``dtype``; gradients pass.

    torch may round float64 to float32 on its way to float16 and bfloat16, and a second rounding
    can go wrong at a tie. So ``x`` is first rounded to odd: the bits that float32 lacks are
    cleared, and its last bit is set if any of them was. That number is exact in float32 and lies
    on the same side of every tie as ``x``.
    """
    if dtype.itemsize > 2:
        return x.to(dtype)
    bits = x.detach().view(torch.int64)
    lost = bits & _PAST_FLOAT32
    odd = ((bits - lost) | (_PAST_FLOAT32 + 1)).view(torch.float64)
    # The sum passes the gradient of x; it is exact, and so is the difference.
    return torch.where(lost == 0, x, x + (odd - x.detach())).to(dtype)


def widest(device: torch.device) -> torch.dtype:
    """The widest float of a device: float64, or float32 on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


def float64_device(device: torch.device) -> torch.device:
    """``device``, or the CPU for Apple's GPUs, which have no float64."""
    return torch.device("cpu") if device.type == "mps" else device
