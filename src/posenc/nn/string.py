"""Rotation by learned, commuting generators: STRING."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posenc._contract.tracing import without_autocast
from posenc.nn.mixed import MixedRoPE
from posenc.numerics.tables import float64_device, widest


class STRING(MixedRoPE):
    r"""Rotate queries and keys in planes that are learned too: Cayley-STRING.

    .. math:: R(p) = \exp\Big(\sum_a p_a L_a\Big) = P\, \text{RoPE}(p)\, P^T, \qquad
              P = (I - S)(I + S)^{-1}

    The generators :math:`L_a` are skew-symmetric and commute, so one orthogonal matrix :math:`P` of
    each head brings all of them to 2 × 2 blocks. Scores see :math:`P^T q` and :math:`P^T k` alone:
    this is one matrix product before :class:`MixedRoPE`. :math:`S` is skew-symmetric and starts at
    zero, where :math:`P` is the identity.

    :math:`P` is computed in float64; the product is made in float32, or in float64 if the input
    is, and the result is rounded once, after the rotation. Parameters stay float32 when the model
    is cast, as those of :class:`MixedRoPE`.

    Args:
        head_dim: As in :class:`MixedRoPE`, like all others.
        num_kv_heads: Key heads.
        coordinates: Coordinates of a position.
        base: The base of the frequencies at the start, which depends on ``coordinates`` if None.
        interleaved: Which channels form pairs.

    Attributes:
        freqs: Parameter of shape ``(coordinates, num_kv_heads, head_dim / 2)``.
        skew: Parameter of shape ``(num_kv_heads, head_dim (head_dim - 1) / 2)``: :math:`S` above
            its diagonal, row by row.

    Examples:
        >>> from posenc.positions import grid
        >>> string = STRING(head_dim=64, num_kv_heads=4)
        >>> q = k = torch.randn(2, 4, 6, 64)
        >>> q, k = string(q, k, position_ids=grid(2, 3))

    References:
        Schenck et al., *Learning the RoPEs: Better 2D and 3D Position Encodings with STRING*, 2025.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        num_kv_heads: int,
        coordinates: int = 2,
        base: float | None = None,
        interleaved: bool = True,
    ) -> None:
        super().__init__(
            head_dim,
            num_kv_heads=num_kv_heads,
            coordinates=coordinates,
            base=base,
            interleaved=interleaved,
        )
        size = self.num_kv_heads, head_dim * (head_dim - 1) // 2
        self.skew = nn.Parameter(torch.zeros(size, dtype=self.freqs.dtype))

    def reset_parameters(self) -> None:
        """Set the frequencies as :class:`MixedRoPE` does, and the planes to the channels' own."""
        super().reset_parameters()
        if hasattr(self, "skew"):
            nn.init.zeros_(self.skew)

    def basis(self) -> Tensor:
        """:math:`P` of each head, ``(num_kv_heads, D, D)``, in the widest dtype of the device."""
        where, width = float64_device(self.skew.device), self.head_dim
        above = self.skew.to(where, widest(where))
        rows, columns = torch.triu_indices(width, width, 1, device=where)
        flat = above.new_zeros((self.num_kv_heads, width * width))
        upper = flat.index_copy(1, rows * width + columns, above).unflatten(1, (width, width))
        skew, one = upper - upper.mT, torch.eye(width, dtype=above.dtype, device=where)
        basis: Tensor = torch.linalg.solve(one + skew, one - skew)
        return basis

    def forward(
        self, q: Tensor, k: Tensor, offset: int | Tensor = 0, *, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys; arguments as :meth:`MixedRoPE.forward`."""
        self._check_heads(type(self).__name__, q, k)
        basis = self.basis()
        a, b = super().forward(
            self._changed(q, basis), self._changed(k, basis), offset, position_ids=position_ids
        )
        return a.to(q.dtype), b.to(k.dtype)

    def _changed(self, x: Tensor, basis: Tensor) -> Tensor:
        """``x`` in the basis of its head, in at least float32."""
        wide = torch.promote_types(x.dtype, torch.float32)
        heads = x.unflatten(1, (self.num_kv_heads, -1)).to(wide)
        with without_autocast(x):
            changed: Tensor = (heads @ basis[:, None].to(x.device, wide)).flatten(1, 2)
        return changed
