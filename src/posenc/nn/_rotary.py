"""What `RoPE` and `PoPE` share: tables of angles, and keys that are moved to other positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from posenc import configs
from posenc._contract import checks, position_checks
from posenc._contract.position_checks import UNLIMITED, Limit
from posenc._contract.tracing import is_readable, may_keep
from posenc.functional import rotary
from posenc.functional._positions import checked_positions, positions_of, rows_of
from posenc.nn._tables import SharedTables, TableModule, Tensors, shown_table
from posenc.numerics.axes import Axes
from posenc.numerics.frequencies import Spectrum, scaled_rates, turn_steps
from posenc.numerics.scaling import Rule
from posenc.numerics.tables import angles, cos_sin, float64_device, of_angles, round_once
from posenc.ops import Spec, TableRows

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


def check_inv_freq(who: str, inv_freq: Any, base: float, width: int, axes: Axes | None) -> Any:
    """``inv_freq`` as a tuple of one rate for each pair of the ranges of ``axes``, or None."""
    if inv_freq is None:
        return None
    if base != _BASE:
        rule, hint = (
            "base and inv_freq exclude each other",
            "Leave base out, or pass inv_freq=None.",
        )
        checks.fail(who, rule, f"base={base:g}", hint)
    widths = (width,) if axes is None else axes.widths(width)
    hint = "Pass one rate for each pair"
    if axes is not None and sum(widths) != width:
        hint += " of one coordinate, or give Axial the channels of each"
    return checks.frequencies(who, "inv_freq", inv_freq, sum(widths) // 2, f"{hint}.")


def by_tables(
    who: str,
    tables: SharedTables,
    xs: list[Tensor],
    rows: TableRows,
    run: Callable[[Tensor, Tensor, TableRows], Result],
    *learned: Tensor,
) -> Result:
    """``run(cos, sin, rows)`` for ``xs`` of ``(B, H, L, D)``; the shared tables grow as needed.

    ``learned`` are parameters that ``run`` reads.
    """
    x, dtype, needed, positions = xs[0], torch.float64, None, None
    if x.is_cuda and all(x.element_size() == 2 for x in xs):
        # Half precision gets the same results from float32 tables, which are half as large.
        dtype = torch.float32
    if tables.length is None:
        if rows.positions is None:
            needed = rows.start + x.shape[2]
        else:
            positions, needed = checked_positions(who, x, rows)
    shared = tables.read(x, dtype, needed)
    if shared is None:
        positions = positions_of(who, x, rows) if positions is None else positions
        cos, sin = tables.at(positions)
        return run(cos, sin, TableRows())
    cos, sin = shared
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (*xs, *learned))
    if needed is not None and recorded:
        # Activation checkpointing compares the shapes of saved tensors with those of a second
        # call, and the table may have grown by then.
        cos, sin = cos[:needed], sin[:needed]
    return run(cos, sin, rows)


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
    ) -> tuple[TableRows, tuple[Tensor, Tensor] | None]:
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
                checks.fail(who, rule, None, "Pass positions.grid(H, W), for example.")
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
        return TableRows(), tables_of(phi, x.device, 1 / gain if inverse else gain)

    def rule_length(self, who: str, x: Tensor, seq_len: Any) -> int | Tensor | None:
        """Check and return ``seq_len``, or None if the spectrum at that length is :attr:`usual`."""
        if isinstance(seq_len, Tensor):
            lengths, seq_len = seq_len, position_checks.offsets(who, seq_len, x, "seq_len", ())
            if is_readable(lengths) and lengths.numel():
                low, high = (
                    checks.integer(who, "seq_len", int(end), least=0)
                    for end in torch.aminmax(lengths)
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
        self, who: str, name: str, x: Tensor, positions: Any, seq_len: Any
    ) -> tuple[Tensor, float | Tensor]:
        """Check integer or floating positions of the tokens of ``x``; return angles and gain."""
        axes = self.spectrum.axes
        count = None if axes is None else axes.count()
        positions = position_checks.coordinates(who, name, positions, x, count, self.limit)
        if seq_len is None and self.trained is not None and positions.numel():
            last = _last_positions(positions if axes is None else positions.amax(0))
            seq_len = last.floor().to(torch.int64).clamp(min=-1) + 1
        return self.at(positions, self.rule_length(who, x, seq_len))

    def at(self, positions: Tensor, length: int | Tensor | None) -> tuple[Tensor, float | Tensor]:
        """Angles in float64, and the gain of their tables, in sequences of this length."""
        spectrum = self.spectrum_at(length)
        where = float64_device(positions.device)
        length = length.to(where) if isinstance(length, Tensor) else None
        return angles(positions.to(where), spectrum, length), spectrum.gain(length)


def tables_of(phi: Tensor, device: torch.device, gain: float | Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``(B, L, P)``, or ``(L, P)`` if ``B`` is 1."""
    cos, sin = of_angles(phi, device, gain)
    return (cos[0], sin[0]) if cos.dim() == 3 and cos.shape[0] == 1 else (cos, sin)


