"""Kernels for users' tensors, in their dtype and on their device; no scaling rule is known here."""

from posenc.kernels import ops as ops  # defines the ops that dispatch calls
from posenc.kernels.dispatch import Backend, backends, norm_rotate, rotate, rotate_
from posenc.kernels.reference import add
from posenc.kernels.spec import Norm, RowOutOfRange, Rows, Spec

__all__ = [
    "Backend",
    "Norm",
    "RowOutOfRange",
    "Rows",
    "Spec",
    "add",
    "backends",
    "norm_rotate",
    "rotate",
    "rotate_",
]
