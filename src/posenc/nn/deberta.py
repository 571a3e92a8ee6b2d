"""DeBERTa's disentangled attention: queries and keys look at a vector for each distance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posenc._contract import checks
from posenc.attention.biased import AttentionOptions
from posenc.attention.biases import RowBias
from posenc.attention.terms import relative_terms
from posenc.nn._bias import check_heads
from posenc.nn._product import ProductBias
from posenc.nn._tables import SharedTables, TableModule, Tensors


def _bucket_table(positions: Tensor, dtype: torch.dtype, buckets: int, most: int) -> Tensors:
    """The buckets of the distances up to ``2 most``, either way; the farthest are all clipped."""
    # On the CPU for every device, and in float32 as published, whatever torch's default: the
    # ceiling of another logarithm may differ.
    distance = torch.arange(-2 * most, 2 * most + 1, device="cpu")
    middle = buckets // 2
    far = distance.abs().clamp(min=middle).to(torch.float32)
    log = (far / middle).log() / far.new_tensor((most - 1) / middle).log()
    large = (log * (middle - 1)).ceil().long() + middle
    found = torch.where(distance.abs() <= middle, distance, large * distance.sign())
    return (found.to(positions.device),)


class DeBERTaBias(TableModule, ProductBias):
    r"""Add the products of query and key with learned vectors for each distance.

    .. math::
        \text{score}_{ij} = \frac{1}{\sqrt{3D}}
        \big(q_i \cdot k_j + q_i \cdot K_{\delta(i - j)} + k_j \cdot Q_{\delta(i - j)}\big)

    with :math:`\delta` clipped, or also in buckets that widen with the logarithm, as in DeBERTa v2
    and v3. **The scale is for three terms**: :meth:`attention` has it unless the call names
    another. On CUDA the attention's kernel makes the products.

    Args:
        num_heads: Heads ``H``.
        head_dim: Channels ``D`` of a head.
        max_relative_positions: Distances are from minus this to one less than this; with buckets,
            the distance at which these end.
        position_buckets: Buckets of earlier keys, and of later ones; None for none (-1 in configs).
        causal: Whether a query sees only keys up to its own: False for DeBERTa itself.
        dtype: The dtype of the parameters, torch's default if None. The bias is made in float32.

    Attributes:
        pos_key: :math:`K`, a Parameter of shape ``(R, num_heads, head_dim)``, later keys first,
            with ``R`` twice ``position_buckets``, or ``max_relative_positions``; zero at the start.
        pos_query: :math:`Q`, in the same way.

    Examples:
        >>> bias = DeBERTaBias(num_heads=12, head_dim=64, position_buckets=256, causal=False)
        >>> q, k, v = torch.randn(3, 1, 12, 512, 64).unbind()
        >>> bias.attention(q, k, v).shape
        torch.Size([1, 12, 512, 64])

    References:
        He et al., *DeBERTa: Decoding-enhanced BERT with Disentangled Attention*, 2021, section 3.1;
        He et al., *DeBERTaV3*, 2023.
    """

    _terms = 3

    def __init__(
        self,
        num_heads: int,
        *,
        head_dim: int,
        max_relative_positions: int = 512,
        position_buckets: int | None = None,
        causal: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.num_heads = checks.integer(who, "num_heads", num_heads)
        self.head_dim = checks.integer(who, "head_dim", head_dim)
        name = "max_relative_positions"
        self.max_relative_positions = checks.integer(who, name, max_relative_positions)
        self.causal = checks.boolean(who, "causal", causal)
        self.dtype = checks.optional(checks.float_dtype, who, "dtype", dtype)
        self.position_buckets = position_buckets
        self._span, self._tables = self.max_relative_positions, None
        if position_buckets is not None:
            span = checks.integer(who, "position_buckets", position_buckets, least=2)
            if not self.max_relative_positions - 1 > span // 2:
                rule = f"max_relative_positions must be above {span // 2 + 1}, to need buckets"
                got = self.max_relative_positions
                checks.fail(who, rule, got, "Pass position_buckets=None.")
            self._span = self.position_buckets = span
            how = span, self.max_relative_positions
            self._tables = SharedTables(_bucket_table, how, 1, torch.int64)
        shape = 2 * self._span, self.num_heads, self.head_dim
        self.pos_key = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.pos_query = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set both to zero."""
        nn.init.zeros_(self.pos_key)
        nn.init.zeros_(self.pos_query)

    def distance_rows(self, distance: Tensor) -> Tensor:
        """The row of the vectors for each distance ``i - j``, an int64 tensor, as the rows are."""
        if self._tables is not None:
            like = torch.empty(0, device=distance.device)
            (buckets,) = self._tables.read(like, torch.int64) or self._tables.at(like)
            far = 2 * self.max_relative_positions
            distance = buckets[distance.clamp(-far, far) + far]
        return (distance + self._span).clamp(0, 2 * self._span - 1)

    def _rows(self, q: Tensor, k: Tensor, scale: float, options: AttentionOptions) -> RowBias:
        check_heads(type(self).__name__, q, self.num_heads)
        how: Any = {"scale": scale, "query_offset": options.get("query_offset")}
        # Buckets of an odd number end a little later.
        far = self.max_relative_positions * (1 + self._span % 2)
        how |= {"reach": (-far, far)}
        vectors: Any = {"for_queries": self.pos_key, "for_keys": self.pos_query}
        return relative_terms(q, k, self.distance_rows, **vectors, **how)
