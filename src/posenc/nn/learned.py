"""Learned position embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posenc import kernels
from posenc._contract import checks
from posenc._contract.sharding import replicate_like
from posenc.nn._module import ReadOnlyArguments


class LearnedPosEmbedding(ReadOnlyArguments):
    """Add a trained vector for each position to embeddings ``(L, D)`` or ``(N, L, D)``.

    The table is ``self.pos_emb``, a :class:`torch.nn.Embedding`, which is learned and saved. The
    sum keeps the input's dtype.

    Args:
        max_len: Rows of the table.
        embed_dim: Channels ``D``.

    Examples:
        >>> pos = LearnedPosEmbedding(max_len=512, embed_dim=64)
        >>> pos(torch.randn(2, 16, 64), offset=32).shape
        torch.Size([2, 16, 64])

    References:
        Gehring et al., *Convolutional Sequence to Sequence Learning*, 2017, section 3.1.
    """

    def __init__(self, max_len: int, embed_dim: int) -> None:
        super().__init__()
        who = type(self).__name__
        self.max_len = checks.integer(who, "max_len", max_len)
        self.embed_dim = checks.integer(who, "embed_dim", embed_dim)
        self.pos_emb = nn.Embedding(self.max_len, self.embed_dim)

    def forward(self, x: Tensor, offset: int = 0, *, position_ids: Tensor | None = None) -> Tensor:
        """Add the vectors of positions ``offset .. offset + L - 1``.

        Args:
            x: Floating tensor of shape ``(L, D)`` or ``(N, L, D)``.
            offset: Position of the first token.
            position_ids: Integers of shape ``(L,)`` or ``(N, L)``, instead of ``offset``.

        Returns:
            A new tensor with the shape and dtype of ``x``.
        """
        who = type(self).__name__
        length, width = checks.check_embeddings(who, "x", x)
        way_out = f"Build LearnedPosEmbedding({self.max_len}, {width})."
        checks.equal(who, "embed_dim", width, self.embed_dim, way_out)
        # Not the weight's device: one that is offloaded is on meta until it is called.
        device = x.device
        if position_ids is None:
            start = checks.integer(who, "offset", offset, least=0)
            checks.check_range(who, start, length, "max_len", self.max_len)
            at = torch.arange(start, start + length, device=device)
        else:
            checks.exclusive_offset(who, offset)
            limit = self.max_len
            at = checks.position_ids(who, position_ids, x.shape, device, "max_len", limit)
            checks.check_ids(who, at, "max_len", limit)
        return kernels.add(x, self.pos_emb(replicate_like(self.pos_emb.weight, at)))
