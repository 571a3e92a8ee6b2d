"""Positional encodings for transformers: sinusoidal, learned, rotary (RoPE) and ALiBi.

Angles are computed in float64, whatever the dtype of the model, and rounded once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from posenc import attention, axes, cache, functional, nn, positions, scaling
from posenc.nn import (
    FIRE,
    KERPLE,
    STRING,
    ALiBi,
    CoPE,
    DeBERTaBias,
    DualChunk,
    ForgetGate,
    FourierFeatures,
    GridBias,
    LearnedBias,
    LearnedPosEmbedding,
    MixedRoPE,
    PoPE,
    RelativeKeys,
    RoPE,
    RotaryPosEmbedding,
    Sandwich,
    SelfExtend,
    SinusoidalGrid,
    SinusoidalPE,
    SinusoidalPosEmbedding,
    T5Bias,
    TransformerXLBias,
    XPos,
    rope_layers,
)
from posenc.ops import backends

__all__ = [
    "FIRE",
    "KERPLE",
    "STRING",
    "ALiBi",
    "CoPE",
    "DeBERTaBias",
    "DualChunk",
    "ForgetGate",
    "FourierFeatures",
    "GridBias",
    "LearnedBias",
    "LearnedPosEmbedding",
    "MixedRoPE",
    "PoPE",
    "RelativeKeys",
    "RoPE",
    "RotaryPosEmbedding",
    "Sandwich",
    "SelfExtend",
    "SinusoidalGrid",
    "SinusoidalPE",
    "SinusoidalPosEmbedding",
    "T5Bias",
    "TransformerXLBias",
    "XPos",
    "__version__",
    "attention",
    "axes",
    "backends",
    "cache",
    "functional",
    "interop",
    "nn",
    "positions",
    "rope_layers",
    "scaling",
]
# dir() of every public module shows only its public names, not what the file imports.
__dir__ = __all__.copy


def _version() -> str:
    # pyproject.toml has the version, and an install copies it.
    metadata = import_module("importlib.metadata")
    try:
        return str(metadata.version("posenc"))
    except metadata.PackageNotFoundError:
        return "0+not.installed"


if TYPE_CHECKING:
    from posenc import interop

    __version__: str
else:
    # A type checker takes any name from a module that has this function.
    def __getattr__(name: str) -> Any:
        # At first use, because most programs do not need it.
        if name == "interop":
            return import_module("posenc.interop")
        if name == "__version__":
            return _version()
        raise AttributeError(f"module 'posenc' has no attribute {name!r}")
