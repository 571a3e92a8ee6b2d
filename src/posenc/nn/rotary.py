"""Rotations by tables: of one tensor, and with a decay over the distance (xPos)."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.position_checks import UNLIMITED, Limit
from posenc._contract.tracing import may_keep
from posenc.functional._positions import offset_by_position, rows_of
from posenc.functional.rotary import (
    check_heads,
    check_rotary_input,
    check_seq_dim,
    rotate_rows,
    swap_heads,
    with_heads,
    without_heads,
)
from posenc.nn._module import with_offset
from posenc.nn._rotary import by_tables, rotary_tables
from posenc.nn._tables import SharedTables, TableModule, Tensors, shown_table
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import cos_sin
from posenc.ops import Spec, TableRows


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
        x, spec = with_heads(input_), Spec(self.interleaved, self.interleaved)

        def run(cos: Tensor, sin: Tensor, rows: TableRows) -> list[Tensor]:
            return rotate_rows(who, limit, [x], cos, sin, rows, spec)

        (rotated,) = by_tables(who, tables, [x], rows, run)
        if tables is not self._tables and may_keep(input_):
            # Only now: a call that raises leaves the tables as they were.
            self._tables = tables
        return without_heads(rotated, input_)


# The largest exponent of 3.5 in the scales: 3.5**44 is about 1e24, and float32 holds 3e38.
_POWER = 44


def xpos_tables(
    positions: Tensor, dtype: torch.dtype, spectrum: Spectrum, middle: int, scale_base: float
) -> Tensors:
    """Cosines and sines of queries, times the scale, and of keys, divided by it.

    They are in the widest dtype of the device.
    """
    cos, sin = cos_sin(positions, spectrum)
    channels = torch.arange(0, spectrum.dim, 2, dtype=cos.dtype, device=cos.device)
    decay = (channels / spectrum.dim + 0.4) / 1.4
    # Without the cast, the quotient would be in torch's default dtype.
    power = (positions - middle).to(cos.dtype)[:, None] / scale_base
    grown, shrunk = decay**power, decay**-power
    return cos * grown, sin * grown, cos * shrunk, sin * shrunk


class XPos(TableModule):
    r"""Rotate queries and keys, and let their product decay with the distance.

    .. math:: q \mapsto \zeta^{(p - c)/s} R_{p\theta}\,q, \qquad
              k \mapsto \zeta^{-(p - c)/s} R_{p\theta}\,k, \qquad
              \zeta_i = \frac{2i/d + 0.4}{1.4}

    The product of a query at ``m`` and a key at ``n`` is scaled by :math:`\zeta^{(m-n)/s}`, which
    suits causal attention only. :math:`c`, the middle of ``max_seq_len``, cancels. The scales of
    the first pair range over :math:`3.5^{\pm L/2s}` for ``L = max_seq_len``, which float32 must
    hold; for float16, make ``scale_base`` an eighth of ``max_seq_len`` or more.

    Args:
        head_dim: Channels ``D`` of a head, even.
        max_seq_len: Positions are ``0 .. max_seq_len - 1``.
        base: As in :class:`posenc.RoPE`.
        scale_base: :math:`s`: raising it makes the decay slower.
        interleaved: As in :class:`posenc.RoPE`.
        seq_dim: As in :class:`posenc.RoPE`.

    Examples:
        >>> xpos = XPos(head_dim=64)
        >>> q, k = torch.randn(2, 8, 16, 64), torch.randn(2, 2, 16, 64)
        >>> q, k = xpos(q, k, offset=100)

    References:
        Sun et al., *A Length-Extrapolatable Transformer*, 2022.
    """

    q_cos = shown_table(0, "Scaled cosines for queries ``(max_seq_len, P)``, float64.")
    q_sin = shown_table(1, "Sines for queries, as ``q_cos``.")
    k_cos = shown_table(2, "Scaled cosines for keys, as ``q_cos``.")
    k_sin = shown_table(3, "Sines for keys, as ``k_cos``.")

    def __init__(
        self,
        head_dim: int,
        *,
        max_seq_len: int = 2048,
        base: float = 10_000.0,
        scale_base: float = 512.0,
        interleaved: bool = True,
        seq_dim: int = -2,
    ) -> None:
        who = type(self).__name__
        super().__init__()
        self.head_dim = checks.even(who, "head_dim", head_dim)
        self.max_seq_len = checks.integer(who, "max_seq_len", max_seq_len)
        self.base = checks.base(who, base)
        self.scale_base = checks.positive_float(who, "scale_base", scale_base)
        self.interleaved = checks.boolean(who, "interleaved", interleaved)
        self.seq_dim = check_seq_dim(who, seq_dim)
        power = self.max_seq_len / 2 / self.scale_base
        if power > _POWER:
            rule = f"max_seq_len must be at most {2 * _POWER} times scale_base={self.scale_base:g}"
            hint = f"Raise scale_base to {self.max_seq_len / 2 / _POWER:.0f} or more."
            checks.fail(who, rule, self.max_seq_len, hint)
        spectrum = Spectrum(self.head_dim, self.base)
        parameters = (spectrum, self.max_seq_len // 2, self.scale_base)
        self._tables = SharedTables(xpos_tables, parameters, self.max_seq_len, torch.float64)

    @with_offset
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        *given: int | Tensor,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rotate and scale queries and keys; arguments as :meth:`posenc.RoPE.forward`."""
        who = type(self).__name__
        if given:
            offset = offset_by_position(who, given, offset, q, self.seq_dim)
        check_heads(who, "qk", [q, k], self.head_dim, self.seq_dim)
        q, k = swap_heads([q, k], self.seq_dim)
        limit = Limit(self.max_seq_len, "max_seq_len")
        rows = rows_of(who, q, offset, position_ids, limit)
        tables = self._tables.read(q, torch.float64)
        if tables is None:
            tables = self._tables.at(torch.arange(limit.value, device=q.device))
        q_cos, q_sin, k_cos, k_sin = tables
        spec = Spec(self.interleaved, self.interleaved)
        (a,) = rotate_rows(who, limit, [q], q_cos, q_sin, rows, spec)
        (b,) = rotate_rows(who, limit, [k], k_cos, k_sin, rows, spec)
        a, b = swap_heads([a, b], self.seq_dim)
        return a, b
