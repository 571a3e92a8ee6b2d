"""Ops on users' tensors, in their dtype and on their device; no scaling rule is known here."""

from posenc.ops.backends import Backend, backends
from posenc.ops.cache.cache import rotate_and_cache
from posenc.ops.rotation.polar import polar
from posenc.ops.rotation.reference import add
from posenc.ops.rotation.rotation import norm_rotate, norm_rotate_qk, rotate, rotate_
from posenc.ops.rotation.spec import (
    LARGEST,
    CacheTarget,
    CacheWrite,
    Norm,
    RowOutOfRange,
    SlotOutOfRange,
    Spec,
    TableRows,
)

__all__ = [
    "LARGEST",
    "Backend",
    "CacheTarget",
    "CacheWrite",
    "Norm",
    "RowOutOfRange",
    "SlotOutOfRange",
    "Spec",
    "TableRows",
    "add",
    "backends",
    "norm_rotate",
    "norm_rotate_qk",
    "polar",
    "rotate",
    "rotate_",
    "rotate_and_cache",
]
