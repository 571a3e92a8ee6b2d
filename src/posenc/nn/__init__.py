"""Positional encodings as modules, which keep their tables between calls."""

from posenc.nn import functional
from posenc.nn.alibi import ALiBi
from posenc.nn.learned import LearnedPosEmbedding
from posenc.nn.mixed import MixedRoPE
from posenc.nn.rope import RoPE
from posenc.nn.rotary import RotaryPosEmbedding
from posenc.nn.sinusoidal import SinusoidalPE, SinusoidalPosEmbedding
from posenc.nn.xpos import XPos

__all__ = [
    "ALiBi",
    "LearnedPosEmbedding",
    "MixedRoPE",
    "RoPE",
    "RotaryPosEmbedding",
    "SinusoidalPE",
    "SinusoidalPosEmbedding",
    "XPos",
    "functional",
]
