"""Attention with a relative bias, and ALiBi for FlexAttention and SDPA."""

from posenc.functional.biased import alibi_attention, biased_attention, biased_attention_with_lse
from posenc.functional.mods import (
    alibi_block_mask,
    alibi_mask_mod,
    alibi_score_mod,
    relative_score_mod,
)
from posenc.ops.attention.biases import Bias, DistanceTable, RowBias, RunningSum, Slopes
from posenc.ops.attention.biases.vectors import relative_terms
from posenc.ops.attention.pruning import alibi_reach, bound_scores
from posenc.ops.attention.rows import relative_bias

__all__ = [
    "Bias",
    "DistanceTable",
    "RowBias",
    "RunningSum",
    "Slopes",
    "alibi_attention",
    "alibi_block_mask",
    "alibi_mask_mod",
    "alibi_reach",
    "alibi_score_mod",
    "biased_attention",
    "biased_attention_with_lse",
    "bound_scores",
    "relative_bias",
    "relative_score_mod",
    "relative_terms",
]
__dir__ = __all__.copy
