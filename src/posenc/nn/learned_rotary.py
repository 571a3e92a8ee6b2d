"""Rotations whose frequencies are learned: RoPE-Mixed and STRING."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posenc._contract import checks, position_checks
from posenc._contract.position_checks import UNLIMITED
from posenc._contract.sharding import replicate_like
from posenc._contract.tracing import without_autocast
from posenc.functional._positions import offset_by_position, positions_of, rows_of
from posenc.functional.rotary import check_heads, check_seq_dim, rotate_rows, swap_heads
from posenc.nn._module import KeepsFloat32, ReadOnlyArguments, with_offset
from posenc.nn._rotary import tables_of
from posenc.numerics.frequencies import inverse_frequencies
from posenc.numerics.tables import float64_device, of_angles, widest
from posenc.ops import Spec, TableRows


class MixedRoPE(KeepsFloat32, ReadOnlyArguments):
    r"""Rotate queries and keys by learned mixtures of their coordinates.

    .. math:: \phi_{h,i} = \sum_a p_a f_{a,h,i}

    Every head ``h`` has a frequency for each coordinate ``a`` and pair ``i``. They start as those
    of an axial encoding, rotated by a random angle in each head; with one coordinate, as those of
    :class:`posenc.RoPE`. Angles are computed in float64, and gradients reach the frequencies.

    Args:
        head_dim: Channels ``D`` of a head, a multiple of twice ``coordinates``.
        num_kv_heads: Key heads; the number of query heads must be a multiple of it. 1 for
            frequencies that all heads of queries and keys share.
        coordinates: Coordinates of a position: 2 for rows and columns of an image, 1 for text.
        base: The base of the frequencies at the start. If None, 10,000 for one coordinate, as in
            :class:`posenc.RoPE`, and 10 for several, because the sides of images are short.
        inv_freq: The frequencies of each coordinate at the start, instead of those of ``base``: a
            sequence or tensor of ``head_dim / 2 / coordinates`` numbers.
        interleaved: As in :class:`posenc.RoPE`.
        seq_dim: As in :class:`posenc.RoPE`.

    Attributes:
        freqs: Parameter of shape ``(coordinates, num_kv_heads, head_dim / 2)``. It stays float32
            when the model is cast to half precision. FSDP2 shards such a model with this module as
            a unit of its own, which has no MixedPrecisionPolicy.

    Examples:
        >>> from posenc.positions import grid
        >>> rope = MixedRoPE(head_dim=64, num_kv_heads=4)
        >>> q = k = torch.randn(2, 4, 6, 64)
        >>> q, k = rope(q, k, position_ids=grid(2, 3))
        >>> learned = MixedRoPE(head_dim=64, num_kv_heads=1, coordinates=1)
        >>> q, k = learned(q, k, offset=100)  # RoPE(64), until its frequencies are trained

    References:
        Heo et al., *Rotary Position Embedding for Vision Transformer*, 2024, section 3.2.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        num_kv_heads: int,
        coordinates: int = 2,
        base: float | None = None,
        inv_freq: Sequence[float] | Tensor | None = None,
        interleaved: bool = True,
        seq_dim: int = -2,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.head_dim = checks.even(who, "head_dim", head_dim)
        self.num_kv_heads = checks.integer(who, "num_kv_heads", num_kv_heads)
        self.coordinates = checks.integer(who, "coordinates", coordinates)
        self.base = None if base is None else checks.base(who, base)
        self.interleaved = checks.boolean(who, "interleaved", interleaved)
        self.seq_dim = check_seq_dim(who, seq_dim)
        if self.head_dim % (2 * self.coordinates):
            rule = f"head_dim must be a multiple of {2 * self.coordinates}"
            checks.fail(who, rule, head_dim, "Pass another head_dim, or fewer coordinates.")
        if inv_freq is not None:
            count = self.head_dim // 2 // self.coordinates
            hint = "Pass one for each pair of one coordinate."
            inv_freq = checks.frequencies(who, "inv_freq", inv_freq, count, hint)
        self.inv_freq = inv_freq
        size = self.coordinates, self.num_kv_heads, head_dim // 2
        self.freqs = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the frequencies to axial ones, rotated at random in each head."""
        if self.freqs.is_meta:
            return
        base = self.base or (10_000.0 if self.coordinates == 1 else 10.0)
        rates = inverse_frequencies(self.head_dim // self.coordinates, base)
        if self.inv_freq is not None:
            rates = torch.tensor(self.inv_freq, dtype=torch.float64)
        directions = torch.ones(self.num_kv_heads, 1, 1, dtype=torch.float64, device="cpu")
        if self.coordinates > 1:
            shape = self.num_kv_heads, self.coordinates, self.coordinates
            noise = torch.randn(shape, dtype=torch.float32, device="cpu")
            # An orthogonal matrix for each head: column g is the direction of group g.
            directions = torch.linalg.qr(noise.double()).Q
        with torch.no_grad():
            freqs = (directions[..., None] * rates.cpu()).flatten(2).transpose(0, 1)
            self.freqs.copy_(replicate_like(self.freqs, freqs))

    @with_offset
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        *given: int | Tensor,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys.

        Args:
            q: Queries ``(B, H, L, D)``.
            k: Keys ``(B, num_kv_heads, L, D)``; any number of heads if ``num_kv_heads`` is 1.
            offset: As in :meth:`posenc.RoPE.forward`, if ``coordinates`` is 1.
            position_ids: Integer or floating positions ``(coordinates, L)`` or
                ``(coordinates, B, L)``; ``(L,)`` if all coordinates are the same. With one
                coordinate also ``(B, L)``, as in :meth:`posenc.RoPE.forward`.

        Returns:
            New tensors with the shapes and dtypes of ``q`` and ``k``.
        """
        who = type(self).__name__
        if given:
            offset = offset_by_position(who, given, offset, q, self.seq_dim)
        q, k = self._check_heads(who, q, k)
        a, b = self._rotate(who, q, k, self._coordinates(who, q, position_ids, offset))
        a, b = swap_heads([a, b], self.seq_dim)
        return a, b

    def _rotate(self, who: str, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        wide = widest(q.device)
        # [A, (B,) 1, L, 1] times [A, (1,) H, 1, P], added up over the coordinates.
        freqs = self.freqs.to(positions.device, wide)[:, :, None]
        freqs = freqs if positions.dim() == 2 else freqs[:, None]
        phi = (replicate_like(freqs, positions.to(wide))[..., None, :, None] * freqs).sum(0)
        if self.num_kv_heads == 1:
            # One table for all heads, and one pass for queries and keys.
            tables, spec = tables_of(phi.squeeze(-3), q.device, 1.0), self._spec()
            q, k = rotate_rows(who, UNLIMITED, [q, k], *tables, TableRows(), spec)
            return q, k
        cos, sin = of_angles(phi, q.device)
        return self._rotated(who, q, cos, sin), self._rotated(who, k, cos, sin)

    def _check_heads(self, who: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys as ``(B, H, L, D)``."""
        check_heads(who, "qk", [q, k], self.head_dim, self.seq_dim)
        q, k = swap_heads([q, k], self.seq_dim)
        if self.num_kv_heads > 1:
            hint = f"Build {who} with that num_kv_heads."
            checks.equal(who, "heads of k", k.shape[1], self.num_kv_heads, hint)
        if q.shape[1] % self.num_kv_heads:
            rule = f"heads of q must be a multiple of {self.num_kv_heads}"
            checks.fail(who, rule, q.shape[1], "Give each key head equally many query heads.")
        return q, k

    def _coordinates(self, who: str, x: Tensor, ids: Tensor | None, offset: Any) -> Tensor:
        if ids is not None:
            position_checks.exclusive_offset(who, offset)
            if self.coordinates == 1 and isinstance(ids, Tensor) and ids.dim() == 2:
                # Whether a single row is for the coordinate or for the batch makes no difference.
                ids = ids[None]
        elif self.coordinates > 1:
            rule = f"position_ids must be given, because there are {self.coordinates} coordinates"
            checks.fail(who, rule, None, "Pass position_ids=positions.grid(H, W), for example.")
        else:
            ids = positions_of(who, x, rows_of(who, x, offset, None))[None]
        return position_checks.coordinates(who, "position_ids", ids, x, self.coordinates)

    def _spec(self) -> Spec:
        return Spec(self.interleaved, self.interleaved)

    def _rotated(self, who: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        group = x.shape[1] // self.num_kv_heads
        if group != 1:
            cos, sin = (table.repeat_interleave(group, dim=-3) for table in (cos, sin))
        spec = self._spec()
        if cos.dim() == 3:
            # The kernel takes a table for each index of the first axis: put the heads there.
            heads = x.transpose(0, 1)
            return rotate_rows(who, UNLIMITED, [heads], cos, sin, TableRows(), spec)[0].transpose(
                0, 1
            )
        heads = x.flatten(0, 1).unsqueeze(1)
        cos, sin = (table.expand(x.shape[0], -1, -1, -1).flatten(0, 1) for table in (cos, sin))
        return rotate_rows(who, UNLIMITED, [heads], cos, sin, TableRows(), spec)[0].view(x.shape)


class STRING(MixedRoPE):
    r"""Rotate queries and keys in planes that are learned too: Cayley-STRING.

    .. math:: R(p) = \exp\Big(\sum_a p_a L_a\Big) = P\, \text{RoPE}(p)\, P^T, \qquad
              P = (I - S)(I + S)^{-1}

    The generators :math:`L_a` are skew-symmetric and commute, so one orthogonal matrix :math:`P` of
    each head brings all of them to 2 × 2 blocks. Scores depend on :math:`P^T q` and :math:`P^T k`:
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
        seq_dim: The dimension of the tokens.

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
        seq_dim: int = -2,
    ) -> None:
        super().__init__(
            head_dim,
            num_kv_heads=num_kv_heads,
            coordinates=coordinates,
            base=base,
            interleaved=interleaved,
            seq_dim=seq_dim,
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
        skew, identity = upper - upper.mT, torch.eye(width, dtype=above.dtype, device=where)
        basis: Tensor = torch.linalg.solve(identity + skew, identity - skew)
        return basis

    def _rotate(self, who: str, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        basis = self.basis()
        a, b = super()._rotate(who, self._changed(q, basis), self._changed(k, basis), positions)
        return a.to(q.dtype), b.to(k.dtype)

    def _changed(self, x: Tensor, basis: Tensor) -> Tensor:
        """``x`` in the basis of its head, in at least float32."""
        wide = torch.promote_types(x.dtype, torch.float32)
        heads = x.unflatten(1, (self.num_kv_heads, -1)).to(wide)
        with without_autocast(x):
            changed: Tensor = (heads @ basis[:, None].to(x.device, wide)).flatten(1, 2)
        return changed
