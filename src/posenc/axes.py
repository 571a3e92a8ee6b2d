"""Arrangements for `posenc.RoPE` where positions have several coordinates: M-RoPE and vision."""

from posenc.numerics.axes import Axes, Axial, Sections

__all__ = ["Axes", "Axial", "Sections"]
__dir__ = __all__.copy
