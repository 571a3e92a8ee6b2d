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

    available, _error = True, ""
except ModuleNotFoundError:
    available, _error = False, "not built: no C compiler was found at install"
except ImportError as error:
    available, _error = False, f"built, but it does not load: {error}"

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


def status() -> tuple[bool, str]:
    """Whether the extension is there, and the instruction set in use or why it is missing."""
    return available, f"compiled, using {_rotate.isa()}" if available else _error


def rotate_into(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    spec: Spec,
    norm: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> bool:
    """Rotate each of ``xs`` into the tensor of ``ys`` at the same index, which may be itself.

    ``norm`` is the address of float64 factors, the bits of eps, ``all_heads``, and the address of
    the gradient of the factors; if that is not zero, ``xs`` are the input of the norm and the
    incoming gradient.

    Returns False, and writes nothing, if the tensors differ in dtype, have the negative bit set,
    have no memory, or are strided along channels.
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
    # In a thread that has not called torch, this makes OpenMP use torch.set_num_threads.
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
    """The table rows of this call, converted to float64."""
    picked = reference.take(table, rows, length)
    if picked.dim() == 4:
        picked = picked[0, 0] if picked.shape[0] == 1 else picked[:, 0]
    return picked.double().contiguous()


def norm_into(x: Tensor, y: Tensor, weight: Tensor, *arguments: Any) -> None:
    """Normalise and rotate ``x`` into ``y``, in one pass; both have dense rows."""
    _run_norm([x], [y], _factors(weight, arguments[-1]), 0, *arguments)


def norm_backward_into(g: Tensor, x: Tensor, dx: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    """Write the gradient of ``x`` into ``dx`` and return that of ``weight``; ``g`` is incoming."""
    factors = _factors(weight, arguments[-1])
    to_factors = torch.zeros_like(factors)
    _run_norm([x, g], [dx, g], factors, to_factors.data_ptr(), *arguments)
    return to_factors.to(weight.dtype).view_as(weight)


def _factors(weight: Tensor, norm: Norm) -> Tensor:
    """The weight, plus its shift, as a dense float64 tensor."""
    factors = weight.detach().resolve_neg().double()
    return factors.contiguous() if norm.shift == 0 else factors + norm.shift


def _run_norm(
    xs: list[Tensor], ys: list[Tensor], factors: Tensor, to_factors: int, *arguments: Any
) -> None:
    cos, sin, rows, spec, norm = arguments
    (eps,) = struct.unpack("q", struct.pack("d", norm.eps))
    numbers = (factors.data_ptr(), eps, norm.all_heads, to_factors)
    rotate_into(xs, ys, cos, sin, rows, spec, numbers)
