"""Sinusoidal position encoding as modules that add it to their input."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc import kernels
from posenc._contract import checks
from posenc._contract.tracing import is_plain
from posenc.nn._tables import TableModule
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import sinusoid


class _SinusoidTable(TableModule):
    """A table ``[T, D]`` in a buffer that no cast rounds and no checkpoint holds."""

    encodings: Tensor | None

    def __init__(self, *, registered: bool = True) -> None:
        super().__init__("encodings", registered=registered)

    def _tabulate(
        self, positions: Tensor, spectrum: Spectrum, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        return (sinusoid(positions, spectrum, dtype),)

    def _table_dtype(self, x: Tensor) -> torch.dtype:
        return torch.promote_types(x.dtype, torch.float32)

    def _add(self, x: Tensor, spectrum: Spectrum, start: int, ids: Tensor | None = None) -> Tensor:
        if ids is not None:
            kept = None
            if self.max_seq_len is not None and is_plain(x, ids):
                kept = self._kept(x, spectrum, None)
            # A table that grows may be short, and they far apart.
            rows = sinusoid(ids, spectrum, self._table_dtype(x)) if kept is None else kept[0][ids]
            return kernels.add(x, rows)
        end = start + x.shape[-2]
        kept = self._kept(x, spectrum, end)
        if kept is not None:
            return kernels.add(x, kept[0][start:end])
        at = torch.arange(start, end, device=x.device)
        return kernels.add(x, sinusoid(at, spectrum, self._table_dtype(x)))


class SinusoidalPosEmbedding(_SinusoidTable):
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

    def __init__(
        self,
        seq_len: int | None = None,
        embed_dim: int | None = None,
        *,
        base: float = 10_000.0,
    ) -> None:
        who = type(self).__name__
        super().__init__(registered=False)
        self.max_seq_len = None
        self.seq_len = None if seq_len is None else checks.integer(who, "seq_len", seq_len)
        self.embed_dim = None if embed_dim is None else checks.integer(who, "embed_dim", embed_dim)
        self.base = checks.positive_float(who, "base", base)

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
        length, width = checks.embeddings(who, "input_", input_)
        if self.seq_len is not None:
            checks.equal(who, "seq_len", length, self.seq_len, "Pass seq_len=None to take any.")
        if self.embed_dim is not None:
            way_out = "Pass embed_dim=None to take any."
            checks.equal(who, "embed_dim", width, self.embed_dim, way_out)
        start = checks.integer(who, "offset", offset, least=0)
        width = checks.integer(who, "the last dimension of input_", width)
        checks.sequence(who, start, length)
        ids = _ids(who, input_, offset, position_ids, None)
        return self._add(input_, Spectrum(width, self.base), start, ids)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"seq_len={self.seq_len}, embed_dim={self.embed_dim}, base={self.base:g}"


class SinusoidalPE(_SinusoidTable):
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

    max_seq_len: int

    def __init__(self, max_seq_len: int, embed_dim: int, *, base: float = 10_000.0) -> None:
        who = type(self).__name__
        max_seq_len = checks.integer(who, "max_seq_len", max_seq_len)
        super().__init__()
        self.max_seq_len = max_seq_len
        self.embed_dim = checks.integer(who, "embed_dim", embed_dim)
        self.base = checks.positive_float(who, "base", base)
        spectrum = Spectrum(self.embed_dim, self.base)
        self._build(spectrum, max_seq_len, torch.get_default_device(), torch.float32)

    def get_encoding(self, seq_len: int) -> Tensor:
        """The first ``seq_len`` rows of the table, float32 of shape ``(seq_len, embed_dim)``."""
        who = type(self).__name__
        length = checks.integer(who, "seq_len", seq_len, least=0)
        if length > self.max_seq_len:
            rule = f"seq_len must be at most max_seq_len={self.max_seq_len}"
            raise ValueError(checks.message(who, rule, length, "Raise max_seq_len."))
        assert self.encodings is not None
        nothing = self.encodings.new_zeros((length, self.embed_dim), dtype=torch.float32)
        return self._add(nothing, Spectrum(self.embed_dim, self.base), 0)

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
        length, width = checks.embeddings(who, "input", input)
        way_out = f"Build SinusoidalPE({self.max_seq_len}, {width})."
        checks.equal(who, "embed_dim", width, self.embed_dim, way_out)
        ids = _ids(who, input, offset, position_ids, self.max_seq_len)
        start = checks.integer(who, "offset", offset, least=0)
        if ids is None:
            checks.sequence(who, start, length, "max_seq_len", self.max_seq_len)
        return self._add(input, Spectrum(self.embed_dim, self.base), start, ids)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"max_seq_len={self.max_seq_len}, embed_dim={self.embed_dim}, base={self.base:g}"


def _ids(
    who: str, x: Tensor, offset: int, position_ids: Tensor | None, limit: int | None
) -> Tensor | None:
    if position_ids is None:
        return None
    checks.exclusive_offset(who, offset)
    name = "" if limit is None else "max_seq_len"
    ids = checks.position_ids(who, position_ids, x.shape, x.device, name, limit)
    checks.extent(who, ids, name, limit)
    return ids
