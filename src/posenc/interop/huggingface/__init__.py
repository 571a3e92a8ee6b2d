"""Hugging Face models on our rotation: `patch`, `unpatch`, `patched`."""

from posenc.interop.huggingface.patching import patch, patched, unpatch
from posenc.interop.huggingface.report import Place, Report, Table

__all__ = ["Place", "Report", "Table", "patch", "patched", "unpatch"]
