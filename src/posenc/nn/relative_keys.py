"""Shaw's relative keys: a learned vector for each distance, which queries look at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posenc._contract import checks
from posenc.attention.biased import AttentionOptions
from posenc.attention.biases import RowBias
from posenc.attention.terms import relative_terms
from posenc.nn._product import ProductBias


class RelativeKeys(ProductBias):
    r"""Add the product of the query with a learned vector for each distance, clipped.

    .. math:: \text{bias}_{ij} = s\, q_i \cdot a_{\text{clip}(j - i)}, \qquad
              -m \le \text{clip}(j - i) \le m'

    The paper has vectors that are added to the values too; they are not here, and its section 4.3
    found no loss without them. On CUDA the attention's kernel makes the products.

    Args:
        head_dim: Channels ``D`` of a head.
        max_distance: :math:`m`; earlier keys share the vector of this distance.
        causal: Whether a query sees only keys up to its own. Otherwise later keys have vectors of
            their own.
        max_later: :math:`m'` of later keys, ``max_distance`` if None; not if causal.
        num_heads: Heads, if each has vectors of its own, as in Music Transformer; None if they
            share them.
        dtype: The dtype of the parameter, torch's default if None. The bias is made in float32.

    Attributes:
        weight: Parameter of shape ``(max_distance + 1 + max_later, head_dim)``, or
            ``(..., num_heads, head_dim)``, the farthest earlier key first; zero at the start. If
            causal, the vector of the query's own key is the last.

    Examples:
        >>> bias = RelativeKeys(head_dim=64, max_distance=16)
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> bias.attention(q, k, v).shape
        torch.Size([1, 8, 512, 64])

    References:
        Shaw et al., *Self-Attention with Relative Position Representations*, 2018, section 3.2.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        max_distance: int,
        causal: bool = True,
        max_later: int | None = None,
        num_heads: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.head_dim = checks.integer(who, "head_dim", head_dim)
        self.max_distance = checks.integer(who, "max_distance", max_distance, least=0)
        self.causal = checks.boolean(who, "causal", causal)
        self.max_later = max_later
        if max_later is not None:
            self.max_later = checks.integer(who, "max_later", max_later, least=0)
            if causal:
                rule = "max_later must be None if causal, because no later key is seen"
                checks.fail(who, rule, max_later, "Pass causal=False.")
        self.num_heads = checks.optional(checks.integer, who, "num_heads", num_heads)
        self.dtype = checks.optional(checks.float_dtype, who, "dtype", dtype)
        heads = () if self.num_heads is None else (self.num_heads,)
        rows = self.max_distance + 1 + self._later
        self.weight = nn.Parameter(torch.empty(rows, *heads, self.head_dim, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to zero."""
        nn.init.zeros_(self.weight)

    @property
    def _later(self) -> int:
        if self.causal:
            return 0
        return self.max_distance if self.max_later is None else self.max_later

    def _rows(self, q: Tensor, k: Tensor, scale: float, options: AttentionOptions) -> RowBias:
        def rows(distance: Tensor) -> Tensor:
            return self.max_distance - distance.clamp(-self._later, self.max_distance)

        how: Any = {"scale": scale, "query_offset": options.get("query_offset")}
        how |= {"reach": (-self._later, self.max_distance)}
        return relative_terms(q, k, rows, for_queries=self.weight, **how)