def _last_positions(positions: Tensor) -> Tensor:
    """The largest position of each sequence; a scalar if the sequences share their positions."""
    by_sequence = positions.dim() == 2 and positions.shape[0] > 1
    return positions.amax(-1) if by_sequence else positions.max()


def check_axes(who: str, axes: Any) -> Axes | None:
    """``axes`` if they are Axes, or None."""
    hint = "Pass axes.Axial(2) for equal widths, axes.Axial((16, 56, 56)) for others."
    checked: Axes | None = checks.check_instance(who, "axes", axes, Axes, hint)
    return checked


def check_scaling(who: str, scaling: Any, base: float) -> Any:
    """A rule of `posenc.scaling`, also from a published dict or name, or None."""
    rule = configs.read_scaling(who, scaling, base)
    hint = "Pass posenc.scaling.Linear(2.0), for example, or the rope_scaling of a config."
    return checks.check_instance(who, "scaling", rule, Rule, hint)


class RotatedKeys(TableModule):
    """A module whose keys can be rotated further: their channels are pairs at an angle."""

    seq_dim: int
    _angles: RopeAngles
    # The width of rotated keys, and how their pairs lie.
    _key_dim: int
    _key_spec: Spec

    cos_cached = shown_table(0, "Cosines ``(max_seq_len, P)``, float64; None until needed.")
    sin_cached = shown_table(1, "Sines, as ``cos_cached``.")

    def _set_angles(
        self, spectrum: Spectrum, max_seq_len: int | None, key_dim: int, key_spec: Spec
    ) -> None:
        self._angles = angles = RopeAngles(spectrum, max_seq_len)
        self._tables = SharedTables(rotary_tables, (angles.usual,), max_seq_len, torch.float64)
        self._key_dim, self._key_spec = key_dim, key_spec

    def _by_tables(
        self,
        who: str,
        xs: list[Tensor],
        offset: int | Tensor,
        position_ids: Tensor | None,
        seq_len: int | Tensor | None,
        run: Callable[[Tensor, Tensor, TableRows], Result],
        *learned: Tensor,
        inverse: bool = False,
    ) -> Result:
        """``run(cos, sin, rows)`` for ``xs`` of ``(B, H, L, D)`` at these positions."""
        rows, tables = self._angles.rows(who, xs[0], offset, position_ids, seq_len, inverse)
        if tables is not None:
            return run(*tables, rows)
        return by_tables(who, self._tables, xs, rows, run, *learned)

    def scaled_inv_freq(self, seq_len: int | None = None) -> Tensor:
        """Scaled rates in a sequence of this length, float64 ``[P]``, radians per position."""
        who = f"{type(self).__name__}.scaled_inv_freq"
        length = checks.optional(checks.integer, who, "seq_len", seq_len)
        return scaled_rates(self._angles.spectrum_at(length)).clone()

    def attention_factor(self, seq_len: int | None = None) -> float:
        """The factor on cosines and sines in a sequence of this length."""
        who = f"{type(self).__name__}.attention_factor"
        length = checks.optional(checks.integer, who, "seq_len", seq_len)
        return float(self._angles.spectrum_at(length).gain())

    def rerotate(
        self,
        k: Tensor,
        from_positions: Tensor,
        to_positions: Tensor,
        *,
        from_seq_len: int | Tensor | None = None,
        to_seq_len: int | Tensor | None = None,
    ) -> Tensor:
        """Move rotated keys to other positions: one rotation by the difference of the angles.

        Use this for caches that evict tokens and close the gap, and for rules that change their
        rates once the sequence is long. The keys are rounded once more.

        Args:
            k: Rotated keys ``(B, H, L, D)``.
            from_positions: Their positions now, as ``position_ids`` of ``forward``.
            to_positions: Their new positions.
            from_seq_len: The ``seq_len`` they were rotated with.
            to_seq_len: The ``seq_len`` to rotate them with.

        Returns:
            A new tensor like ``k``.

        Examples:
            >>> import posenc
            >>> rope, k = posenc.RoPE(8), torch.randn(1, 1, 4, 8)
            >>> old, new = torch.tensor([0, 5, 6, 7]), torch.arange(4)
            >>> moved = rope.rerotate(rope.rotate(k, position_ids=old), old, new)
            >>> torch.allclose(moved, rope.rotate(k), atol=1e-6)
            True
        """
        who, angles = f"{type(self).__name__}.rerotate", self._angles
        k = self._rotated_keys(who, k)
        phi, gain = angles.at_coordinates(who, "to_positions", k, to_positions, to_seq_len)
        old, old_gain = angles.at_coordinates(
            who, "from_positions", k, from_positions, from_seq_len
        )
        return self._rotate_again(who, k, phi - old, gain / old_gain, TableRows())

    def shift(self, k: Tensor, by: int | Tensor, *, seq_len: int | Tensor | None = None) -> Tensor:
        """Add ``by`` to the positions of rotated keys.

        Args:
            k: Rotated keys ``(B, H, L, D)``.
            by: An int, which may be negative, or an integer tensor ``(B,)`` with one for each
                sequence. All axes move by it.
            seq_len: The ``seq_len`` they were rotated with, for a rule that depends on it.

        Examples:
            >>> import posenc
            >>> rope, k = posenc.RoPE(8), torch.randn(1, 1, 4, 8)
            >>> torch.allclose(rope.shift(rope.rotate(k, 7), -3), rope.rotate(k, 4), atol=1e-6)
            True
        """
        who, angles = f"{type(self).__name__}.shift", self._angles
        k = self._rotated_keys(who, k)
        if isinstance(by, Tensor):
            shift = position_checks.offsets(who, by, k, "by")
        else:
            by = checks.integer(who, "by", by, least=-checks.MAX_POSITION)
            shift = torch.full((1,), by, device=k.device)
        if seq_len is None and angles.trained is not None:
            rule = type(angles.spectrum.scaling).__name__
            hint = "Pass the seq_len that the keys were rotated with."
            checks.fail(who, f"seq_len must be given, because {rule} depends on it", None, hint)
        length = angles.rule_length(who, k, seq_len)
        phi, _ = angles.at(for_axes(shift[:, None], angles.spectrum.axes), length)
        # One row serves every token of a sequence.
        first = torch.zeros((1, k.shape[2]), dtype=torch.int64, device=k.device)
        return self._rotate_again(who, k, phi, 1.0, TableRows(0, first))

    def tables(
        self,
        position_ids: Tensor,
        *,
        seq_len: int | Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines at these positions, to compute once and use in every layer.

        Args:
            position_ids: As in ``forward``.
            seq_len: As in ``forward``.
            dtype: The dtype of the tables. Float32 is enough to rotate half precision.

        Returns:
            Tables ``(L, P)`` or ``(B, L, P)`` for :func:`posenc.functional.rotate_qk`.

        Examples:
            >>> from posenc.functional import rotate_qk
            >>> import posenc
            >>> rope, q, k = posenc.RoPE(8), torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
            >>> cos, sin = rope.tables(torch.arange(3))
            >>> rotated = rotate_qk(q, k, cos, sin)
            >>> torch.equal(rotated[0], rope(q, k)[0])
            True
        """
        who = f"{type(self).__name__}.tables"
        shape = position_checks.positions(who, "position_ids", position_ids).shape
        batch, device = shape[-2] if len(shape) > 1 else 1, position_ids.device
        like = torch.empty((batch, 1, shape[-1], 0), device=device)
        phi, gain = self._angles.at_coordinates(who, "position_ids", like, position_ids, seq_len)
        cos, sin = of_angles(phi, device, gain)
        if checks.float_dtype(who, "dtype", dtype) != torch.float64:
            cos, sin = round_once(cos, dtype), round_once(sin, dtype)
        return cos, sin

    def _rotated_keys(self, who: str, k: Tensor) -> Tensor:
        if isinstance(k, Tensor) and k.dim() == 4:
            hint = f"Pass keys as {type(self).__name__} returned them."
            checks.equal(who, "head_dim of k", k.shape[3], self._key_dim, hint)
        rotary.check_heads(who, "k", [k], self._key_dim, self.seq_dim)
        return rotary.swap_heads([k], self.seq_dim)[0]

    def _rotate_again(self, who: str, k: Tensor, phi: Tensor, gain: Any, rows: TableRows) -> Tensor:
        tables = tables_of(phi, k.device, gain)
        ys = rotary.rotate_rows(who, self._angles.limit, [k], *tables, rows, self._key_spec)
        return rotary.swap_heads(ys, self.seq_dim)[0]
