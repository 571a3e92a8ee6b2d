"""Attention over a sequence that is sharded over ranks, with plain tensors."""

from posenc.interop.ring.attention import ring_attention
from posenc.interop.ring.cumsum import sharded_cumsum

__all__ = ["ring_attention", "sharded_cumsum"]
