"""Positional encodings as modules, which keep their tables between calls."""

from posenc.nn import functional
from posenc.nn.alibi import ALiBi
from posenc.nn.cope import CoPE
from posenc.nn.deberta import DeBERTaBias
from posenc.nn.extended import DualChunk, SelfExtend
from posenc.nn.fire import FIRE
from posenc.nn.forget_gate import ForgetGate
from posenc.nn.fourier import FourierFeatures
from posenc.nn.grid_bias import GridBias
from posenc.nn.kerple import KERPLE
from posenc.nn.layers import rope_layers
from posenc.nn.learned import LearnedPosEmbedding
from posenc.nn.learned_bias import LearnedBias
from posenc.nn.mixed import MixedRoPE
from posenc.nn.pope import PoPE
from posenc.nn.relative_keys import RelativeKeys
from posenc.nn.rope import RoPE
from posenc.nn.rotary import RotaryPosEmbedding
from posenc.nn.sandwich import Sandwich
from posenc.nn.sinusoidal import SinusoidalPE, SinusoidalPosEmbedding
from posenc.nn.sinusoidal_grid import SinusoidalGrid
from posenc.nn.string import STRING
from posenc.nn.t5 import T5Bias
from posenc.nn.transformer_xl import TransformerXLBias
from posenc.nn.xpos import XPos

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
    "functional",
    "rope_layers",
]
