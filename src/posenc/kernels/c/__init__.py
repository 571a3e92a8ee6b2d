"""The rotation in C: one pass over memory, on all the cores that torch uses."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posenc.kernels import reference
from posenc.kernels.spec import (
    FORMATS,
    Norm,
    RowOutOfRange,
    Rows,
    SlotOutOfRange,
    Spec,
    Store,
    Write,
)

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
    held, (cos, sin, tables, where) = cos.shape[-2], _tables(cos, sin, rows, xs[0].shape[2])
    if where is None:
        return True
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


def _tables(cos: Tensor, sin: Tensor, rows: Rows, length: int) -> tuple[Any, ...]:
    """The tables, which must stay alive, their sizes, and the rows; None if no token has one."""
    shape, steps = cos.shape, cos.stride()
    wide = cos.dtype is torch.float64 and sin.dtype is torch.float64
    if not wide or steps[-1] != 1 or sin.stride() != steps:
        cos, sin = (_dense_rows(table, rows, length) for table in (cos, sin))
        rows, shape, steps = Rows(), cos.shape, cos.stride()
    tables = (shape, steps) if len(shape) == 3 else (0, shape, 0, steps)
    start, positions = rows
    if positions is None:
        return cos, sin, tables, (start, 0, 0, 0, 1)
    (many, each), (by_sequence, by_token) = positions.shape, positions.stride()
    if many == 0 or each == 0:
        return cos, sin, tables, None
    if each == 1:
        by_token = 0
    where = (start, positions.data_ptr(), by_sequence if many > 1 else 0, by_token, each == 1)
    return cos, sin, tables, where


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
    factors = weight.resolve_neg().double()
    return factors.contiguous() if norm.shift == 0 else factors + norm.shift


def _run_norm(
    xs: list[Tensor], ys: list[Tensor], factors: Tensor, to_factors: int, *arguments: Any
) -> None:
    cos, sin, rows, spec, norm = arguments
    numbers = (factors.data_ptr(), _bits(norm.eps), norm.all_heads, to_factors)
    rotate_into(xs, ys, cos, sin, rows, spec, numbers)


def _bits(number: float) -> int:
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits


def cache_into(write: Write, y: Tensor, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> None:
    """Rotate ``q`` into ``y``, write ``k`` and ``v``; see `reference_cache.rotate_and_cache`."""
    q, k, v, slots, k_store, v_store, q_weight, k_weight, norm = write
    held, (cos, sin, tables, where) = cos.shape[-2], _tables(cos, sin, rows, q.shape[2])
    if where is None:
        return
    if slots.dtype is not torch.int64:
        slots = slots.long()
    q_factors = None if q_weight is None else _factors(q_weight, norm)
    k_factors = None if k_weight is None else _factors(k_weight, norm)
    torch.get_num_threads()
    bad = _rotate.cache(
        *(_CODES[q.dtype], cos.data_ptr(), sin.data_ptr(), *tables, where, spec),
        *(_address(q_factors), _bits(norm.eps), _is_wider(q_factors, q), 0),
        *(q.data_ptr(), y.data_ptr(), q.shape, q.stride(), y.stride()),
        *(_address(k_factors), _is_wider(k_factors, k), slots.data_ptr(), slots.stride()),
        *_written(k, k_store),
        *_written(v, v_store),
    )
    if bad is not None:
        what, number = bad
        if what == "row":
            raise RowOutOfRange(number, held)
        raise SlotOutOfRange(number, k_store.slots())


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _is_wider(factors: Tensor | None, x: Tensor) -> bool:
    """Whether the norm is over all heads."""
    return factors is not None and factors.shape[0] != x.shape[3]


def _written(x: Tensor, store: Store) -> tuple[Any, ...]:
    """The numbers of ``Cached`` in cache.h."""
    cache, scale, scales = store
    none = (0, 0, 0, 0)
    return (
        *(x.data_ptr(), x.shape, x.stride()),
        *(FORMATS.get(cache.dtype, 0), cache.data_ptr(), cache.shape, cache.stride()),
        *(none if scale is None else (scale.data_ptr(), scale.stride())),
        *(none if scales is None else (scales.data_ptr(), scales.stride())),
    )


def polar_into(
    x: Tensor, y: Tensor, phases: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows
) -> None:
    """Write PoPE of ``x`` into ``y``; both have dense rows, and ``phases`` are `phases_of`."""
    _polar([(x, y)], phases, None, cos, sin, rows)


def polar_backward_into(
    g: Tensor, x: Tensor, dx: Tensor, phases: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows
) -> Tensor | None:
    """Write the gradient of ``x`` into ``dx`` and return that of the phases."""
    sums = None if phases is None else torch.zeros_like(phases[0])
    _polar([(x, dx), (g, g)], phases, sums, cos, sin, rows)
    return sums


def _polar(
    pairs: list[tuple[Tensor, Tensor]],
    phases: Tensor | None,
    sums: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
) -> None:
    x = pairs[0][0]
    held, (cos, sin, tables, where) = cos.shape[-2], _tables(cos, sin, rows, x.shape[2])
    if where is None:
        return
    tensors: list[Any] = []
    for a, b in pairs:
        tensors += (a.data_ptr(), b.data_ptr(), a.shape, a.stride(), b.stride())
    torch.get_num_threads()
    # The layout of pairs and the eps are not used.
    how = (cos.data_ptr(), sin.data_ptr(), *tables, where, Spec(), _address(phases), 0, 0)
    bad = _rotate.polar(_CODES[x.dtype], *how, _address(sums), *tensors)
    if bad is not None:
        raise RowOutOfRange(bad, held)
