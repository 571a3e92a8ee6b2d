"""Which cosines and sines a call of `RoPE` reads: shared ones, or its own, worked out for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.tracing import is_readable, may_keep
from posenc.functional.rotary import rows_of
from posenc.kernels import Rows
from posenc.nn._tables import Numbers, SharedTables
from posenc.nn.rotary import RotaryTable, rotary_rows, rows_needed
from posenc.numerics.axes import Axes
from posenc.numerics.frequencies import Spectrum, turn_steps
from posenc.numerics.scaling import Rule
from posenc.numerics.tables import angles, of_angles, widest


class RopeTables:
    """The rates of a `RoPE` at every length, and its tables.

    Tables are shared and kept for sequences that fit the trained length, whose tokens have one
    position each. For lengths that a rule slows further, for several coordinates, and for
    coordinates that are not whole, cosines and sines are worked out at each call.
    """

    def __init__(
        self, width: int, base: float, scaling: Rule | None, axes: Axes | None, limit: int | None
    ) -> None:
        self.width, self.base, self.scaling, self.axes = width, base, scaling, axes
        self.limit = limit
        self.trained = None if scaling is None else scaling.trained_length()
        self.usual = self.spectrum(None)
        try:
            hash(self.usual)
        except TypeError as wrong:
            rule = "scaling and axes must be hashable, because tables are found by them"
            way_out = "Hold tuples instead of lists."
            raise TypeError(checks.message("RoPE", rule, wrong, way_out)) from None
        # A rule that cannot scale these rates is refused now, and not at the first call; and the
        # result is remembered, because torch.export cannot work it out.
        turn_steps(self.usual)
        self.shared = SharedTables(RotaryTable(self.usual), limit, torch.float64)

    def follow(self, fn: Callable[[Tensor], Tensor]) -> None:
        """As :meth:`SharedTables.follow`."""
        self.shared.follow(fn)

    def shown(self) -> Numbers | None:
        """As :meth:`SharedTables.shown`."""
        return self.shared.shown()

    def spectrum(self, seq_len: int | Tensor | None) -> Spectrum:
        """The rates in a sequence of this length; lengths in a tensor are left open."""
        rule = self.scaling
        if rule is not None and not isinstance(seq_len, Tensor):
            rule = rule.at(seq_len)
        return Spectrum(self.width, self.base, rule, self.axes)

    def for_call(
        self,
        who: str,
        xs: list[Tensor],
        offset: int | Tensor,
        *,
        position_ids: Tensor | None = None,
        seq_len: Any = None,
        inverse: bool = False,
    ) -> tuple[Tensor, Tensor, Rows]:
        """Cosines, sines, and the rows of them that the tokens of ``xs`` take."""
        x = xs[0]
        if isinstance(position_ids, Tensor) and (
            position_ids.is_floating_point() or (self.axes is not None and position_ids.dim() > 1)
        ):
            checks.exclusive_offset(who, offset)
            phi, gain = self.own_angles(who, x, position_ids, seq_len)
            return *for_sequences(phi, x.device, 1 / gain if inverse else gain), Rows()
        if position_ids is None and self.axes is not None and not self.axes.of_text():
            rule = f"position_ids must be given, because {self.axes} has several coordinates"
            raise ValueError(checks.message(who, rule, None, "Pass positions.grid(H, W), say."))
        limit = self.limit
        rows = rows_of(who, x, offset, position_ids, "max_seq_len", limit)
        need = rows_needed(who, rows, x.shape[2], limit)
        length = None
        if self.trained is not None or seq_len is not None:
            length = self.length(who, x, self._end(x, rows) if seq_len is None else seq_len)
        if length is None and (not inverse or self.usual.gain() == 1.0):
            return rotary_rows(self.shared, xs, rows, need)
        at = rows.as_index(x.shape[2], x.device)
        checks.check_ids(who, at, "max_seq_len", limit)
        phi, gain = self.angles_and_gain(self.spread(at), length)
        return *for_sequences(phi, x.device, 1 / gain if inverse else gain), Rows()

    def length(self, who: str, x: Tensor | None, seq_len: Any) -> Any:
        """The length to take the rule at; None for the trained one, and for any other rule."""
        if seq_len is None:
            return None
        if isinstance(seq_len, Tensor):
            each = seq_len.dim() != 0
            if seq_len.dtype not in checks.INT_DTYPES or (each and x is None):
                rule = "seq_len must be an int" + (x is not None) * ", or an integer tensor"
                raise TypeError(checks.message(who, rule, checks.describe(seq_len), "Pass len(x)."))
            if each and x is not None:
                seq_len = checks.offsets(who, seq_len, x.shape, x.device, name="seq_len")
            if is_readable(seq_len) and seq_len.numel():
                low, high = (
                    checks.integer(who, "seq_len", int(end), least=0)
                    for end in torch.aminmax(seq_len)
                )
                # One table serves them all.
                if low == high or (self.trained is not None and high <= self.trained):
                    seq_len = high
        else:
            seq_len = checks.integer(who, "seq_len", seq_len, least=0)
        if self.trained is None:
            return None
        if isinstance(seq_len, Tensor):
            return seq_len if x is None else seq_len.to(x.device)
        if x is not None and not may_keep(x):
            # One graph for every length: the comparison is made inside it.
            return torch.full((), seq_len, dtype=torch.int64, device=x.device)
        return None if seq_len <= self.trained else seq_len

    def _end(self, x: Tensor, rows: Rows) -> Any:
        """One past the last position of each sequence, if the rule depends on it."""
        if self.trained is None:
            return None
        end = rows.start + (x.shape[2] if rows.is_sequential() else 1)
        if rows.positions is None or rows.positions.numel() == 0:
            return end
        return _last_positions(rows.positions) + end

    def own_angles(
        self, who: str, x: Tensor, position_ids: Tensor, seq_len: Any
    ) -> tuple[Tensor, float | Tensor]:
        """Angles and gain of tokens that have coordinates of their own."""
        at = self.coordinates(who, "position_ids", x, position_ids)
        return self.angles_and_gain(at, self.length(who, x, self.span(at, seq_len)))

    def coordinates(self, who: str, name: str, x: Tensor, at: Tensor) -> Tensor:
        """``at``, checked, as int64 or float64 on the device of ``x``."""
        count = None if self.axes is None else self.axes.count()
        return checks.coordinates(
            who, name, at, x.shape, x.device, count, "max_seq_len", self.limit
        )

    def span(self, at: Tensor, seq_len: Any) -> Any:
        """The length of each sequence whose positions are ``at``, unless another is given."""
        if seq_len is not None or at.numel() == 0 or self.trained is None:
            return seq_len
        most = _last_positions(at if self.axes is None else at.amax(0))
        return most.floor().to(torch.int64).clamp(min=-1) + 1

    def spread(self, at: Tensor) -> Tensor:
        """Positions as coordinates that are all the same, where there are several."""
        return at if self.axes is None else at.expand(self.axes.count(), *at.shape)

    def angles_and_gain(self, at: Tensor, length: Any) -> tuple[Tensor, float | Tensor]:
        """Angles in float64 in sequences of this length, and what the tables are multiplied by."""
        spectrum = self.spectrum(length)
        length = length if isinstance(length, Tensor) else None
        if widest(at.device) != torch.float64:
            at, length = at.cpu(), None if length is None else length.cpu()
        return angles(at, spectrum, length), spectrum.gain(length)


def for_sequences(phi: Tensor, device: torch.device, gain: float | Tensor) -> tuple[Tensor, Tensor]:
    """Tables of these angles: ``(B, L, P)``, or ``(L, P)`` if all sequences have the same."""
    cos, sin = of_angles(phi, device, gain)
    return (cos[0], sin[0]) if cos.dim() == 3 and cos.shape[0] == 1 else (cos, sin)


def _last_positions(at: Tensor) -> Tensor:
    """The last position of each sequence, or of all if they share theirs."""
    return at.amax(-1) if at.dim() == 2 and at.shape[0] > 1 else at.max()
