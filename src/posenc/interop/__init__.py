"""Other people's formats: checkpoints in either layout, and the models that read them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["checkpoints", "distributed", "huggingface", "onnx", "ring"]
__dir__ = __all__.copy


if TYPE_CHECKING:
    from posenc.interop import checkpoints, distributed, huggingface, onnx, ring
else:
    # A type checker takes any name from a module that has this function.
    def __getattr__(name: str) -> Any:
        # Each needs something of its own, so none is imported before it is used.
        if name in __all__:
            return import_module(f"posenc.interop.{name}")
        raise AttributeError(f"module 'posenc.interop' has no attribute {name!r}")
