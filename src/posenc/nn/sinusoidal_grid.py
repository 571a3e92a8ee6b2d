"""Sinusoidal encoding of the patches of images and videos as a module."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.functional.sinusoidal_grid import Channels, check_channels, of_grid
from posenc.nn._added import AddedTable
from posenc.nn._tables import SharedTables, Tensors, shown_table


def _grid_table(
    index: Tensor, dtype: torch.dtype, size: tuple[int, ...], prefix: int, channels: Channels
) -> Tensors:
    """The rows of tokens ``index``: zero for the prefix, then cells in row-major order."""
    cell = (index - prefix).clamp(min=0)
    coordinates = []
    for count in reversed(size):
        coordinates.append(cell % count)
        cell = cell // count
    rows = of_grid(coordinates[::-1], channels, dtype)
    return (rows.masked_fill((index < prefix)[..., None], 0.0),)


class SinusoidalGrid(AddedTable):
    r"""Add the sinusoidal encoding of a grid to patches ``(L, D)`` or ``(N, L, D)``.

    Patches are in row-major order, as ``flatten`` leaves them. Sums are as in
    :class:`SinusoidalPosEmbedding`.

    Args:
        size: Patches along each coordinate: height and width, or frames, height and width.
        embed_dim: Channels ``D``.
        base: As in :func:`posenc.functional.sinusoidal_grid_embedding`, and so are the next three.
        concatenated: Whether sines come before cosines, and the last coordinate first (MAE, DiT).
        widths: Channels of each coordinate.
        order: The coordinates in the order of their channels.
        prefix: Tokens before the patches that get no encoding, such as a class token.
        scale_input: As in :class:`SinusoidalPosEmbedding`, and so are the next three.
        scale: The factor of the encoding.
        learn_scale: Whether that factor is learned.
        dropout: Probability that a channel of the sum is set to zero in training.

    Examples:
        >>> pos = SinusoidalGrid((14, 14), embed_dim=768, concatenated=True, prefix=1)
        >>> pos(torch.randn(2, 197, 768)).shape
        torch.Size([2, 197, 768])

    References:
        He et al., *Masked Autoencoders*, 2022, appendix A.
    """

    encodings = shown_table(0, "The table ``(prefix + L, embed_dim)``, float32.")

    def __init__(
        self,
        size: Sequence[int],
        *,
        embed_dim: int,
        base: float = 10_000.0,
        concatenated: bool = False,
        widths: Sequence[int] | None = None,
        order: Sequence[int] | None = None,
        prefix: int = 0,
        scale_input: bool = False,
        scale: float = 1.0,
        learn_scale: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        if not isinstance(size, (list, tuple)) or not size:
            rule, got = "size must be a tuple of ints", checks.describe(size)
            checks.fail(who, rule, got, "Pass (14, 14), say.", TypeError)
        self.size = tuple(checks.integer(who, "size", count) for count in size)
        channels = check_channels(who, len(size), embed_dim, base, concatenated, widths, order)
        self.embed_dim, self.base = sum(channels.widths), channels.base
        self.concatenated = channels.concatenated
        self.widths = None if widths is None else channels.widths
        self.order = None if order is None else channels.order
        self.prefix = checks.integer(who, "prefix", prefix, least=0)
        parameters = (self.size, self.prefix, channels)
        length = self.prefix + math.prod(self.size)
        self._tables = SharedTables(_grid_table, parameters, length, torch.float32)
        self._set_sum(who, scale_input, scale, learn_scale, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add the encoding of each patch.

        Args:
            x: Floating tensor of shape ``(prefix + L, D)`` or ``(N, prefix + L, D)``.

        Returns:
            A new tensor with the shape and dtype of ``x``.
        """
        who = type(self).__name__
        length, width = checks.check_embeddings(who, "x", x)
        hint = "Build SinusoidalGrid with the size and the width of x."
        checks.equal(who, "embed_dim", width, self.embed_dim, hint)
        tokens = (
            f"{self.prefix} + " * bool(self.prefix) + " x ".join(map(str, self.size)) + " tokens"
        )
        checks.equal(who, tokens, length, self.prefix + math.prod(self.size), hint)
        dtype = torch.promote_types(x.dtype, torch.float32)
        kept = self._tables.read(x, dtype)
        if kept is None:
            kept = self._tables.at(torch.arange(length, device=x.device), dtype)
        return self._sum(x, kept[0])
