"""CoPE: positions that the content counts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posenc._contract import checks, qk_checks
from posenc._contract.tracing import without_autocast
from posenc.attention.biased import AttentionOptions
from posenc.attention.biases import RowBias, Terms, for_each_query_head
from posenc.attention.terms import level_rows
from posenc.nn._product import ProductBias

# Positions that a kernel can hold.
_MOST = 256


class CoPE(ProductBias):
    r"""Add the product of the query with the embedding of a position that gates count.

    .. math::
        p_{ij} = \min\Big(\sum_{l=j}^{i} \sigma(s\, q_i \cdot k_l),\ P - 1\Big), \qquad
        \text{bias}_{ij} = q_i \cdot e[p_{ij}]

    for :math:`P` whole positions; between two of them :math:`q_i \cdot e` is interpolated. The
    gates are those of the scaled scores with ``attn_mask``, as in the authors' code: a key that the
    mask hides is not counted. Attention is causal. On CUDA it is one kernel for up to 256
    positions; elsewhere, and with a mask, it goes a few queries at a time.

    Args:
        head_dim: Channels ``D`` of a head.
        max_pos: Positions :math:`P`.
        dtype: The dtype of the parameter, torch's default if None. The bias is made in float32.

    Attributes:
        pos_emb: Parameter of shape ``(1, head_dim, max_pos)``, shared by the heads; zero at the
            start.

    Examples:
        >>> cope = CoPE(head_dim=64, max_pos=32)
        >>> q, k, v = torch.randn(3, 1, 8, 100, 64).unbind()
        >>> cope.attention(q, k, v).shape
        torch.Size([1, 8, 100, 64])

    References:
        Golovneva et al., *Contextual Position Encoding: Learning to Count What's Important*, 2024.
    """

    causal = True

    def __init__(self, head_dim: int, *, max_pos: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        who = type(self).__name__
        self.head_dim = checks.integer(who, "head_dim", head_dim)
        self.max_pos = checks.integer(who, "max_pos", max_pos)
        self.dtype = checks.optional(checks.float_dtype, who, "dtype", dtype)
        self.pos_emb = nn.Parameter(torch.empty(1, self.head_dim, self.max_pos, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the embeddings to zero."""
        nn.init.zeros_(self.pos_emb)

    def _rows(self, q: Tensor, k: Tensor, scale: float, options: AttentionOptions) -> RowBias:
        who, lengths = type(self).__name__, (q.shape[2], k.shape[2])
        offset, mask = options.get("query_offset"), options.get("attn_mask")
        start = qk_checks.check_query_offset(who, offset, *lengths, q.device)
        mask = qk_checks.check_attn_mask(who, mask, (*q.shape[:2], *lengths), q.device)
        start = start.reshape(-1, 1) if isinstance(start, Tensor) else start
        wide = torch.promote_types(q.dtype, torch.float32)

        def rows(own: Tensor, index: Tensor) -> Tensor:
            with without_autocast(q):
                at_queries = (own - start)[0]
                some = q[:, :, at_queries].to(wide)
                keys = for_each_query_head(k.index_select(2, index).to(wide), q.shape[1])
                scores, hidden = some @ keys.mT * scale, index > own[:, None, :, None]
                if mask is not None:
                    part = mask if mask.shape[2] == 1 else mask[:, :, at_queries]
                    part = part if mask.shape[3] == 1 else part[..., index]
                    hidden = hidden | (~part if mask.dtype == torch.bool else part == float("-inf"))
                    scores = scores if mask.dtype == torch.bool else scores + part.to(wide)
                # A hidden key has no gate.
                scores = scores.masked_fill(hidden, float("-inf"))
                return level_rows(some @ self.pos_emb.to(wide), scores, own, index)

        terms = None
        if q.is_cuda and mask is None and self.max_pos <= _MOST:
            with without_autocast(q):
                terms = Terms(levels=q.to(wide) @ self.pos_emb.to(wide))
        return RowBias(rows, terms)
