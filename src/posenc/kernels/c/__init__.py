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
    available, why = False, "not built: no C compiler was found at install"
except ImportError as broken:
    available, why = False, f"built, but it does not load: {broken}"

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


def rotate_into(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    spec: Spec,
    norm: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> bool:
    """Rotate each of ``xs`` into the tensor of ``ys`` beside it, which may be itself.

    ``norm`` holds the address of a norm's float64 factors, the bits of its eps, whether it is over
    all heads, and the address of the factors' gradient. If that is not zero, ``xs`` are the norm's
    input and the gradient to its result.

    Returns:
        False, and nothing is written, if the kernel cannot read or write the tensors as they are:
        they differ in dtype, are negated lazily, have no memory, or are strided along channels.
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
            return True
        if each == 1:
            by_token = 0
        where = (start, positions.data_ptr(), by_sequence if many > 1 else 0, by_token, each == 1)
    dtype = xs[0].dtype
    tensors: list[Any] = []
    for x, y in zip(xs, ys):  # noqa: B905 (the check would cost time at every token)
        if x.is_neg() or x.dtype is not dtype:
            return False
        tensors += (x.data_ptr(), y.data_ptr(), x.shape, x.stride(), y.stride())
    # A thread that never called torch would otherwise use all cores, whatever was set.
    torch.get_num_threads()
    bad = _rotate.rotate(
        _CODES[dtype], cos.data_ptr(), sin.data_ptr(), *tables, where, spec, norm, *tensors
    )
    if bad is None:
        return True
    if bad is NotImplemented:
        return False
    raise RowOutOfRange(bad, held)


def _dense_rows(table: Tensor, rows: Rows, length: int) -> Tensor:
    """The rows of this call in float64: a table may be long, and a call short."""
    picked = reference.take(table, rows, length)
    if picked.dim() == 4:
        picked = picked[0, 0] if picked.shape[0] == 1 else picked[:, 0]
    return picked.double().contiguous()


def norm_into(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    spec: Spec,
    norm: Norm,
) -> None:
    """Normalise and rotate ``x`` into ``y``, in one pass; both have dense rows."""
    factors = _factors(weight, norm)
    rotate_into([x], [y], cos, sin, rows, spec, (factors.data_ptr(), *_kind(norm), 0))


def norm_backward_into(
    g: Tensor, x: Tensor, dx: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *rest: Any
) -> Tensor:
    """Write the gradient to ``x`` into ``dx`` and return that to ``weight``; ``g`` is given."""
    rows, spec, norm = rest
    factors = _factors(weight, norm)
    to_factors = torch.zeros_like(factors)
    numbers = (factors.data_ptr(), *_kind(norm), to_factors.data_ptr())
    rotate_into([x, g], [dx, g], cos, sin, rows, spec, numbers)
    return to_factors.to(weight.dtype).view_as(weight)


def _factors(weight: Tensor, norm: Norm) -> Tensor:
    """What a row is multiplied by, as the kernel reads it."""
    factors = weight.detach().resolve_neg().double()
    return factors.contiguous() if norm.shift == 0 else factors + norm.shift


def _kind(norm: Norm) -> tuple[int, int]:
    """The bits of its eps, and whether it is over all heads."""
    (eps,) = struct.unpack("q", struct.pack("d", norm.eps))
    return eps, norm.all_heads
