"""What `RoPE` and `PoPE` share: tables of angles, and keys that are moved to other positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc import configs
from posenc._contract import checks
from posenc.functional import rotary
from posenc.kernels import Rows, Spec
from posenc.nn._rope import RopeAngles, rotary_tables, tables_of
from posenc.nn._tables import SharedTables, TableModule, shown_table
from posenc.numerics.axes import Axes
from posenc.numerics.frequencies import Spectrum, scaled_rates
from posenc.numerics.scaling import Rule


def check_axes(who: str, axes: Any) -> Axes | None:
    """``axes`` if they are Axes, or None."""
    way_out = "Pass axes.Axial(2) for equal widths, axes.Axial((16, 56, 56)) for others."
    found: Axes | None = checks.check_instance(who, "axes", axes, Axes, way_out)
    return found


def check_scaling(who: str, scaling: Any, base: float) -> Any:
    """A rule of `posenc.scaling`, also from a published dict or name, or None."""
    rule = configs.read_scaling(who, scaling, base)
    way_out = "Pass posenc.scaling.Linear(2.0), say, or the rope_scaling of a config."
    return checks.check_instance(who, "scaling", rule, Rule, way_out)


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

    def inv_freq(self, seq_len: int | None = None) -> Tensor:
        """Scaled rates in a sequence of this length, float64 ``[P]``, radians per position."""
        length = checks.optional(
            checks.integer, f"{type(self).__name__}.inv_freq", "seq_len", seq_len
        )
        return scaled_rates(self._angles.spectrum_at(length)).clone()

    def attention_factor(self, seq_len: int | None = None) -> float:
        """The factor on cosines and sines in a sequence of this length."""
        length = checks.optional(
            checks.integer, f"{type(self).__name__}.attention_factor", "seq_len", seq_len
        )
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
        who = f"{type(self).__name__}.rerotate"
        k, lengths = self._rotated_keys(who, k), (to_seq_len, from_seq_len)
        phi, gain = self._angles.moved(who, k, to_positions, from_positions, *lengths)
        return self._rotate_again(who, k, phi, gain, Rows())

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
        who = f"{type(self).__name__}.shift"
        k = self._rotated_keys(who, k)
        phi = self._angles.shifted(who, k, by, seq_len)
        # One row serves every token of a sequence.
        first = torch.zeros((1, k.shape[2]), dtype=torch.int64, device=k.device)
        return self._rotate_again(who, k, phi, 1.0, Rows(0, first))

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
        return self._angles.tables(f"{type(self).__name__}.tables", position_ids, seq_len, dtype)

    def _rotated_keys(self, who: str, k: Tensor) -> Tensor:
        if isinstance(k, Tensor) and k.dim() == 4:
            way_out = f"Pass keys as {type(self).__name__} returned them."
            checks.equal(who, "head_dim of k", k.shape[3], self._key_dim, way_out)
        rotary.check_heads(who, "k", [k], self._key_dim, self.seq_dim)
        return rotary.swap_heads([k], self.seq_dim)[0]

    def _rotate_again(self, who: str, k: Tensor, phi: Tensor, gain: Any, rows: Rows) -> Tensor:
        tables = tables_of(phi, k.device, gain)
        ys = rotary.rotate_rows(who, self._angles.limit, [k], *tables, rows, self._key_spec)
        return rotary.swap_heads(ys, self.seq_dim)[0]
