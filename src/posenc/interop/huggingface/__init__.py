"""Hugging Face models on our rotation and attention, or without a rotation: `patch`, `unpatch`."""

from posenc.interop.huggingface.biased import Attention
from posenc.interop.huggingface.kernel_mapping import kernel_mapping
from posenc.interop.huggingface.modules import Norms
from posenc.interop.huggingface.patching import (
    Kept,
    Place,
    Report,
    Table,
    drop_rotation,
    dual_chunk,
    patch,
    patched,
    self_extend,
    unpatch,
)
from posenc.interop.huggingface.rotation import apply_rotary_pos_emb

__all__ = [
    "Attention",
    "Kept",
    "Norms",
    "Place",
    "Report",
    "Table",
    "apply_rotary_pos_emb",
    "drop_rotation",
    "dual_chunk",
    "kernel_mapping",
    "patch",
    "patched",
    "self_extend",
    "unpatch",
]
__dir__ = __all__.copy
