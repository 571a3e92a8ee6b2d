"""Positional encodings as functions, without state."""

from posenc.functional.distance_biases import (
    alibi_bias,
    alibi_model_slopes,
    alibi_slopes,
    t5_buckets,
)
from posenc.functional.fourier import fourier_features, nerf_features
from posenc.functional.norm import qk_norm_rope
from posenc.functional.polar import polar
from posenc.functional.rotary import rotary_pos_embedding, rotate, rotate_, rotate_qk, rotate_qk_
from posenc.functional.serving import rotate_and_cache
from posenc.functional.sinusoidal import (
    sinusoidal_grid_embedding,
    sinusoidal_pos_embedding,
    timestep_embedding,
)
from posenc.numerics.frequencies import pixel_frequencies

__all__ = [
    "alibi_bias",
    "alibi_model_slopes",
    "alibi_slopes",
    "fourier_features",
    "nerf_features",
    "pixel_frequencies",
    "polar",
    "qk_norm_rope",
    "rotary_pos_embedding",
    "rotate",
    "rotate_",
    "rotate_and_cache",
    "rotate_qk",
    "rotate_qk_",
    "sinusoidal_grid_embedding",
    "sinusoidal_pos_embedding",
    "t5_buckets",
    "timestep_embedding",
]
__dir__ = __all__.copy
