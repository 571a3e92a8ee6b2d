"""Learned position embedding."""

from __future__ import annotations

from torch import Tensor, nn

from posenc import kernels
from posenc._contract import checks
from posenc._contract.position_checks import Limit
from posenc._contract.sharding import replicate_like
from posenc.functional._positions import positions_of, rows_of
from posenc.nn._module import ReadOnlyArguments


class LearnedPosEmbedding(ReadOnlyArguments):
    """Add a trained vector for each position to embeddings ``(L, D)`` or ``(N, L, D)``.

    The table is ``self.pos_emb``, a :class:`torch.nn.Embedding` in torch's default dtype, which is
    learned and saved. The sum keeps the input's dtype.

    Args:
        max_len: Rows of the table.
        embed_dim: Channels ``D``.
        dropout: Probability that a channel of the sum is set to zero in training.

    Examples:
        >>> import torch
        >>> pos = LearnedPosEmbedding(max_len=512, embed_dim=64)
        >>> pos(torch.randn(2, 16, 64), offset=32).shape
        torch.Size([2, 16, 64])

    References:
        Gehring et al., *Convolutional Sequence to Sequence Learning*, 2017, section 3.1.
    """

    def __init__(self, max_len: int, embed_dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        who = type(self).__name__
        self.max_len = checks.integer(who, "max_len", max_len)
        self.embed_dim = checks.integer(who, "embed_dim", embed_dim)
        self.dropout = checks.probability(who, "dropout", dropout)
        self.pos_emb = nn.Embedding(self.max_len, self.embed_dim)

    def forward(
        self, x: Tensor, offset: int | Tensor = 0, *, position_ids: Tensor | None = None
    ) -> Tensor:
        """Add the vectors of positions ``offset .. offset + L - 1``.

        Args:
            x: Floating tensor of shape ``(L, D)`` or ``(N, L, D)``.
            offset: Position of the first token, or an integer tensor ``(N,)`` of them.
            position_ids: Integers of shape ``(L,)`` or ``(N, L)``, instead of ``offset``.

        Returns:
            A new tensor with the shape and dtype of ``x``.
        """
        who = type(self).__name__
        _, width = checks.check_embeddings(who, "x", x)
        hint = f"Build LearnedPosEmbedding({self.max_len}, {width})."
        checks.equal(who, "embed_dim", width, self.embed_dim, hint)
        limit = Limit(self.max_len, "max_len")
        # Use the device of x: an offloaded weight is on meta until pos_emb is called.
        at = positions_of(who, x, rows_of(who, x, offset, position_ids, limit), limit)
        total = kernels.add(x, self.pos_emb(replicate_like(self.pos_emb.weight, at)))
        return nn.functional.dropout(total, self.dropout, self.training) if self.dropout else total
