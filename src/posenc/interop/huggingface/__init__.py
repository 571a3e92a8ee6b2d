"""Hugging Face models on our rotation and attention: `patch` and `unpatch`."""

from posenc.interop.huggingface.norms import Norms
from posenc.interop.huggingface.patching import Place, Report, Table, patch, patched, unpatch
from posenc.interop.huggingface.rotation import apply_rotary_pos_emb
from posenc.interop.huggingface.stacks import Attention

__all__ = [
    "Attention",
    "Norms",
    "Place",
    "Report",
    "Table",
    "apply_rotary_pos_emb",
    "patch",
    "patched",
    "unpatch",
]
