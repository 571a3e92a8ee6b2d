"""Scaling rules for `posenc.RoPE`, for sequences longer than those a model was trained on."""

from posenc.numerics.scaling import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    PerPair,
    Proportional,
    Rule,
    YaRN,
)

__all__ = [
    "NTK",
    "DynamicNTK",
    "Linear",
    "Llama3",
    "LongRoPE",
    "PerPair",
    "Proportional",
    "Rule",
    "YaRN",
]
