"""A learned number for each distance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posenc._contract import checks
from posenc.attention.biases import DistanceTable
from posenc.nn._bias import RelativeBias


class LearnedBias(RelativeBias):
    r"""Add a learned number for each head and distance, clipped at ``max_distance``.

    .. math:: \text{bias}_{h,i,j} = w_{h,\,\text{clip}(i - j)}

    Args:
        num_heads: Heads ``H``.
        max_distance: The last distance with a number of its own; farther keys share it.
        causal: Whether a query sees only keys up to its own. Otherwise later keys have numbers of
            their own, which come first.
        dtype: The dtype of the parameter, torch's default if None. The bias is made in float32.

    Attributes:
        weight: Parameter of shape ``(num_heads, max_distance + 1)``, or
            ``(num_heads, 2 * max_distance + 1)`` if not causal; zero at the start.

    Examples:
        >>> bias = LearnedBias(num_heads=8, max_distance=100)
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> bias.attention(q, k, v).shape
        torch.Size([1, 8, 512, 64])

    References:
        Shaw et al., *Self-Attention with Relative Position Representations*, 2018, for the clipped
        distance; Raffel et al., 2020, for numbers instead of vectors.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        max_distance: int,
        causal: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, causal=causal, dtype=dtype)
        who = type(self).__name__
        self.max_distance = checks.integer(who, "max_distance", max_distance, least=0)
        columns = (1 if causal else 2) * self.max_distance + 1
        self.weight = nn.Parameter(torch.empty(self.num_heads, columns, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to zero."""
        nn.init.zeros_(self.weight)

    def _as_bias(
        self, keys: int, dtype: torch.dtype, ids: Tensor | None, device: torch.device
    ) -> DistanceTable:
        return DistanceTable(self.weight.to(dtype), 0 if self.causal else self.max_distance)
