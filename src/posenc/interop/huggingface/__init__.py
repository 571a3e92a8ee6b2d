"""Hugging Face models on our rotation and attention, or without a rotation: `patch`, `unpatch`."""

from posenc.interop.huggingface.norms import Norms
from posenc.interop.huggingface.patching import (
    Kept,
    Place,
    Report,
    Table,
    patch,
    patched,
    unpatch,
)
from posenc.interop.huggingface.rotation import apply_rotary_pos_emb
from posenc.interop.huggingface.stacks import Attention
from posenc.interop.huggingface.unrotated import drop_rotation, dual_chunk, self_extend

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
    "patch",
    "patched",
    "self_extend",
    "unpatch",
]
