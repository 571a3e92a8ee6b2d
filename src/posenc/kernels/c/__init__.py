"""The rotation in C: one pass over memory, on all the cores that torch uses."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.kernels.spec import RowOutOfRange, Rows, Turn

try:
    import posenc.kernels.c._rotate as _rotate

    available, why = True, f"compiled, using {_rotate.isa()}"
except ModuleNotFoundError:
    available, why = False, "not built: no C compiler served at install"
except ImportError as broken:
    available, why = False, f"built, but it does not load: {broken}"

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


def rotate_into(
    xs: list[Tensor], ys: list[Tensor], cos: Tensor, sin: Tensor, rows: Rows, turn: Turn
) -> None:
    """Rotate each of ``xs`` into the tensor of ``ys`` beside it, which may be itself."""
    steps = cos.stride()
    if cos.dtype is not torch.float64 or steps[-1] != 1 or sin.stride() != steps:
        cos, sin = cos.double().contiguous(), sin.double().contiguous()
        steps = cos.stride()
    *batched, held, pairs = cos.shape
    start, positions = rows
    if positions is None:
        where = (start, 0, 0, 0, 1)
    else:
        (many, each), (by_sequence, by_token) = positions.shape, positions.stride()
        if each == 1:
            by_token = 0
        where = (start, positions.data_ptr(), by_sequence if many > 1 else 0, by_token, each == 1)
    interleaved, interleaved_out, column, transposed = turn
    after = (
        cos.data_ptr(),
        sin.data_ptr(),
        held,
        steps[0] if batched else 0,
        steps[-2],
        *where,
        pairs,
        column,
        interleaved,
        interleaved_out,
        transposed,
        0,
    )
    for x, y in zip(xs, ys):  # noqa: B905 (a list beside its copy, on the path of every token)
        x_steps, y_steps = x.stride(), y.stride()
        if x_steps[3] != 1 or y_steps[3] != 1 or x.is_neg():
            if x.numel() == 0:
                continue
            made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            rotate_into([x.resolve_neg().contiguous()], [made], cos, sin, rows, turn)
            y.copy_(made)
            continue
        bad = _rotate.rotate(
            x.data_ptr(),
            y.data_ptr(),
            _CODES[x.dtype],
            *x.shape,
            *x_steps[:3],
            *y_steps[:3],
            *after,
        )
        if bad is not None:
            raise RowOutOfRange(bad, held)
