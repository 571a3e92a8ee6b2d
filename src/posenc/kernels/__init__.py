"""Your dtype, your device: what touches the user's tensors. Tensors and flags, never a rule."""

from posenc.kernels.backend import Backend, backends
from posenc.kernels.eager import rotate, rotate_, rotate_plain
from posenc.kernels.norm import norm_rotate
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
    "rotate_plain",
]
