"""Where scores are made: ALiBi for FlexAttention and SDPA, and attention that skips far keys."""

from posenc.attention.alibi import alibi_attention, alibi_block_mask, alibi_reach, score_bound
from posenc.attention.mods import alibi_mask_mod, alibi_score_mod

__all__ = [
    "alibi_attention",
    "alibi_block_mask",
    "alibi_mask_mod",
    "alibi_reach",
    "alibi_score_mod",
    "score_bound",
]
