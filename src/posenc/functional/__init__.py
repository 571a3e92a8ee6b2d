"""Stateless forms: the numbers of `numerics` meeting the tensors of `kernels`."""

from posenc.functional.alibi import alibi_bias, alibi_slopes
from posenc.functional.rotary import rotary_pos_embedding
from posenc.functional.sinusoidal import sinusoidal_pos_embedding

__all__ = ["alibi_bias", "alibi_slopes", "rotary_pos_embedding", "sinusoidal_pos_embedding"]
