"""`posenc.functional` under the name PyTorch users look for."""

from posenc.functional import (
    alibi_bias,
    alibi_key_bias,
    alibi_model_bias,
    alibi_model_slopes,
    alibi_slopes,
    qk_norm_rope,
    rotary_pos_embedding,
    rotate,
    rotate_,
    rotate_qk_,
    sinusoidal_grid_embedding,
    sinusoidal_pos_embedding,
    timestep_embedding,
)

__all__ = [
    "alibi_bias",
    "alibi_key_bias",
    "alibi_model_bias",
    "alibi_model_slopes",
    "alibi_slopes",
    "qk_norm_rope",
    "rotary_pos_embedding",
    "rotate",
    "rotate_",
    "rotate_qk_",
    "sinusoidal_grid_embedding",
    "sinusoidal_pos_embedding",
    "timestep_embedding",
]
