"""The rotation in C: one pass over memory, on all the cores that torch uses."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.kernels.spec import RowOutOfRange, Rows, Turn

try:
    from posenc.kernels.c import _rotate

    available, why = True, f"compiled, using {_rotate.isa()}"
except ImportError as missing:
    available, why = False, f"the extension was not built at install ({missing})"

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


def rotate_into(
    xs: list[Tensor], ys: list[Tensor], cos: Tensor, sin: Tensor, rows: Rows, turn: Turn
) -> None:
    """Rotate each of ``xs`` into the tensor of ``ys`` beside it, which may be itself."""
    if cos.dtype is not torch.float64 or not (cos.stride(-1) == 1 == sin.stride(-1)):
        cos, sin = cos.double().contiguous(), sin.double().contiguous()
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    batched = cos.dim() == 3
    table = (
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[-2],
        cos.stride(0) if batched else 0,
        cos.stride(-2),
    )
    positions = rows.positions
    if positions is None:
        where = (rows.start, 0, 0, 0, 1)
    else:
        many, each = positions.shape[0] > 1, positions.shape[1] > 1
        where = (
            rows.start,
            positions.data_ptr(),
            positions.stride(0) if many else 0,
            positions.stride(1) if each else 0,
            0 if each else 1,
        )
    how = (cos.shape[-1], turn.column, turn.interleaved, turn.interleaved_out, turn.transposed)
    for x, y in zip(xs, ys, strict=True):
        source = x if x.stride(3) == 1 else x.contiguous()
        target = y if y.stride(3) == 1 else torch.empty_like(source)
        bad = _rotate.rotate(
            source.data_ptr(),
            target.data_ptr(),
            _CODES[x.dtype],
            *x.shape,
            *source.stride()[:3],
            *target.stride()[:3],
            *table,
            *where,
            *how,
            0,
        )
        if bad is not None:
            raise RowOutOfRange(bad, cos.shape[-2])
        if target is not y:
            y.copy_(target)
