"""Your dtype, your device: what touches the user's tensors. Tensors and flags, never a rule."""

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
