"""Rotary position embedding (RoPE) of one tensor, with shared tables of cosines and sines."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.tracing import may_keep
from posenc.functional.rotary import check_rotary_input, rows_of, turn_one
from posenc.kernels import Rows, Spec
from posenc.nn._tables import Numbers, SharedTables, TableModule, shown_table
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import cos_sin


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines ``[T, P]`` of a spectrum."""

    spectrum: Spectrum

    def __call__(self, rows: int, device: torch.device, dtype: torch.dtype) -> Numbers:
        """The first ``rows`` rows; float64 stands for the widest dtype of the device."""
        cos, sin = self.at(torch.arange(rows, device=device))
        return (cos, sin) if dtype == torch.float64 else (cos.to(dtype), sin.to(dtype))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of these positions, in the widest dtype of their device."""
        axes = self.spectrum.axes
        if axes is not None:
            # A row stands for a token whose coordinates are all the same.
            positions = positions.expand(axes.count(), *positions.shape)
        return cos_sin(positions, self.spectrum)


def rows_needed(who: str, rows: Rows, length: int, limit: int | None) -> int | None:
    """One past the last row that ``length`` tokens take, checked; None if it cannot be known.

    Rows in a tensor are held to a table of fixed length by the kernel.
    """
    if rows.positions is None:
        checks.check_range(who, rows.start, length, "max_seq_len", limit)
        return rows.start + length
    if limit is not None:
        return None
    need = checks.check_ids(who, rows.positions)
    if need and rows.is_sequential():
        checks.check_range(who, need - 1, length)
        need += length - 1
    return need


def rotary_rows(
    tables: SharedTables[RotaryTable], xs: list[Tensor], rows: Rows, need: int | None
) -> tuple[Tensor, Tensor, Rows]:
    """Cosines, sines, and the rows that ``xs`` take of them.

    Args:
        tables: Where to find them.
        xs: What is rotated.
        rows: The rows in tables that start at position zero.
        need: How many rows that is, if known.
    """
    x = xs[0] if xs[0].element_size() >= xs[-1].element_size() else xs[-1]
    # The kernel rounds float64 tables as it reads them. For half precision a GPU is given float32
    # ones, which are the same numbers there in half the bytes.
    narrow = x.is_cuda and x.element_size() == 2
    kept = tables.read(x, torch.float32 if narrow else torch.float64, need)
    if kept is None:
        at = rows.as_index(x.shape[-2], x.device)
        cos, sin = tables.description.at(at[0] if at.shape[0] == 1 else at)
        return cos, sin, Rows()
    cos, sin = kept
    if tables.length is None and torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        # Activation checkpointing compares the shapes of what it saves with those of a second
        # call, and the table may have grown by then.
        cos, sin = cos[:need], sin[:need]
    return cos, sin, rows


class RotaryPosEmbedding(TableModule):
    """Rotate ``(..., L, D)`` by position, keeping cosines and sines between calls.

    The tables are reused while they cover the positions asked for, and rebuilt when the length
    grows, or the device or the embedding dimension changes. Growth doubles, so decoding token by
    token rebuilds only now and then. With ``max_seq_len`` they are built at that capacity and
    every call is held to it. Give both sizes under ``torch.compile``, where a table that is not
    there yet, or may grow, is worked out in the graph instead. Without ``max_seq_len``, positions
    past 131 072 are worked out at each call and not kept.

    Args:
        embed_dim: Fixed, even ``D``; inferred from each input if None.
        max_seq_len: Positions are ``0 .. max_seq_len - 1``; unbounded if None.
        interleaved: Pairs are ``(0, 1), (2, 3), ...`` if true, ``(0, D/2), (1, D/2 + 1), ...``
            if false.
        base: Raising it slows every pair but the first.

    Examples:
        >>> rope = RotaryPosEmbedding(embed_dim=64, max_seq_len=2048)
        >>> x = torch.randn(2, 16, 64)
        >>> rope(x).shape
        torch.Size([2, 16, 64])
        >>> torch.equal(rope(x), rope(x, position_ids=torch.arange(16)))
        True

    References:
        Su et al., *RoFormer*, 2021.
    """

    cos_cached = shown_table(0, "Cosines ``(T, D / 2)``, float64; None until they are needed.")
    sin_cached = shown_table(1, "Sines, as ``cos_cached``.")

    def __init__(
        self,
        embed_dim: int | None = None,
        max_seq_len: int | None = None,
        interleaved: bool = True,
        *,
        base: float = 10_000.0,
    ) -> None:
        who = type(self).__name__
        super().__init__()
        self.embed_dim = checks.optional(checks.even, who, "embed_dim", embed_dim)
        self.max_seq_len = checks.optional(checks.integer, who, "max_seq_len", max_seq_len)
        self.interleaved = checks.boolean(who, "interleaved", interleaved)
        self.base = checks.base(who, base)
        self._tables = None if embed_dim is None else self._of_width(embed_dim, None)

    def _of_width(self, width: int, device: torch.device | None) -> SharedTables[RotaryTable]:
        table = RotaryTable(Spectrum(width, self.base))
        return SharedTables(table, self.max_seq_len, torch.float64, device)

    def forward(
        self,
        input_: Tensor,
        position_ids: Tensor | None = None,
        *,
        offset: int | Tensor = 0,
    ) -> Tensor:
        """Rotate ``input_``.

        Args:
            input_: Floating tensor of shape ``(..., L, D)``.
            position_ids: Integers of shape ``(L,)``, or ``(B, L)`` with ``B`` the first axis of
                ``input_``; ``offset .. offset + L - 1`` if None.
            offset: Position of the first token, or an integer tensor ``(B,)`` of them.

        Returns:
            A new tensor with the shape and dtype of ``input_``.
        """
        who = type(self).__name__
        width, length = check_rotary_input(who, "input_", input_), input_.shape[-2]
        if self.embed_dim is not None:
            way_out = "Pass embed_dim=None to take any width."
            checks.equal(who, "embed_dim", width, self.embed_dim, way_out)
        rows = rows_of(who, input_, offset, position_ids, "max_seq_len", self.max_seq_len)
        need = rows_needed(who, rows, length, self.max_seq_len)
        tables = self._tables
        if tables is None or tables.description.spectrum.dim != width:
            if rows.positions is not None:
                # A call that is refused leaves the tables that were there.
                checks.check_ids(who, rows.positions, "max_seq_len", self.max_seq_len)
            tables = self._of_width(width, input_.device)
            if may_keep(input_):
                self._tables = tables
        cos, sin, rows = rotary_rows(tables, [input_], rows, need)
        spec = Spec(self.interleaved, self.interleaved)
        return turn_one(who, "max_seq_len", input_, cos, sin, rows, spec)
