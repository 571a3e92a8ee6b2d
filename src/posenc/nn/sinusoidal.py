"""Sinusoidal position encoding as modules that add it to their input."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.position_checks import UNLIMITED, Limit
from posenc._contract.tracing import is_plain, may_keep
from posenc.functional._positions import positions_of, rows_of
from posenc.kernels import Rows
from posenc.nn._added import AddedTable
from posenc.nn._tables import SharedTables, Tensors, shown_table
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import sinusoid


def _sinusoid_table(positions: Tensor, dtype: torch.dtype, spectrum: Spectrum) -> Tensors:
    return (sinusoid(positions, spectrum, dtype),)


def _rows(
    who: str, tables: SharedTables, x: Tensor, rows: Rows, limit: Limit = UNLIMITED
) -> Tensor:
    """The encodings of the positions of ``x``."""
    dtype, start = torch.promote_types(x.dtype, torch.float32), rows.start
    if rows.positions is None:
        end = start + x.shape[-2]
        kept = tables.read(x, dtype, end)
        if kept is not None:
            return kept[0][start:end]
    at = positions_of(who, x, rows, limit)
    kept = tables.read(x, dtype) if tables.length is not None and is_plain(x, at) else None
    return tables.at(at, dtype)[0] if kept is None else kept[0][at]


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
        base: As in :class:`SinusoidalPosEmbedding`, and so are the arguments after it.
        scale_input: Whether the input is multiplied by the root of ``D``.
        scale: The factor of the encoding.
        learn_scale: Whether that factor is learned.
        dropout: Probability that a channel of the sum is set to zero in training.

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
