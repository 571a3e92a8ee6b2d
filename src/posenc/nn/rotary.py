"""Rotary position embedding (RoPE) as modules that keep their cosines and sines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.functional.rotary import check_rotary_input, rotate_rows
from posenc.nn._tables import TableModule
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import cos_sin, widest


class _RotaryTables(TableModule):
    """Cosines and sines ``[T, P]``, in float64 buffers that no cast rounds and no checkpoint holds.

    The kernel rounds them as it reads them: one table serves every dtype.
    """

    cos_cached: Tensor | None
    sin_cached: Tensor | None

    def __init__(self, capacity: int | None) -> None:
        super().__init__("cos_cached", "sin_cached", capacity=capacity)

    def _tabulate(
        self, positions: Tensor, spectrum: Spectrum, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        return cos_sin(positions, spectrum)

    def _table_dtype(self, x: Tensor) -> torch.dtype:
        return widest(x.device)


class RotaryPosEmbedding(_RotaryTables):
    """Rotate ``(..., L, D)`` by position, keeping cosines and sines between calls.

    The tables are reused while they cover the positions asked for, and rebuilt when the length
    grows, or the device or the embedding dimension changes. Growth doubles, so decoding token by
    token rebuilds only now and then. With ``max_seq_len`` they are built at that capacity and
    every call is held to it; give it under DistributedDataParallel, where each rank must hold
    tables of one size, and under ``torch.compile``, where a growing table is worked out in the
    graph instead.

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
        super().__init__(capacity=max_seq_len)
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
        at: Tensor | tuple[int, int] = (0, length)
        need: int | None = length
        if position_ids is not None:
            at, need = checks.position_ids(
                who,
                position_ids,
                input_.shape,
                input_.device,
                limit_name="max_seq_len",
                limit=self.max_seq_len,
            )
        elif self.max_seq_len is not None:
            checks.covered(who, length - 1, "max_seq_len", self.max_seq_len, "a shorter input_")
        spectrum = Spectrum(width, self.base)
        cos, sin = self._rows(input_, spectrum, at, need)
        return rotate_rows(input_, cos, sin, interleaved=self.interleaved)

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
        super().__init__(capacity=max_seq_len)
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
        self, q: Tensor, k: Tensor, offset: int = 0, *, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def apply(self, q: Any, k: Any = None, offset: int = 0, **keywords: Any) -> Any:
        """Rotate queries and keys; the same as calling the module.

        ``model.apply(fn)`` of a surrounding model reaches this method too, with a function and
        nothing else, and then does what :meth:`torch.nn.Module.apply` does.
        """
        if k is None and callable(q):
            return super().apply(q)
        return self(q, k, offset, **keywords)

    def forward(
        self, q: Tensor, k: Tensor, offset: int = 0, *, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys.

        Args:
            q: Queries ``(B, H, L, D)``.
            k: Keys ``(B, H', L, D)``; the head count may differ from that of ``q``.
            offset: Position of the first token: what a cache already holds.
            position_ids: Integers of shape ``(L,)`` or ``(B, L)``, instead of ``offset``.

        Returns:
            New tensors with the shapes and dtypes of ``q`` and ``k``.
        """
        who = type(self).__name__
        for name, x in (("q", q), ("k", k)):
            checks.float_tensor(who, name, x)
            checks.rank(who, name, x, (4,), "(B, H, L, D)")
            way_out = f"Build RoPE(head_dim={x.shape[-1]})."
            checks.equal(who, f"head_dim of {name}", x.shape[-1], self.head_dim, way_out)
        if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.device != k.device:
            rule = "q and k must agree in batch, length and device"
            got = f"{tuple(q.shape)} on {q.device} and {tuple(k.shape)} on {k.device}"
            raise ValueError(checks.message(who, rule, got, "Only the head counts may differ."))
        length = q.shape[2]
        start = checks.integer(who, "offset", offset, least=0)
        at: Tensor | tuple[int, int] = (start, length)
        if position_ids is None:
            last = start + length - 1
            checks.covered(who, last, "max_seq_len", self.max_seq_len, "a smaller offset")
        else:
            checks.exclusive_offset(who, start)
            at, _ = checks.position_ids(
                who,
                position_ids,
                q.shape,
                q.device,
                limit_name="max_seq_len",
                limit=self.max_seq_len,
            )
        spectrum = Spectrum(self.head_dim, self.base)
        cos, sin = self._rows(q, spectrum, at, self.max_seq_len)
        return (
            rotate_rows(q, cos, sin, interleaved=self.interleaved),
            rotate_rows(k, cos, sin, interleaved=self.interleaved),
        )

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return (
            f"head_dim={self.head_dim}, max_seq_len={self.max_seq_len}, base={self.base:g}, "
            f"interleaved={self.interleaved}"
        )
