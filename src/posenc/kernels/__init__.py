"""Kernels for users' tensors, in their dtype and on their device; no scaling rule is known here."""

from posenc.kernels.backends import Backend, backends
from posenc.kernels.cache import rotate_and_cache
from posenc.kernels.polar import polar
from posenc.kernels.reference import add
from posenc.kernels.rotation import norm_rotate, norm_rotate_qk, rotate, rotate_
from posenc.kernels.spec import (
    LARGEST,
    Norm,
    RowOutOfRange,
    Rows,
    SlotOutOfRange,
    Spec,
    Store,
    Write,
)

__all__ = [
    "LARGEST",
    "Backend",
    "Norm",
    "RowOutOfRange",
    "Rows",
    "SlotOutOfRange",
    "Spec",
    "Store",
    "Write",
    "add",
    "backends",
    "norm_rotate",
    "norm_rotate_qk",
    "polar",
    "rotate",
    "rotate_",
    "rotate_and_cache",
]
