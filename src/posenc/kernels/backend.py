"""Which implementation runs: C on the CPU, Triton on CUDA, the reference elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from posenc.kernels import c, reference, triton
from posenc.kernels.spec import Rows, Spec


class Backend(NamedTuple):
    """One implementation of the kernels, and whether it can run here."""

    name: str
    serves: str
    available: bool
    why: str


def backends() -> list[Backend]:
    """The implementations of the kernels, which devices they serve, and why one is missing.

    Examples:
        >>> for backend in backends():
        ...     print(backend.name, "serves", backend.serves)
        c serves cpu
        triton serves cuda
        reference serves every device
    """
    return [
        Backend("c", "cpu", c.available, c.why),
        Backend("triton", "cuda", triton.available(), triton.why()),
        Backend("reference", "every device", True, "plain torch operations"),
    ]


def rotate(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> list[Tensor]:
    """Rotate each of ``xs`` into a new tensor that keeps its strides."""
    into = _into(xs[0])
    if into is None:
        return [like(x, reference.rotate(x, cos, sin, rows, spec)) for x in xs]
    ys = [torch.empty_like(x) for x in xs]
    into(xs, ys, cos, sin, rows, spec)
    return ys


def like(x: Tensor, y: Tensor) -> Tensor:
    """``y`` with the strides of ``x``, which the ops promise a compiler of their results."""
    wanted = torch.empty_like(x)
    return y if y.stride() == wanted.stride() else wanted.copy_(y)


def rotate_(xs: list[Tensor], cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> None:
    """Rotate each of ``xs`` where it stands."""
    into = _into(xs[0])
    # Other pairs in the output than in the input would overwrite what is still to be read.
    if into is None or spec.interleaved != spec.interleaved_out:
        for x, y in zip(xs, rotate(xs, cos, sin, rows, spec), strict=True):
            x.copy_(y)
    else:
        into(xs, xs, cos, sin, rows, spec)


def _into(x: Tensor) -> Callable[..., None] | None:
    if x.is_cpu:
        return c.rotate_into if c.available else None
    if x.is_cuda:
        return triton.rotate_into if triton.installed else None
    return None
