"""ALiBi for FlexAttention and SDPA, and attention that prunes far keys."""

from posenc.attention.alibi import alibi_attention
from posenc.attention.blocks import alibi_block_mask
from posenc.attention.mods import alibi_mask_mod, alibi_score_mod
from posenc.attention.pruning import alibi_reach, bound_scores

__all__ = [
    "alibi_attention",
    "alibi_block_mask",
    "alibi_mask_mod",
    "alibi_reach",
    "alibi_score_mod",
    "bound_scores",
]
