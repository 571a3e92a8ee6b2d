"""The rotation in Triton. Triton itself is imported when the first CUDA tensor comes."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

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


@cache
def _kernels() -> tuple[Any, Any, Any]:
    from posenc.kernels.triton import norm, rotate

    return rotate.rotate_into, norm.norm_into, norm.norm_backward_into


def rotate_into(*arguments: Any) -> bool:
    """Rotate tensors into others, or in place; false if it cannot take them as they are."""
    result: bool = _kernels()[0](*arguments)
    return result


def norm_into(*arguments: Any) -> None:
    """Normalise and rotate a tensor with dense rows into another."""
    _kernels()[1](*arguments)


def norm_backward_into(*arguments: Any) -> Tensor:
    """Gradients of :func:`norm_into`: that to its input is written, that to the weight returned."""
    result: Tensor = _kernels()[2](*arguments)
    return result
