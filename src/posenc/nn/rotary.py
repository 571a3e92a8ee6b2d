"""Rotary position embedding (RoPE) as modules that keep their cosines and sines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.functional.rotary import (
    check_queries_and_keys,
    check_rotary_input,
    rows_of,
    turn_all,
    turn_one,
)
from posenc.kernels import Rows, Turn
from posenc.nn._tables import TableModule
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import cos_sin, widest


class _RotaryTables(TableModule):
    """Cosines and sines ``[T, P]``, in float64 buffers that no cast rounds and no checkpoint holds.

    The kernel rounds them as it reads them: one table serves every dtype.
    """

    cos_cached: Tensor | None
    sin_cached: Tensor | None

    def __init__(self) -> None:
        super().__init__("cos_cached", "sin_cached")

    def _tabulate(
        self, positions: Tensor, spectrum: Spectrum, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        return cos_sin(positions, spectrum)

    def _table_dtype(self, x: Tensor) -> torch.dtype:
        return widest(x.device)

    def _cos_sin(
        self, who: str, x: Tensor, spectrum: Spectrum, rows: Rows, need: int | None
    ) -> tuple[Tensor, Tensor, Rows]:
        """Tables, and the rows in them: of the kept ones, or worked out for this call."""
        limit = self.max_seq_len
        if (
            limit is not None
            and rows.positions is not None
            and self._covering(x, spectrum, limit) is None
        ):
            # A table that has to be rebuilt must not be when the call is refused afterwards.
            at = rows.numbers(x.shape[-2], x.device)
            checks.extent(who, at, "max_seq_len", limit)
        kept = self._kept(x, spectrum, need)
        if kept is not None:
            return kept[0], kept[1], rows
        at = rows.numbers(x.shape[-2], x.device)
        return *cos_sin(at[0] if at.shape[0] == 1 else at, spectrum), Rows()


class RotaryPosEmbedding(_RotaryTables):
    """Rotate ``(..., L, D)`` by position, keeping cosines and sines between calls.

    The tables are reused while they cover the positions asked for, and rebuilt when the length
    grows, or the device or the embedding dimension changes. Growth doubles, so decoding token by
    token rebuilds only now and then. With ``max_seq_len`` they are built at that capacity and
    every call is held to it. Give both sizes under ``torch.compile``, where a table that is not
    there yet, or may grow, is worked out in the graph instead; and under DistributedDataParallel,
    where each rank must hold tables of one size. Without ``max_seq_len``, positions past 131 072
    are worked out at each call and not kept.

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

    def __init__(
        self,
        embed_dim: int | None = None,
        max_seq_len: int | None = None,
        interleaved: bool = True,
        *,
        base: float = 10_000.0,
    ) -> None:
        who = type(self).__name__
        if embed_dim is not None:
            embed_dim = checks.even(who, "embed_dim", embed_dim)
        if max_seq_len is not None:
            max_seq_len = checks.integer(who, "max_seq_len", max_seq_len)
        super().__init__()
        self.embed_dim = embed_dim
        self.max_seq_len = max_seq_len
        self.interleaved = checks.boolean(who, "interleaved", interleaved)
        self.base = checks.positive_float(who, "base", base)
        if embed_dim is not None and max_seq_len is not None:
            device = torch.get_default_device()
            self._build(Spectrum(embed_dim, self.base), max_seq_len, device, widest(device))

    def forward(self, input_: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Rotate ``input_``.

        Args:
            input_: Floating tensor of shape ``(..., L, D)``.
            position_ids: Integers of shape ``(L,)``, or ``(B, L)`` with ``B`` the first axis of
                ``input_``; ``0 .. L-1`` if None.

        Returns:
            A new tensor with the shape and dtype of ``input_``.
        """
        who = type(self).__name__
        check_rotary_input(who, "input_", input_)
        length, width = input_.shape[-2:]
        if self.embed_dim is not None:
            way_out = "Pass embed_dim=None to take any width."
            checks.equal(who, "embed_dim", width, self.embed_dim, way_out)
        rows = rows_of(who, input_, 0, position_ids, "max_seq_len", self.max_seq_len)
        need: int | None = length
        if rows.positions is None:
            if self.max_seq_len is not None:
                limit = self.max_seq_len
                checks.covered(who, length - 1, "max_seq_len", limit, "a shorter input_")
        elif self.max_seq_len is None:
            need = checks.extent(who, rows.positions)
        spectrum = Spectrum(width, self.base)
        cos, sin, rows = self._cos_sin(who, input_, spectrum, rows, need)
        turn = Turn(self.interleaved, self.interleaved)
        return turn_one(who, "max_seq_len", input_, cos, sin, rows, turn)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return (
            f"embed_dim={self.embed_dim}, max_seq_len={self.max_seq_len}, "
            f"interleaved={self.interleaved}, base={self.base:g}"
        )


class RoPE(_RotaryTables):
    """Rotate queries and keys of ``(B, H, L, D)``, with tables precomputed at construction.

    Args:
        head_dim: Channels ``D`` of a head, even.
        max_seq_len: Positions are ``0 .. max_seq_len - 1``.
        base: Raising it slows every pair but the first.
        interleaved: Pairs are ``(0, 1), (2, 3), ...`` if true, ``(0, D/2), (1, D/2 + 1), ...``
            if false, as most checkpoints on the Hugging Face hub have them.

    Examples:
        >>> rope = RoPE(head_dim=64)
        >>> q, k = torch.randn(2, 8, 16, 64), torch.randn(2, 2, 16, 64)
        >>> q_turned, k_turned = rope.apply(q, k, offset=100)
        >>> q_turned.shape, k_turned.shape
        (torch.Size([2, 8, 16, 64]), torch.Size([2, 2, 16, 64]))

    References:
        Su et al., *RoFormer*, 2021.
    """

    max_seq_len: int

    def __init__(
        self,
        head_dim: int,
        max_seq_len: int = 2048,
        base: float = 10_000.0,
        *,
        interleaved: bool = True,
    ) -> None:
        who = type(self).__name__
        max_seq_len = checks.integer(who, "max_seq_len", max_seq_len)
        super().__init__()
        self.head_dim = checks.even(who, "head_dim", head_dim)
        self.max_seq_len = max_seq_len
        self.base = checks.positive_float(who, "base", base)
        self.interleaved = checks.boolean(who, "interleaved", interleaved)
        device = torch.get_default_device()
        self._build(Spectrum(self.head_dim, self.base), max_seq_len, device, widest(device))

    @overload
    def apply(self, q: Callable[[torch.nn.Module], None]) -> RoPE: ...

    @overload
    def apply(
        self, q: Tensor, k: Tensor, offset: int | Tensor = 0, *, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def apply(self, q: Any, k: Any = None, offset: int | Tensor = 0, **keywords: Any) -> Any:
        """Rotate queries and keys; the same as calling the module.

        ``model.apply(fn)`` of a surrounding model reaches this method too, with a function and
        nothing else, and then does what :meth:`torch.nn.Module.apply` does.
        """
        if k is None and callable(q):
            return super().apply(q)
        return self(q, k, offset, **keywords)

    def forward(
        self, q: Tensor, k: Tensor, offset: int | Tensor = 0, *, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys.

        Args:
            q: Queries ``(B, H, L, D)``.
            k: Keys ``(B, H', L, D)``; the head count may differ from that of ``q``.
            offset: Position of the first token: what a cache already holds. An integer tensor
                ``(B,)`` gives each sequence its own.
            position_ids: Integers of shape ``(L,)`` or ``(B, L)``, instead of ``offset``.

        Returns:
            New tensors with the shapes and dtypes of ``q`` and ``k``.
        """
        who = type(self).__name__
        checks.float_tensor(who, "q", q)
        checks.float_tensor(who, "k", k)
        checks.rank(who, "q", q, (4,), "(B, H, L, D)")
        checks.rank(who, "k", k, (4,), "(B, H, L, D)")
        way_out = "Build RoPE with that head_dim."
        checks.equal(who, "head_dim of q", q.shape[3], self.head_dim, way_out)
        checks.equal(who, "head_dim of k", k.shape[3], self.head_dim, way_out)
        check_queries_and_keys(who, q, k)
        rows = rows_of(who, q, offset, position_ids, "max_seq_len", self.max_seq_len)
        if rows.positions is None:
            last = rows.start + q.shape[2] - 1
            checks.covered(who, last, "max_seq_len", self.max_seq_len, "a smaller offset")
        spectrum = self._spectrum
        if spectrum is None or spectrum.base != self.base or spectrum.dim != self.head_dim:
            spectrum = Spectrum(self.head_dim, self.base)
        cos, sin, rows = self._cos_sin(who, q, spectrum, rows, self.max_seq_len)
        turn = Turn(self.interleaved, self.interleaved)
        a, b = turn_all(who, "max_seq_len", [q, k], cos, sin, rows, turn)
        return a, b

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return (
            f"head_dim={self.head_dim}, max_seq_len={self.max_seq_len}, base={self.base:g}, "
            f"interleaved={self.interleaved}"
        )
