"""Positional encodings as modules, which keep their tables between calls."""

from posenc.nn import functional
from posenc.nn._bias import RelativeBias
from posenc.nn.added import (
    LearnedPosEmbedding,
    SinusoidalGrid,
    SinusoidalPE,
    SinusoidalPosEmbedding,
)
from posenc.nn.alibi import ALiBi
from posenc.nn.distance_biases import FIRE, KERPLE, LearnedBias, Sandwich, T5Bias
from posenc.nn.extended import DualChunk, SelfExtend
from posenc.nn.forget_gate import ForgetGate
from posenc.nn.fourier import FourierFeatures
from posenc.nn.grid_bias import GridBias
from posenc.nn.learned_rotary import STRING, MixedRoPE
from posenc.nn.pope import PoPE
from posenc.nn.rope import RoPE, rope_layers
from posenc.nn.rotary import RotaryPosEmbedding, XPos
from posenc.nn.vector_biases import CoPE, DeBERTaBias, RelativeKeys, TransformerXLBias

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
    "RelativeBias",
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
    "functional",
    "rope_layers",
]
__dir__ = __all__.copy
