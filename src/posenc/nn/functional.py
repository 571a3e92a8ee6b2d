"""`posenc.functional` under the name PyTorch users look for."""

from posenc.functional import (
    alibi_bias,
    alibi_slopes,
    rotary_pos_embedding,
    sinusoidal_pos_embedding,
)

__all__ = ["alibi_bias", "alibi_slopes", "rotary_pos_embedding", "sinusoidal_pos_embedding"]
