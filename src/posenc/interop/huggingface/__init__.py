"""Hugging Face models on our rotation: `patch`, `unpatch`, `patched`."""

from posenc.interop.huggingface.patching import Place, Report, Table, patch, patched, unpatch

__all__ = ["Place", "Report", "Table", "patch", "patched", "unpatch"]
