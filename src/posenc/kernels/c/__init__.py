"""The rotation in C: one pass over memory, on all the cores that torch uses."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posenc.kernels import reference
from posenc.kernels.spec import Norm, RowOutOfRange, Rows, Spec

try:
    import posenc.kernels.c._rotate as _rotate

    available, why = True, f"compiled, using {_rotate.isa()}"
except ModuleNotFoundError:
    available, why = False, "not built: no C compiler served at install"
except ImportError as broken:
    available, why = False, f"built, but it does not load: {broken}"

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


def norm_rotate(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec, norm: Norm
) -> Tensor:
    """Normalise and rotate ``x`` into a new tensor, in one pass."""
    y = torch.empty_like(x)
    factors = _factors(weight, norm)
    rotate_into([x], [y], cos, sin, rows, spec, (factors.data_ptr(), *_kind(norm), 0))
    return y


def norm_rotate_backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    spec: Spec,
    norm: Norm,
) -> tuple[Tensor, Tensor]:
    """Gradients to ``x`` and ``weight``, given ``g``, the gradient to the result."""
    g, x = (t if t.stride(-1) == 1 else t.contiguous() for t in (g.resolve_neg(), x.resolve_neg()))
    dx = torch.empty_like(x)
    if dx.stride(-1) != 1:
        # Rows that overlap have strides that no other tensor can have.
        x = x.contiguous()
        dx = torch.empty_like(x)
    factors = _factors(weight, norm)
    to_factors = torch.zeros_like(factors)
    numbers = (factors.data_ptr(), *_kind(norm), to_factors.data_ptr())
    rotate_into([x, g], [dx, g], cos, sin, rows, spec, numbers)
    return dx, to_factors.to(weight.dtype).view_as(weight)


def _factors(weight: Tensor, norm: Norm) -> Tensor:
    """What a row is multiplied by, as the kernel reads it."""
    factors = weight.detach().resolve_neg().double()
    return factors.contiguous() if norm.shift == 0 else factors + norm.shift


def _kind(norm: Norm) -> tuple[int, int]:
    """The bits of its eps, and whether it is over all heads."""
    (eps,) = struct.unpack("q", struct.pack("d", norm.eps))
    return eps, norm.whole


def rotate_into(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    spec: Spec,
    norm: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> None:
    """Rotate each of ``xs`` into the tensor of ``ys`` beside it, which may be itself.

    ``norm`` is of :func:`norm_rotate`: where its float64 factors are, what kind it is, and where
    their gradient goes, if that is wanted; then ``xs`` are its input and what is given.
    """
    shape, steps = cos.shape, cos.stride()
    held = shape[-2]
    wide = cos.dtype is torch.float64 and sin.dtype is torch.float64
    if not wide or steps[-1] != 1 or sin.stride() != steps:
        cos, sin = (_dense_rows(table, rows, xs[0].shape[2]) for table in (cos, sin))
        rows, shape, steps = Rows(), cos.shape, cos.stride()
    tables = (shape, steps) if len(shape) == 3 else (0, shape, 0, steps)
    start, positions = rows
    if positions is None:
        where = (start, 0, 0, 0, 1)
    else:
        (many, each), (by_sequence, by_token) = positions.shape, positions.stride()
        if many == 0 or each == 0:
            return
        if each == 1:
            by_token = 0
        where = (start, positions.data_ptr(), by_sequence if many > 1 else 0, by_token, each == 1)
    dtype = xs[0].dtype
    tensors: list[Any] = []
    for x, y in zip(xs, ys):  # noqa: B905 (a list beside its copy, on the path of every token)
        if x.is_neg() or x.dtype is not dtype:
            _one_by_one(xs, ys, cos, sin, rows, spec, norm)
            return
        tensors += (x.data_ptr(), y.data_ptr(), x.shape, x.stride(), y.stride())
    # A thread that torch has not met would take all there are, whatever was set.
    torch.get_num_threads()
    bad = _rotate.rotate(
        _CODES[dtype], cos.data_ptr(), sin.data_ptr(), *tables, where, spec, norm, *tensors
    )
    if bad is NotImplemented:
        _one_by_one(xs, ys, cos, sin, rows, spec, norm)
    elif bad is not None:
        raise RowOutOfRange(bad, held)


def _dense_rows(table: Tensor, rows: Rows, length: int) -> Tensor:
    """The rows that are needed, as the kernel reads them: a table may be long, and a call short."""
    picked = reference.take(table, rows, length)
    if picked.dim() == 4:
        picked = picked[0, 0] if picked.shape[0] == 1 else picked[:, 0]
    return picked.double().contiguous()


def _one_by_one(xs: Sequence[Tensor], ys: Sequence[Tensor], *how: Any) -> None:
    """Tensors that differ in dtype, or that the kernel cannot read or write as they lie."""
    for x, y in zip(xs, ys, strict=True):
        if x.numel() == 0:
            continue
        dense, made = x.resolve_neg().contiguous(), y
        if not dense.data_ptr():
            # torch has zeros that take no memory.
            dense = dense.clone()
        if y.stride(3) != 1 or y.is_neg():
            made = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        rotate_into([dense], [made], *how)
        if made is not y:
            y.copy_(made)
