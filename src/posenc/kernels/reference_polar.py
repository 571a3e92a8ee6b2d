"""PoPE in plain torch operations, which the other implementations are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from posenc.kernels.reference import take, wider_dtype
from posenc.kernels.spec import Rows

# From here on softplus(x) is x, in float64 too; torch's own threshold, 20, is off by 2e-9.
_LINEAR = 37.0


def polar(x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows) -> Tensor:
    r"""Each channel as a vector of length softplus(x), at the angle of its position.

    .. math:: x \mapsto (\mu \cos(\phi + \delta),\; \mu \sin(\phi + \delta)),
              \qquad \mu = \ln(1 + e^x)

    ``x`` is ``[B, H, T, D]``; ``cos`` and ``sin`` are ``[R, D]`` or ``[B, R, D]``, and ``delta`` is
    ``[H, D]``, or None for zero. The result is ``[B, H, T, 2 D]``, all cosines before all sines.
    All is computed in float64 for float32, and in float32 for half precision, and rounded once.
    """
    wide = x.to(wider_dtype(x))
    c, s = turned(wide, delta, cos, sin, rows)
    size = F.softplus(wide, threshold=_LINEAR)
    return torch.cat((size * c, size * s), dim=-1).to(x.dtype)


def polar_backward(
    g: Tensor, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`polar` with respect to ``x`` and ``delta``; ``g`` is incoming."""
    wide = x.to(wider_dtype(x))
    c, s = turned(wide, delta, cos, sin, rows)
    a, b = g.to(wide.dtype).tensor_split(2, dim=-1)
    to_x = (wide.sigmoid() * (a * c + b * s)).to(x.dtype)
    if delta is None:
        return to_x, None
    size = F.softplus(wide, threshold=_LINEAR)
    return to_x, (size * (b * c - a * s)).sum((0, 2)).to(delta.dtype)


def turned(
    wide: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the tokens of ``wide``, in its dtype, at angles larger by ``delta``."""
    c, s = (take(table, rows, wide.shape[2]).to(wide.dtype) for table in (cos, sin))
    if delta is None:
        return c, s
    pc, ps = (part[:, None].to(wide.dtype) for part in phases_of(delta))
    return c * pc - s * ps, s * pc + c * ps


def phases_of(delta: Tensor) -> Tensor:
    """Cosines and sines of ``delta``, ``[2, H, D]``, in the widest dtype of its device."""
    wide = delta.to(torch.float32 if delta.device.type == "mps" else torch.float64)
    return torch.stack((wide.cos(), wide.sin()))
