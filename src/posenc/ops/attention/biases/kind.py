"""What a kind of bias is: fields, from which the ops of its attention follow, and its formula.

A kind is a file here. Its fields are a NamedTuple whose tensors state their axes: the arguments of
the ops of attention with this bias, their check, and the shapes of their gradients follow. Its
formula, ``of``, consists of torch operations: it is what the bias *is*. What it does on a GPU is in
the file of the same name in `triton`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.tracing import is_exporting

# A field that is a number, which a compiler may keep as a symbol: as `Size` of posenc.ops.op.
_SIZE = ("SymInt",)


class Where(NamedTuple):
    """Some queries and keys of an attention, as a formula needs to know them."""

    query_index: Tensor  # the key index of each query, int64 [1 or B, n]
    key_index: Tensor  # int64 [k]
    queries: slice  # which queries and keys of the call they are
    keys: slice
    first: Tensor | None  # the first key of each key's document, int64 [1 or B, K]
    scale: float  # of the products of queries and keys


@functools.cache
def axes_of(fields: type) -> dict[str, tuple[str, ...]]:
    """The axes of each tensor of a NamedTuple, as it states them."""
    hints = get_type_hints(fields, include_extras=True)
    marks = {name: get_args(hint)[1:] for name, hint in hints.items()}
    return {name: tuple(mark[0].split()) for name, mark in marks.items() if mark and mark != _SIZE}


def fits(fields: Any, sizes: dict[str, int]) -> bool:
    """Whether tensors have the axes that their fields state.

    ``1|B`` is one or B, ``K+`` is K or more; a letter without a size has any but zero, the same
    wherever it stands.
    """
    sizes = dict(sizes)
    kind: Any = type(fields)
    for name, axes in axes_of(kind).items():
        x = getattr(fields, name)
        if x is None:
            continue
        if x.dim() != len(axes) or x.dtype not in checks.FLOAT_DTYPES:
            return False
        for axis, size in zip(axes, x.shape, strict=True):
            letters = axis.rstrip("+").split("|")
            if size == 1 and "1" in letters:
                continue
            wanted = sizes.setdefault(letters[-1], size) if size else sizes.get(letters[-1], 1)
            if not (size == wanted or (axis.endswith("+") and size > wanted)):
                return False
    return True


def wide_of(values: Tensor, dtype: torch.dtype) -> torch.dtype:
    """At least float32: a product with a distance, or a difference, has more bits than a half."""
    return torch.promote_types(torch.promote_types(values.dtype, dtype), torch.float32)


def for_each_query_head(x: Tensor, heads: int) -> Tensor:
    """Keys or values of ``heads`` heads of queries, ``[B, H, K, D]``, that share those of ``x``."""
    shared = heads // x.shape[1]
    if shared == 1:
        return x
    if not is_exporting():
        return x.repeat_interleave(shared, 1)
    # torch 2.11 takes two axes that become one for a constraint on the lengths.
    return x.index_select(1, torch.arange(heads, device=x.device) // shared)


def skew(x: Tensor, width: int) -> Tensor:
    """Move row ``r`` of ``x``, ``[..., n, w]``, left by ``n - 1 - r``, and keep ``width`` columns.

    ``w`` is at least ``n + width``. Slices and views do it, so gradients are summed in one order.
    """
    n, w = x.shape[-2:]
    moved = x.flatten(-2)[..., n - 1 : n - 1 + n * (w - 1)]
    rows: Tensor = moved.unflatten(-1, (n, w - 1))
    return rows[..., :width]
