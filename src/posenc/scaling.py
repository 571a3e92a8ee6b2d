"""Scaling rules for `posenc.RoPE`, for sequences longer than those a model was trained on."""

from posenc.numerics.scaling import *  # noqa: F403
from posenc.numerics.scaling import __all__ as __all__

__dir__ = __all__.copy
