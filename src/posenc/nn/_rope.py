"""Cosines and sines of the rotary modules: read from shared tables, or computed for one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from posenc._contract import checks, position_checks
from posenc._contract.position_checks import UNLIMITED, Limit
from posenc._contract.tracing import is_plain, is_readable, may_keep
from posenc.functional._positions import positions_of, rows_of
from posenc.functional.rotary import rotate_rows
from posenc.kernels import RowOutOfRange, Rows, Spec
from posenc.nn._tables import SharedTables, Tensors
from posenc.numerics.axes import Axes
from posenc.numerics.frequencies import Spectrum, turn_steps
from posenc.numerics.tables import angles, cos_sin, float64_device, of_angles, round_once

Result = TypeVar("Result")
# What the base of a `RoPE` is if none is passed.
_BASE = 10_000.0


def rotary_tables(positions: Tensor, dtype: torch.dtype, spectrum: Spectrum) -> Tensors:
    """Cosines and sines ``[..., P]``; float64 means the widest dtype of the device."""
    cos, sin = cos_sin(for_axes(positions, spectrum.axes), spectrum)
    return (cos, sin) if dtype == torch.float64 else (cos.to(dtype), sin.to(dtype))


def for_axes(positions: Tensor, axes: Axes | None) -> Tensor:
    """Positions ``(A, ...)`` with the same number on all axes; unchanged without axes."""
    return positions if axes is None else positions.expand(axes.count(), *positions.shape)


def check_width(who: str, head_dim: int, rotary_dim: int | None, axes: Axes | None) -> int:
    """The number of channels that are rotated."""
    width = head_dim if rotary_dim is None else rotary_dim
    if width > head_dim:
        rule = f"rotary_dim must be at most head_dim={head_dim}"
        checks.fail(who, rule, width, "Pass None to rotate all of a head.")
    if axes is not None:
        axes.check(who, width)
    return width


def check_freqs(who: str, freqs: Any, base: float, width: int, axes: Axes | None) -> Any:
    """``freqs`` as a tuple of one rate for each pair of the ranges of ``axes``, or None."""
    if freqs is None:
        return None
    if base != _BASE:
        rule, way_out = "base and freqs exclude each other", "Leave base out, or pass freqs=None."
        checks.fail(who, rule, f"base={base:g}", way_out)
    widths = (width,) if axes is None else axes.widths(width)
    way_out = "Pass one rate for each pair"
    if axes is not None and sum(widths) != width:
        way_out += " of one coordinate, or give Axial the channels of each"
    return checks.frequencies(who, "freqs", freqs, sum(widths) // 2, f"{way_out}.")


def by_tables(
    who: str,
    tables: SharedTables,
    xs: list[Tensor],
    rows: Rows,
    run: Callable[[Tensor, Tensor, Rows], Result],
    *learned: Tensor,
) -> Result:
    """``run(cos, sin, rows)`` for ``xs`` of ``(B, H, L, D)``; the shared tables grow as needed.

    ``learned`` are parameters that ``run`` reads.
    """
    x, dtype, needed = xs[0], torch.float64, None
    if x.is_cuda and all(x.element_size() == 2 for x in xs):
        # Half precision gets the same results from float32 tables, which are half as large.
        dtype = torch.float32
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (*xs, *learned))
    if tables.length is None:
        length, ids = x.shape[2], rows.positions
        held = tables.held(x.device, dtype) if x.is_cpu and not recorded else None
        if held is not None and (is_plain(x) if ids is None else is_plain(x, ids)):
            cos, sin = held
            try:
                # The kernel checks positions against the table faster than aminmax would.
                return run(cos, sin, rows)
            except RowOutOfRange:
                pass
        if ids is None:
            needed = rows.start + length
        else:
            needed = position_checks.check_ids(who, rows.as_index(length, x.device))
    kept = tables.read(x, dtype, needed)
    cos, sin = tables.at(positions_of(who, x, rows)) if kept is None else kept
    if kept is None:
        rows = Rows()
    elif needed is not None and recorded:
        # Activation checkpointing compares the shapes of saved tensors with those of a second
        # call, and the table may have grown by then.
        cos, sin = cos[:needed], sin[:needed]
    return run(cos, sin, rows)


def rotate_by_tables(
    who: str,
    limit: Limit,
    tables: SharedTables,
    xs: list[Tensor],
    rows: Rows,
    spec: Spec,
    *,
    in_place: bool = False,
) -> list[Tensor]:
    """Rotate ``xs`` of ``(B, H, L, D)`` by shared tables."""

    def run(cos: Tensor, sin: Tensor, rows: Rows) -> list[Tensor]:
        return rotate_rows(who, limit, xs, cos, sin, rows, spec, in_place=in_place)

    return by_tables(who, tables, xs, rows, run)


def rotate_last_queries(
    who: str,
    limit: Limit,
    tables: SharedTables,
    qk: list[Tensor],
    rows: Rows,
    spec: Spec,
    own: tuple[Tensor, Tensor] | None,
) -> list[Tensor]:
    """Rotate keys by ``rows``, and fewer queries by the last of these; ``own`` tables if any."""
    q, k = qk
    ahead, at = k.shape[2] - q.shape[2], rows.positions
    if own is not None:
        cos, sin = (table.narrow(-2, ahead, q.shape[2]) for table in own)
        (a,) = rotate_rows(who, limit, [q], cos, sin, rows, spec)
        return [a, *rotate_rows(who, limit, [k], *own, rows, spec)]
    if at is None or rows.is_sequential():
        ends = Rows(rows.start + ahead, at)
    else:
        ends = Rows(rows.start, at[:, ahead:])
    # Keys first: the table grows for them, and for their queries too.
    keys = rotate_by_tables(who, limit, tables, [k], rows, spec)
    return [*rotate_by_tables(who, limit, tables, [q], ends, spec), *keys]


class RopeAngles:
    """The angles of a `RoPE` and the gain of its tables, for every sequence length.

    Shared tables hold integer positions in sequences up to the trained length. Angles of longer
    sequences, several coordinates and floating positions are computed at each call.
    """

    def __init__(self, spectrum: Spectrum, max_seq_len: int | None) -> None:
        self.spectrum = spectrum
        self.limit = UNLIMITED if max_seq_len is None else Limit(max_seq_len, "max_seq_len")
        # Up to this length the spectrum is self.usual; None if no length changes it.
        self.trained = None if spectrum.scaling is None else spectrum.scaling.trained_length()
        self.usual = self.spectrum_at(None)
        # Raise now if the rule cannot scale these rates, and cache them: torch.export cannot.
        turn_steps(self.usual)

    def spectrum_at(self, seq_len: int | Tensor | None) -> Spectrum:
        """The spectrum at this length; for a tensor of lengths, `angles` evaluates the rule."""
        base, rule = self.spectrum, self.spectrum.scaling
        if rule is not None and not isinstance(seq_len, Tensor):
            rule = rule.at(seq_len)
        return Spectrum(base.dim, base.base, rule, base.axes, base.freqs)

    def rows(
        self,
        who: str,
        x: Tensor,
        offset: int | Tensor,
        position_ids: Tensor | None,
        seq_len: Any,
        inverse: bool,
    ) -> tuple[Rows, tuple[Tensor, Tensor] | None]:
        """The table rows of ``x``, and the tables of this call, or None for the shared ones."""
        axes, limit, length = self.spectrum.axes, self.limit, None
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
                return rows, None
            phi, gain = self.at(for_axes(positions_of(who, x, rows, limit), axes), length)
        return Rows(), tables_of(phi, x.device, 1 / gain if inverse else gain)

    def rule_length(self, who: str, x: Tensor, seq_len: Any) -> int | Tensor | None:
        """Check and return ``seq_len``, or None if the spectrum at that length is :attr:`usual`."""
        if isinstance(seq_len, Tensor):
            given, seq_len = seq_len, position_checks.offsets(who, seq_len, x, "seq_len", ())
            if is_readable(given) and given.numel():
                low, high = (
                    checks.integer(who, "seq_len", int(end), least=0)
                    for end in torch.aminmax(given)
                )
                # All sequences have the same spectrum.
                if low == high or (self.trained is not None and high <= self.trained):
                    seq_len = high
        elif seq_len is not None:
            seq_len = checks.integer(who, "seq_len", seq_len, least=0)
        if self.trained is None or seq_len is None:
            return None
        if isinstance(seq_len, Tensor) or may_keep(x):
            short = not isinstance(seq_len, Tensor) and seq_len <= self.trained
            return None if short else seq_len
        # In a compiled graph the length is a tensor, so that one graph serves every length.
        return torch.full((), seq_len, dtype=torch.int64, device=x.device)

    def at_coordinates(
        self, who: str, name: str, x: Tensor, at: Any, seq_len: Any
    ) -> tuple[Tensor, float | Tensor]:
        """Check integer or floating positions of the tokens of ``x``; return angles and gain."""
        axes = self.spectrum.axes
        count = None if axes is None else axes.count()
        at = position_checks.coordinates(who, name, at, x, count, self.limit)
        if seq_len is None and self.trained is not None and at.numel():
            last = _last_positions(at if axes is None else at.amax(0))
            seq_len = last.floor().to(torch.int64).clamp(min=-1) + 1
        return self.at(at, self.rule_length(who, x, seq_len))

    def shifted(self, who: str, k: Tensor, by: int | Tensor, seq_len: Any) -> Tensor:
        """Angles ``[1 or B, 1, P]`` that move the tokens of ``k`` by this many positions."""
        rule = self.spectrum.scaling
        if isinstance(by, Tensor):
            at = position_checks.offsets(who, by, k, "by")
        else:
            by = checks.integer(who, "by", by, least=-checks.FARTHEST)
            at = torch.full((1,), by, device=k.device)
        if seq_len is None and self.trained is not None:
            needs = f"seq_len must be given, because {type(rule).__name__} depends on it"
            checks.fail(who, needs, None, "Pass the seq_len that the keys were rotated with.")
        length = self.rule_length(who, k, seq_len)
        return self.at(for_axes(at[:, None], self.spectrum.axes), length)[0]

    def moved(
        self, who: str, k: Tensor, to: Tensor, before: Tensor, to_len: Any, len_before: Any
    ) -> tuple[Tensor, float | Tensor]:
        """Angles and gain that move the tokens of ``k`` from positions ``before``."""
        phi, gain = self.at_coordinates(who, "to_positions", k, to, to_len)
        old, old_gain = self.at_coordinates(who, "from_positions", k, before, len_before)
        return phi - old, gain / old_gain

    def tables(
        self, who: str, position_ids: Tensor, seq_len: Any, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The body of :meth:`RoPE.tables`."""
        shape = position_checks.positions(who, "position_ids", position_ids).shape
        batch = shape[-2] if len(shape) > 1 else 1
        like = torch.empty((batch, 1, shape[-1], 0), device=position_ids.device)
        phi, gain = self.at_coordinates(who, "position_ids", like, position_ids, seq_len)
        cos, sin = of_angles(phi, position_ids.device, gain)
        if checks.float_dtype(who, "dtype", dtype) != torch.float64:
            cos, sin = round_once(cos, dtype), round_once(sin, dtype)
        return cos, sin

    def at(self, at: Tensor, length: int | Tensor | None) -> tuple[Tensor, float | Tensor]:
        """Angles in float64, and the gain of their tables, in sequences of this length."""
        spectrum = self.spectrum_at(length)
        where = float64_device(at.device)
        length = length.to(where) if isinstance(length, Tensor) else None
        return angles(at.to(where), spectrum, length), spectrum.gain(length)


def tables_of(phi: Tensor, device: torch.device, gain: float | Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``(B, L, P)``, or ``(L, P)`` if ``B`` is 1."""
    cos, sin = of_angles(phi, device, gain)
    return (cos[0], sin[0]) if cos.dim() == 3 and cos.shape[0] == 1 else (cos, sin)


def _last_positions(at: Tensor) -> Tensor:
    """The largest position of each sequence; a scalar if the sequences share their positions."""
    return at.amax(-1) if at.dim() == 2 and at.shape[0] > 1 else at.max()
