"""The rotation in Triton. Triton itself is imported when the first CUDA tensor comes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from posenc.kernels.spec import Norm, Rows, Spec

# Looked up once, here: a compiler that traces a call does not follow the search.
installed = importlib.util.find_spec("triton") is not None


def available() -> bool:
    """Whether Triton is installed and torch sees a CUDA device."""
    return installed and torch.cuda.is_available()


def why() -> str:
    """The reason for :func:`available`, in words."""
    if not installed:
        return "triton is not installed"
    return "ready" if available() else "torch sees no CUDA device"


def rotate_into(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    spec: Spec,
) -> None:
    """Rotate each of ``xs`` into the tensor of ``ys`` beside it, which may be itself."""
    _rotation()(xs, ys, cos, sin, rows, spec)


@cache
def _rotation() -> Callable[..., None]:
    from posenc.kernels.triton import rotate

    return rotate.rotate_into


def norm_rotate(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec, norm: Norm
) -> Tensor:
    """Normalise and rotate ``x`` into a new tensor."""
    from posenc.kernels.triton import norm as kernel

    return kernel.norm_rotate(x, weight, cos, sin, rows, spec, norm)


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
    """Gradients of :func:`norm_rotate` to ``x`` and ``weight``."""
    from posenc.kernels.triton import norm as kernel

    return kernel.norm_rotate_backward(g, x, weight, cos, sin, rows, spec, norm)
