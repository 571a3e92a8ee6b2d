"""Rotary position embedding (RoPE) as modules that keep their cosines and sines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.tracing import in_capture, is_plain, outlive_capture
from posenc.functional.rotary import check_rotary_input, rows_of, turn_one
from posenc.kernels import Rows, Turn
from posenc.nn._tables import TableModule
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import cos_sin, widest


class RotaryTables(TableModule):
    """Cosines and sines ``[T, P]``, in float64 buffers that no cast rounds and no checkpoint holds.

    The kernel rounds them as it reads them: one table serves every dtype. For half precision a GPU
    is given float32 ones, which are the same numbers in half the bytes.
    """

    cos_cached: Tensor | None
    sin_cached: Tensor | None
    # Both tables in float32, after those they were made from and what tells that they changed.
    _rounded: tuple[Tensor, Tensor, Any, Tensor, Tensor] | None = None

    def __init__(self, *, registered: bool = True) -> None:
        super().__init__("cos_cached", "sin_cached", registered=registered)

    def _tabulate(
        self, positions: Tensor, spectrum: Spectrum, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        if spectrum.axes is not None:
            # A row stands for a token whose coordinates are all the same.
            positions = positions.expand(spectrum.axes.count(), *positions.shape)
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
            cos, sin = kept
            return *self._as_read(x, cos, sin, need), rows
        at = rows.numbers(x.shape[-2], x.device)
        cos, sin = self._tabulate(at[0] if at.shape[0] == 1 else at, spectrum, widest(x.device))
        return cos, sin, Rows()

    def _as_read(
        self, x: Tensor, cos: Tensor, sin: Tensor, need: int | None
    ) -> tuple[Tensor, Tensor]:
        """Kept tables as the kernel for ``x`` takes them."""
        if x.is_cuda and x.element_size() == 2:
            cos, sin = self._in_float32(x, cos, sin)
        recorded = x.requires_grad and torch.is_grad_enabled()
        if recorded and self.max_seq_len is None and need is not None:
            # What a checkpoint saves must look the same when it is worked out again, and the
            # table may have grown by then.
            cos, sin = cos[:need], sin[:need]
        return cos, sin

    def _in_float32(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # A call that is traced reads what is there, and so does one that takes part of the table,
        # or that a table learns from.
        whole = cos is self.cos_cached
        if not whole or not is_plain(x) or cos.requires_grad or sin.requires_grad:
            return cos, sin
        # What is written to a table is counted, except to one of inference mode.
        state = [(t.data_ptr(), None if t.is_inference() else t._version) for t in (cos, sin)]
        found = self._rounded
        if found is None or found[0] is not cos or found[1] is not sin or found[2] != state:
            if in_capture(x):
                return cos, sin
            # A table born in inference mode could not serve a training step later.
            with torch.inference_mode(False), torch.no_grad():
                found = self._rounded = cos, sin, state, cos.float(), sin.float()
        outlive_capture(*found[3:])
        return found[3:]

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes its own.
        return {**self.__dict__, "_rounded": None}

    def _build(self, *arguments: Any) -> tuple[Tensor, ...]:
        self._rounded = None
        return super()._build(*arguments)

    def _move(self, device: torch.device) -> None:
        self._rounded = None
        super()._move(device)


class RotaryPosEmbedding(RotaryTables):
    """Rotate ``(..., L, D)`` by position, keeping cosines and sines between calls.

    The tables are reused while they cover the positions asked for, and rebuilt when the length
    grows, or the device or the embedding dimension changes. Growth doubles, so decoding token by
    token rebuilds only now and then. With ``max_seq_len`` they are built at that capacity and
    every call is held to it. Give both sizes under ``torch.compile``, where a table that is not
    there yet, or may grow, is worked out in the graph instead; and under DistributedDataParallel
    and torch's AveragedModel, where every copy must hold tables of one size. Without
    ``max_seq_len``, positions past 131 072 are worked out at each call and not kept.

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
        width, length = check_rotary_input(who, "input_", input_), input_.shape[-2]
        if self.embed_dim is not None:
            way_out = "Pass embed_dim=None to take any width."
            checks.equal(who, "embed_dim", width, self.embed_dim, way_out)
        rows = rows_of(who, input_, 0, position_ids, "max_seq_len", self.max_seq_len)
        need: int | None = length
        if rows.positions is None:
            checks.sequence(who, 0, length, "max_seq_len", self.max_seq_len)
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
