"""Encodings that are added to embeddings: sinusoids, also of grids, and learned vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posenc import ops
from posenc._contract import checks
from posenc._contract.position_checks import UNLIMITED, Limit
from posenc._contract.sharding import replicate_like
from posenc._contract.tracing import is_plain, may_keep
from posenc.functional._positions import offset_by_position, positions_of, rows_of
from posenc.functional.sinusoidal import Channels, check_channels, of_grid
from posenc.nn._module import ReadOnlyArguments, load_scalars, with_offset
from posenc.nn._tables import SharedTables, TableModule, Tensors, shown_table
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import sinusoid
from posenc.ops import TableRows


class AddedTable(TableModule):
    r"""A module that returns :math:`\text{dropout}(g x + \alpha P)` for rows :math:`P` of a table.

    :math:`g` is one, or the root of the width; :math:`\alpha` is a number, or learned.
    """

    scale_input: bool
    scale: float
    learn_scale: bool
    dropout: float
    alpha: nn.Parameter | None

    def _set_sum(
        self, who: str, scale_input: Any, scale: Any, learn_scale: Any, dropout: Any
    ) -> None:
        self.scale_input = checks.boolean(who, "scale_input", scale_input)
        self.scale = checks.positive_float(who, "scale", scale)
        self.learn_scale = checks.boolean(who, "learn_scale", learn_scale)
        self.dropout = checks.probability(who, "dropout", dropout)
        self.register_parameter("alpha", nn.Parameter(torch.empty(1)) if learn_scale else None)
        self.register_load_state_dict_pre_hook(load_scalars)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the learned factor, if there is one, to ``scale``."""
        if self.alpha is not None:
            nn.init.constant_(self.alpha, self.scale)

    def _sum(self, x: Tensor, rows: Tensor) -> Tensor:
        # math.sqrt: torch.jit.trace makes a tensor of a size, whose power would be a float32.
        gain = math.sqrt(x.shape[-1]) if self.scale_input else 1.0
        factor = self.scale if self.alpha is None else self.alpha
        total = ops.add(x, rows, gain, factor)
        return nn.functional.dropout(total, self.dropout, self.training) if self.dropout else total


def _sinusoid_table(positions: Tensor, dtype: torch.dtype, spectrum: Spectrum) -> Tensors:
    return (sinusoid(positions, spectrum, dtype),)


def _rows(
    who: str, tables: SharedTables, x: Tensor, rows: TableRows, limit: Limit = UNLIMITED
) -> Tensor:
    """The encodings of the positions of ``x``."""
    dtype, start = torch.promote_types(x.dtype, torch.float32), rows.start
    if rows.positions is None:
        end = start + x.shape[-2]
        shared = tables.read(x, dtype, end)
        if shared is not None:
            return shared[0][start:end]
    positions = positions_of(who, x, rows, limit)
    is_shared = tables.length is not None and is_plain(x, positions)
    shared = tables.read(x, dtype) if is_shared else None
    return tables.at(positions, dtype)[0] if shared is None else shared[0][positions]


