"""Which cosines and sines rotary modules read: shared tables, or angles computed for a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks, position_checks
from posenc._contract.position_checks import Limit
from posenc._contract.tracing import is_readable, may_keep
from posenc.functional._positions import positions_of, rows_of
from posenc.kernels import Rows
from posenc.nn._tables import Numbers, SharedTables
from posenc.numerics.axes import Axes
from posenc.numerics.frequencies import Spectrum, turn_steps
from posenc.numerics.tables import angles, cos_sin, of_angles, widest


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
        return cos_sin(for_axes(positions, self.spectrum.axes), self.spectrum)


def for_axes(positions: Tensor, axes: Axes | None) -> Tensor:
    """Positions whose coordinates are all the same, where there are several."""
    return positions if axes is None else positions.expand(axes.count(), *positions.shape)


def read_rows(
    who: str, tables: SharedTables[RotaryTable], xs: list[Tensor], rows: Rows
) -> tuple[Tensor, Tensor, Rows]:
    """Cosines, sines, and the rows of them that the tokens of ``xs`` take.

    The kernel checks rows that are in a tensor, if the tables have a fixed length.
    """
    x, dtype, needed = xs[0], torch.float64, None
    if x.is_cuda and all(x.element_size() == 2 for x in xs):
        # The kernel rounds float64 tables as it reads them. Half precision gets the same numbers
        # from float32 ones, in half the bytes.
        dtype = torch.float32
    if tables.length is None:
        length = x.shape[-2]
        if rows.positions is None:
            needed = rows.start + length
        else:
            needed = position_checks.check_ids(who, rows.positions)
            if needed and length > 1 and rows.is_sequential():
                position_checks.check_range(who, needed - 1, length)
                needed += length - 1
    kept = tables.read(x, dtype, needed)
    if kept is None:
        return *tables.description.at(positions_of(who, x, rows)), Rows()
    cos, sin = kept
    if needed is not None and torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        # Activation checkpointing compares the shapes of what it saves with those of a second
        # call, and the table may have grown by then.
        cos, sin = cos[:needed], sin[:needed]
    return cos, sin, rows


class RopeAngles:
    """The angles of a `RoPE` at every length, and the gain of its tables.

    Tables hold those of integer positions in sequences up to the trained length. For lengths that
    change the rule, for several coordinates, and for floating ones, angles are computed at each
    call.

    Attributes:
        trained: The length up to which the rule does not change; None if it never does.
        usual: The spectrum up to that length.
    """

    def __init__(self, spectrum: Spectrum, limit: Limit) -> None:
        self.spectrum, self.limit = spectrum, limit
        self.trained = None if spectrum.scaling is None else spectrum.scaling.trained_length()
        self.usual = self.spectrum_at(None)
        try:
            hash(self.usual)
        except TypeError as wrong:
            rule = "scaling and axes must be hashable, because tables are found by them"
            checks.fail("RoPE", rule, wrong, "Hold tuples instead of lists.", TypeError)
        # A rule that cannot scale these rates is refused now, and not at the first call; and the
        # result is remembered, because torch.export cannot compute it.
        turn_steps(self.usual)

    def spectrum_at(self, seq_len: int | Tensor | None) -> Spectrum:
        """The rates in a sequence of this length; lengths in a tensor are left open."""
        base, rule = self.spectrum, self.spectrum.scaling
        if rule is not None and not isinstance(seq_len, Tensor):
            rule = rule.at(seq_len)
        return Spectrum(base.dim, base.base, rule, base.axes)

    def rows(
        self,
        who: str,
        tables: SharedTables[RotaryTable],
        xs: list[Tensor],
        offset: int | Tensor,
        position_ids: Tensor | None,
        seq_len: Any,
        inverse: bool,
    ) -> tuple[Tensor, Tensor, Rows]:
        """Cosines, sines, and the rows of them that the tokens of ``xs`` take."""
        x, axes, limit, length = xs[0], self.spectrum.axes, self.limit, None
        if isinstance(position_ids, Tensor) and (
            position_ids.is_floating_point() or (axes is not None and position_ids.dim() > 1)
        ):
            position_checks.exclusive_offset(who, offset)
            phi, gain = self.at_coordinates(who, "position_ids", x, position_ids, seq_len)
        else:
            if axes is not None and position_ids is None and not axes.of_text():
                rule = f"position_ids must be given, because {axes} has several coordinates"
                checks.fail(who, rule, None, "Pass positions.grid(H, W), say.")
            rows = rows_of(who, x, offset, position_ids, limit)
            if self.trained is not None and seq_len is None:
                seq_len = rows.start + (x.shape[2] if rows.is_sequential() else 1)
                if rows.positions is not None and rows.positions.numel():
                    seq_len = seq_len + _last_positions(rows.positions)
            if seq_len is not None:
                length = self.rule_length(who, x, seq_len)
            if length is None and (not inverse or self.usual.gain() == 1.0):
                return read_rows(who, tables, xs, rows)
            phi, gain = self.at(for_axes(positions_of(who, x, rows, limit), axes), length)
        return *tables_of(phi, x.device, 1 / gain if inverse else gain), Rows()

    def rule_length(self, who: str, x: Tensor, seq_len: Any) -> int | Tensor | None:
        """The length to take the rule at; None if the tables of :attr:`usual` serve it."""
        if isinstance(seq_len, Tensor):
            given, seq_len = seq_len, position_checks.offsets(who, seq_len, x, "seq_len", ())
            if is_readable(given) and given.numel():
                low, high = (
                    checks.integer(who, "seq_len", int(end), least=0)
                    for end in torch.aminmax(given)
                )
                # One table serves them all.
                if low == high or (self.trained is not None and high <= self.trained):
                    seq_len = high
        elif seq_len is not None:
            seq_len = checks.integer(who, "seq_len", seq_len, least=0)
        if self.trained is None or seq_len is None:
            return None
        if isinstance(seq_len, Tensor) or may_keep(x):
            short = not isinstance(seq_len, Tensor) and seq_len <= self.trained
            return None if short else seq_len
        # One graph for every length: the comparison is made inside it.
        return torch.full((), seq_len, dtype=torch.int64, device=x.device)

    def at_coordinates(
        self, who: str, name: str, x: Tensor, at: Any, seq_len: Any
    ) -> tuple[Tensor, float | Tensor]:
        """Angles and gain of the tokens of ``x`` at positions of any kind, checked."""
        axes = self.spectrum.axes
        count = None if axes is None else axes.count()
        at = position_checks.coordinates(who, name, at, x, count, self.limit)
        if seq_len is None and self.trained is not None and at.numel():
            last = _last_positions(at if axes is None else at.amax(0))
            seq_len = last.floor().to(torch.int64).clamp(min=-1) + 1
        return self.at(at, self.rule_length(who, x, seq_len))

    def at(self, at: Tensor, length: int | Tensor | None) -> tuple[Tensor, float | Tensor]:
        """Angles in float64 in sequences of this length, and the gain of their tables."""
        spectrum = self.spectrum_at(length)
        length = length if isinstance(length, Tensor) else None
        if widest(at.device) != torch.float64:
            at, length = at.cpu(), None if length is None else length.cpu()
        return angles(at, spectrum, length), spectrum.gain(length)


def tables_of(phi: Tensor, device: torch.device, gain: float | Tensor) -> tuple[Tensor, Tensor]:
    """Tables of these angles: ``(B, L, P)``, or ``(L, P)`` if all sequences have the same."""
    cos, sin = of_angles(phi, device, gain)
    return (cos[0], sin[0]) if cos.dim() == 3 and cos.shape[0] == 1 else (cos, sin)


def _last_positions(at: Tensor) -> Tensor:
    """The last position of each sequence, or of all if they share theirs."""
    return at.amax(-1) if at.dim() == 2 and at.shape[0] > 1 else at.max()
