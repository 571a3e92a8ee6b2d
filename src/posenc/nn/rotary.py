"""Rotary position embedding (RoPE) of one tensor, with shared tables of cosines and sines."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.position_checks import UNLIMITED, Limit
from posenc._contract.tracing import may_keep
from posenc.functional._positions import rows_of
from posenc.functional.rotary import check_rotary_input, with_heads, without_heads
from posenc.kernels import Spec
from posenc.nn._rotary import rotary_tables, rotate_by_tables
from posenc.nn._tables import SharedTables, TableModule, shown_table
from posenc.numerics.frequencies import Spectrum


class RotaryPosEmbedding(TableModule):
    """Rotate ``(..., L, D)`` by position, keeping cosines and sines between calls.

    The tables are rebuilt when the device or the width changes. Without ``max_seq_len`` they grow
    with the longest sequence, up to 131 072 rows; longer sequences compute theirs at each call.
    Pass both sizes under ``torch.compile``, whose graph otherwise computes the tables.

    Args:
        embed_dim: Fixed, even ``D``; inferred from each input if None.
        max_seq_len: Positions are ``0 .. max_seq_len - 1``; unbounded if None.
        interleaved: As in :class:`posenc.RoPE`.
        base: As in :class:`posenc.RoPE`.

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
        length = self.max_seq_len
        self._limit = UNLIMITED if length is None else Limit(length, "max_seq_len")
        self._tables = None if embed_dim is None else self._of_width(embed_dim, None)

    def _of_width(self, width: int, device: torch.device | None) -> SharedTables:
        parameters = (Spectrum(width, self.base),)
        return SharedTables(rotary_tables, parameters, self.max_seq_len, torch.float64, device)

    def forward(
        self, input_: Tensor, position_ids: Tensor | None = None, *, offset: int | Tensor = 0
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
        width = check_rotary_input(who, "input_", input_)
        if self.embed_dim is not None:
            hint = "Pass embed_dim=None to take any width."
            checks.equal(who, "embed_dim", width, self.embed_dim, hint)
        limit = self._limit
        rows = rows_of(who, input_, offset, position_ids, limit)
        tables = self._tables
        if tables is None or tables.parameters[0].dim != width:
            tables = self._of_width(width, input_.device)
        spec = Spec(self.interleaved, self.interleaved)
        (rotated,) = rotate_by_tables(who, limit, tables, [with_heads(input_)], rows, spec)
        if tables is not self._tables and may_keep(input_):
            # Only now: a call that raises leaves the tables as they were.
            self._tables = tables
        return without_heads(rotated, input_)
