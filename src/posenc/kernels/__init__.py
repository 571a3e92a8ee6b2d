"""Your dtype, your device: what touches the user's tensors. Tensors and flags, never a rule."""

from posenc.kernels.reference import add, rotate

__all__ = ["add", "rotate"]
