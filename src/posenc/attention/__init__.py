"""Attention with a relative bias, and ALiBi for FlexAttention and SDPA."""

from posenc.attention.biased import (
    alibi_attention,
    biased_attention,
    biased_attention_with_lse,
)
from posenc.attention.biases import Bias, DistanceTable, RowBias, RunningSum, Slopes
from posenc.attention.mods import (
    alibi_block_mask,
    alibi_mask_mod,
    alibi_score_mod,
    relative_score_mod,
)
from posenc.attention.pruning import alibi_reach, bound_scores
from posenc.attention.rows import relative_bias
from posenc.attention.terms import relative_terms

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