class SinusoidalPosEmbedding(AddedTable):
    r"""Add the sinusoidal encoding to embeddings ``(L, D)`` or ``(N, L, D)``.

    .. math:: y = \text{dropout}(g\,x + \alpha\,\text{PE}), \qquad g \in \{1, \sqrt{D}\}

    The sum keeps the input's dtype and is within one ulp at the magnitude of the larger term.
    Nothing is learned and nothing is saved, unless :math:`\alpha` is learned.

    Args:
        seq_len: Fixed ``L``; inferred from each input if None.
        embed_dim: Fixed ``D``; inferred from each input if None.
        base: The wavelengths run from ``2π`` to ``2π · base``.
        scale_input: Whether the input is multiplied by :math:`\sqrt{D}` first (Vaswani et al.,
            fairseq, ESPnet).
        scale: :math:`\alpha`.
        learn_scale: Whether :math:`\alpha` is learned, from ``scale`` on: the parameter ``alpha``
            of shape ``(1,)``; a checkpoint may have it as ``()``.
        dropout: Probability that a channel of the sum is set to zero in training.

    Examples:
        >>> pos = SinusoidalPosEmbedding()
        >>> pos(torch.zeros(1, 4))
        tensor([[0., 1., 0., 1.]])
        >>> SinusoidalPosEmbedding(scale_input=True)(torch.ones(1, 4))
        tensor([[2., 3., 2., 3.]])

    References:
        Vaswani et al., *Attention Is All You Need*, 2017, sections 3.4, 3.5 and 5.4; Li et al.,
        *Neural Speech Synthesis with Transformer Network*, 2019, section 3.2, for ``learn_scale``.
    """

    encodings = shown_table(0, "The table ``(T, D)``, float32; None until it is needed.")

    def __init__(
        self,
        seq_len: int | None = None,
        embed_dim: int | None = None,
        *,
        base: float = 10_000.0,
        scale_input: bool = False,
        scale: float = 1.0,
        learn_scale: bool = False,
        dropout: float = 0.0,
    ) -> None:
        who = type(self).__name__
        super().__init__()
        self.seq_len = checks.optional(checks.integer, who, "seq_len", seq_len)
        self.embed_dim = checks.optional(checks.integer, who, "embed_dim", embed_dim)
        self.base = checks.base(who, base)
        self._tables: SharedTables | None = None
        self._set_sum(who, scale_input, scale, learn_scale, dropout)

    def forward(
        self, input_: Tensor, *, offset: int | Tensor = 0, position_ids: Tensor | None = None
    ) -> Tensor:
        """Add the encoding of positions ``offset .. offset + L - 1``.

        Args:
            input_: Floating tensor of shape ``(L, D)`` or ``(N, L, D)``.
            offset: Position of the first token, or an integer tensor ``(N,)`` of them.
            position_ids: Integers of shape ``(L,)`` or ``(N, L)``, instead of ``offset``.

        Returns:
            A new tensor with the shape and dtype of ``input_``.
        """
        who = type(self).__name__
        length, width = checks.check_embeddings(who, "input_", input_)
        if self.seq_len is not None:
            checks.equal(who, "seq_len", length, self.seq_len, "Pass seq_len=None to take any.")
        if self.embed_dim is not None:
            hint = "Pass embed_dim=None to take any."
            checks.equal(who, "embed_dim", width, self.embed_dim, hint)
        width = checks.integer(who, "the last dimension of input_", width)
        rows = rows_of(who, input_, offset, position_ids)
        tables = self._tables
        if tables is None or tables.parameters[0].dim != width:
            parameters, device = (Spectrum(width, self.base),), input_.device
            tables = SharedTables(_sinusoid_table, parameters, None, torch.float32, device)
            if may_keep(input_):
                self._tables = tables
        return self._sum(input_, _rows(who, tables, input_, rows))


