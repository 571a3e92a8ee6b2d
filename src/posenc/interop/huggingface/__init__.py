"""Hugging Face models on our rotation: `patch`, `unpatch`, `patched`, `apply_rotary_pos_emb`."""

from posenc.interop.huggingface.patching import Place, Report, Table, patch, patched, unpatch
from posenc.interop.huggingface.rotation import apply_rotary_pos_emb

__all__ = ["Place", "Report", "Table", "apply_rotary_pos_emb", "patch", "patched", "unpatch"]
