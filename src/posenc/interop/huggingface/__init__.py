"""Hugging Face models on our rotation: `patch`, `unpatch`, `patched`, `apply_rotary_pos_emb`."""

from posenc.interop.huggingface.patching import patch, patched, unpatch
from posenc.interop.huggingface.report import Place, Report, Table
from posenc.interop.huggingface.rotation import apply_rotary_pos_emb

__all__ = ["Place", "Report", "Table", "apply_rotary_pos_emb", "patch", "patched", "unpatch"]