class SinusoidalPE(AddedTable):
    """Sinusoidal encoding with a table of ``max_seq_len`` positions, built at construction.

    Args:
        max_seq_len: Rows of the table.
        embed_dim: Channels ``D``.
        base: As in :class:`SinusoidalPosEmbedding`, like the arguments after it.

    Examples:
        >>> pe = SinusoidalPE(max_seq_len=128, embed_dim=64)
        >>> pe.get_encoding(10).shape
        torch.Size([10, 64])
        >>> pe(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])

    References:
        Vaswani et al., *Attention Is All You Need*, 2017, section 3.5.
    """

    encodings = shown_table(0, "The table ``(max_seq_len, embed_dim)``, float32.")

    def __init__(
        self,
        max_seq_len: int,
        embed_dim: int,
        *,
        base: float = 10_000.0,
        scale_input: bool = False,
        scale: float = 1.0,
        learn_scale: bool = False,
        dropout: float = 0.0,
    ) -> None:
        who = type(self).__name__
        super().__init__()
        self.max_seq_len = checks.integer(who, "max_seq_len", max_seq_len)
        self.embed_dim = checks.integer(who, "embed_dim", embed_dim)
        self.base = checks.base(who, base)
        parameters, length = (Spectrum(self.embed_dim, self.base),), self.max_seq_len
        self._tables = SharedTables(_sinusoid_table, parameters, length, torch.float32)
        self._set_sum(who, scale_input, scale, learn_scale, dropout)

    def get_encoding(self, seq_len: int) -> Tensor:
        """The first ``seq_len`` rows of the table, unscaled, float32 ``(seq_len, embed_dim)``."""
        who = type(self).__name__
        length = checks.integer(who, "seq_len", seq_len, least=0)
        if length > self.max_seq_len:
            rule = f"seq_len must be at most max_seq_len={self.max_seq_len}"
            checks.fail(who, rule, length, "Raise max_seq_len.")
        table: Tensor = self.encodings
        return table[:length].clone()

    def forward(
        self, input: Tensor, *, offset: int | Tensor = 0, position_ids: Tensor | None = None
    ) -> Tensor:
        """Add the encoding of each position, as :meth:`SinusoidalPosEmbedding.forward` does."""
        who = type(self).__name__
        _, width = checks.check_embeddings(who, "input", input)
        hint = f"Build SinusoidalPE({self.max_seq_len}, {width})."
        checks.equal(who, "embed_dim", width, self.embed_dim, hint)
        limit = Limit(self.max_seq_len, "max_seq_len")
        rows = rows_of(who, input, offset, position_ids, limit)
        return self._sum(input, _rows(who, self._tables, input, rows, limit))


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
        scale_input: As in :class:`SinusoidalPosEmbedding`, like the arguments after it.

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
            checks.fail(who, rule, got, "Pass (14, 14), for example.", TypeError)
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
        return self._sum(x, _rows(who, self._tables, x, TableRows()))


class LearnedPosEmbedding(ReadOnlyArguments):
    """Add a trained vector for each position to embeddings ``(L, D)`` or ``(N, L, D)``.

    The table is ``self.pos_emb``, a :class:`torch.nn.Embedding`, which is learned and saved. The
    sum keeps the input's dtype.

    Args:
        max_len: Rows of the table.
        embed_dim: Channels ``D``.
        dropout: Probability that a channel of the sum is set to zero in training.
        dtype: The dtype of the table, torch's default if None.

    Examples:
        >>> import torch
        >>> pos = LearnedPosEmbedding(max_len=512, embed_dim=64)
        >>> pos(torch.randn(2, 16, 64), offset=32).shape
        torch.Size([2, 16, 64])

    References:
        Gehring et al., *Convolutional Sequence to Sequence Learning*, 2017, section 3.1.
    """

    def __init__(
        self,
        max_len: int,
        embed_dim: int,
        *,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.max_len = checks.integer(who, "max_len", max_len)
        self.embed_dim = checks.integer(who, "embed_dim", embed_dim)
        self.dropout = checks.probability(who, "dropout", dropout)
        self.dtype = checks.optional(checks.float_dtype, who, "dtype", dtype)
        self.pos_emb = nn.Embedding(self.max_len, self.embed_dim, dtype=dtype)

    @with_offset
    def forward(
        self,
        x: Tensor,
        *given: int | Tensor,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Add the vectors of positions ``offset .. offset + L - 1``.

        Args:
            x: Floating tensor of shape ``(L, D)`` or ``(N, L, D)``.
            offset: Position of the first token, or an integer tensor ``(N,)`` of them. It may come
                without its name, except a tensor that could be positions, because there are as many
                tokens.
            position_ids: Integers of shape ``(L,)`` or ``(N, L)``, instead of ``offset``.

        Returns:
            A new tensor with the shape and dtype of ``x``.
        """
        who = type(self).__name__
        if given:
            offset = offset_by_position(who, given, offset, x)
        _, width = checks.check_embeddings(who, "x", x)
        hint = f"Build LearnedPosEmbedding({self.max_len}, {width})."
        checks.equal(who, "embed_dim", width, self.embed_dim, hint)
        limit = Limit(self.max_len, "max_len")
        # Use the device of x: an offloaded weight is on meta until pos_emb is called.
        positions = positions_of(who, x, rows_of(who, x, offset, position_ids, limit), limit)
        total = ops.add(x, self.pos_emb(replicate_like(self.pos_emb.weight, positions)))
        return nn.functional.dropout(total, self.dropout, self.training) if self.dropout else total
