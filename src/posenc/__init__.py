"""Positional encodings for transformers: sinusoidal, learned, rotary (RoPE) and ALiBi.

Exact at any position, in float16, bfloat16, float32 and float64, on any device of PyTorch's.
"""

from posenc import attention, axes, functional, nn, positions, scaling
from posenc.kernels import backends, keep_memory
from posenc.nn import (
    ALiBi,
    LearnedPosEmbedding,
    MixedRoPE,
    RoPE,
    RotaryPosEmbedding,
    SinusoidalPE,
    SinusoidalPosEmbedding,
    XPos,
)

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "LearnedPosEmbedding",
    "MixedRoPE",
    "RoPE",
    "RotaryPosEmbedding",
    "SinusoidalPE",
    "SinusoidalPosEmbedding",
    "XPos",
    "__version__",
    "attention",
    "axes",
    "backends",
    "functional",
    "keep_memory",
    "nn",
    "positions",
    "scaling",
]
