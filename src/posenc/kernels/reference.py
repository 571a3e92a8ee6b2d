"""The plain torch formulation of each kernel: what the others are held against."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, transposed: bool = False
) -> Tensor:
    r"""Rotate the first ``2P`` channels of ``x`` pair by pair.

    .. math:: (a, b) \mapsto (a \cos\phi - b \sin\phi,\; a \sin\phi + b \cos\phi)

    Multiplies one precision up, in float64 for float32 and in float32 for the halves, and rounds
    once to the dtype of ``x``: the result is within a hair of half an ulp of the exact one.

    Args:
        x: ``[..., T, D]``.
        cos: ``[T, P]``, or any shape that broadcasts over ``[..., T, P]``.
        sin: As ``cos``.
        interleaved: Pairs are ``(2i, 2i + 1)`` if true, ``(i, P + i)`` if false.
        transposed: Rotate by the negative angle: the gradient of this function.

    Returns:
        A new tensor like ``x``; channels past ``2P`` are copied.
    """
    pairs = cos.shape[-1]
    grid, axis = ((pairs, 2), -1) if interleaved else ((2, pairs), -2)
    wide = one_up(x)
    c, s = cos.to(wide), sin.to(wide)
    if transposed:
        s = -s
    turned, rest = x[..., : 2 * pairs].to(wide), x[..., 2 * pairs :]
    a, b = turned.unflatten(-1, grid).unbind(axis)
    y = torch.stack((a * c - b * s, a * s + b * c), dim=axis).flatten(-2)
    return torch.cat((y.to(x.dtype), rest), dim=-1)


def one_up(x: Tensor) -> torch.dtype:
    """The dtype to compute in for ``x``: the next wider one, as far as its device goes."""
    if x.dtype in (torch.float16, torch.bfloat16) or x.device.type == "mps":
        return torch.float32
    return torch.float64


def add(x: Tensor, table: Tensor) -> Tensor:
    """``x + table`` with one rounding, to the dtype of ``x``.

    A half-precision ``x`` is added in float32: rounding the table first would leave an error
    larger than one ulp wherever the two cancel.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) + table.to(wide)).to(x.dtype)
