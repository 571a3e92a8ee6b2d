"""Sinusoidal position encoding as modules that add it to their input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posenc import kernels
from posenc._contract import checks
from posenc._contract.tracing import is_plain, may_keep
from posenc.nn._tables import Numbers, SharedTables, TableModule, shown_table
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import sinusoid


@dataclass(frozen=True, slots=True)
class SinusoidTable:
    """The encodings ``[T, D]`` of a spectrum."""

    spectrum: Spectrum

    def __call__(self, rows: int, device: torch.device, dtype: torch.dtype) -> Numbers:
        """The first ``rows`` rows."""
        return (sinusoid(torch.arange(rows, device=device), self.spectrum, dtype),)


def _encoded(
    tables: SharedTables[SinusoidTable], x: Tensor, start: int, ids: Tensor | None = None
) -> Tensor:
    """``x`` plus the encodings of its positions: from ``start`` on, or ``ids``."""
    spectrum, dtype = tables.description.spectrum, torch.promote_types(x.dtype, torch.float32)
    if ids is not None:
        # A table that grows may be short, and they far apart.
        read = tables.length is not None and is_plain(x, ids)
        kept = tables.read(x, dtype) if read else None
        return kernels.add(x, sinusoid(ids, spectrum, dtype) if kept is None else kept[0][ids])
    end = start + x.shape[-2]
    kept = tables.read(x, dtype, end)
    if kept is not None:
        return kernels.add(x, kept[0][start:end])
    at = torch.arange(start, end, device=x.device)
    return kernels.add(x, sinusoid(at, spectrum, dtype))


class SinusoidalPosEmbedding(TableModule):
    """Add the sinusoidal encoding to embeddings ``(L, D)`` or ``(N, L, D)``.

    The sum keeps the input's dtype and is within one ulp at the magnitude of the larger term.
    Nothing is learned and nothing is saved.

    Args:
        seq_len: Fixed ``L``; inferred from each input if None.
        embed_dim: Fixed ``D``; inferred from each input if None.
        base: The wavelengths run from ``2π`` to ``2π · base``.

    Examples:
        >>> pos = SinusoidalPosEmbedding()
        >>> pos(torch.zeros(1, 4))
        tensor([[0., 1., 0., 1.]])

    References:
        Vaswani et al., *Attention Is All You Need*, 2017, section 3.5.
    """

    encodings = shown_table(0, "The table ``(T, D)``, float32; None until it is needed.")

    def __init__(
        self,
        seq_len: int | None = None,
        embed_dim: int | None = None,
        *,
        base: float = 10_000.0,
    ) -> None:
        who = type(self).__name__
        super().__init__()
        self.seq_len = checks.optional(checks.integer, who, "seq_len", seq_len)
        self.embed_dim = checks.optional(checks.integer, who, "embed_dim", embed_dim)
        self.base = checks.base(who, base)
        self._tables: SharedTables[SinusoidTable] | None = None

    def forward(
        self, input_: Tensor, *, offset: int = 0, position_ids: Tensor | None = None
    ) -> Tensor:
        """Add the encoding of positions ``offset .. offset + L - 1``.

        Args:
            input_: Floating tensor of shape ``(L, D)`` or ``(N, L, D)``.
            offset: Position of the first token.
            position_ids: Integers of shape ``(L,)`` or ``(N, L)``, instead of ``offset``.

        Returns:
            A new tensor with the shape and dtype of ``input_``.
        """
        who = type(self).__name__
        length, width = checks.check_embeddings(who, "input_", input_)
        if self.seq_len is not None:
            checks.equal(who, "seq_len", length, self.seq_len, "Pass seq_len=None to take any.")
        if self.embed_dim is not None:
            way_out = "Pass embed_dim=None to take any."
            checks.equal(who, "embed_dim", width, self.embed_dim, way_out)
        start = checks.integer(who, "offset", offset, least=0)
        width = checks.integer(who, "the last dimension of input_", width)
        checks.check_range(who, start, length)
        ids = _ids(who, input_, offset, position_ids, None)
        tables = self._tables
        if tables is None or tables.description.spectrum.dim != width:
            table = SinusoidTable(Spectrum(width, self.base))
            tables = SharedTables(table, None, torch.float32, input_.device)
            if may_keep(input_):
                self._tables = tables
        return _encoded(tables, input_, start, ids)


class SinusoidalPE(TableModule):
    """Sinusoidal encoding with a table of ``max_seq_len`` positions, built at construction.

    Args:
        max_seq_len: Rows of the table.
        embed_dim: Channels ``D``.
        base: The wavelengths run from ``2π`` to ``2π · base``.

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

    def __init__(self, max_seq_len: int, embed_dim: int, *, base: float = 10_000.0) -> None:
        who = type(self).__name__
        max_seq_len = checks.integer(who, "max_seq_len", max_seq_len)
        super().__init__()
        self.max_seq_len = max_seq_len
        self.embed_dim = checks.integer(who, "embed_dim", embed_dim)
        self.base = checks.base(who, base)
        table = SinusoidTable(Spectrum(self.embed_dim, self.base))
        self._tables = SharedTables(table, max_seq_len, torch.float32)

    def get_encoding(self, seq_len: int) -> Tensor:
        """The first ``seq_len`` rows of the table, float32 of shape ``(seq_len, embed_dim)``."""
        who = type(self).__name__
        length = checks.integer(who, "seq_len", seq_len, least=0)
        if length > self.max_seq_len:
            rule = f"seq_len must be at most max_seq_len={self.max_seq_len}"
            raise ValueError(checks.message(who, rule, length, "Raise max_seq_len."))
        table: Tensor = self.encodings
        return table[:length].clone()

    def forward(
        self, input: Tensor, *, offset: int = 0, position_ids: Tensor | None = None
    ) -> Tensor:
        """Add the encoding of positions ``offset .. offset + L - 1``.

        Args:
            input: Floating tensor of shape ``(L, D)`` or ``(N, L, D)``.
            offset: Position of the first token.
            position_ids: Integers of shape ``(L,)`` or ``(N, L)``, instead of ``offset``.

        Returns:
            A new tensor with the shape and dtype of ``input``.
        """
        who = type(self).__name__
        length, width = checks.check_embeddings(who, "input", input)
        way_out = f"Build SinusoidalPE({self.max_seq_len}, {width})."
        checks.equal(who, "embed_dim", width, self.embed_dim, way_out)
        ids = _ids(who, input, offset, position_ids, self.max_seq_len)
        start = checks.integer(who, "offset", offset, least=0)
        if ids is None:
            checks.check_range(who, start, length, "max_seq_len", self.max_seq_len)
        return _encoded(self._tables, input, start, ids)


def _ids(
    who: str, x: Tensor, offset: int, position_ids: Tensor | None, limit: int | None
) -> Tensor | None:
    if position_ids is None:
        return None
    checks.exclusive_offset(who, offset)
    name = "" if limit is None else "max_seq_len"
    ids = checks.position_ids(who, position_ids, x.shape, x.device, name, limit)
    checks.check_ids(who, ids, name, limit)
    return ids
