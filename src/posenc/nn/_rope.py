"""Which cosines and sines a call of `RoPE` takes: kept ones, or ones worked out for it alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from posenc._contract import checks
from posenc._contract.tracing import is_plain, is_readable, may_keep, outlive_capture
from posenc.functional.rotary import rows_of, turn_all
from posenc.kernels import Rows, Turn
from posenc.nn.rotary import RotaryTables
from posenc.numerics.axes import Axes
from posenc.numerics.frequencies import Spectrum, turn_steps
from posenc.numerics.scaling import Rule
from posenc.numerics.tables import angles, of_angles, widest

_NO_RULE = "Pass posenc.scaling.Linear(2.0), say; RoPE.from_config takes a config's dict."


# What a call that was checked before does without.
_SKIPPED = ("_as_read", "_check", "_cos_sin", "_covering", "_kept", "_tables_for", "_turn")


class Checked(NamedTuple):
    """A call that went well: what it depended on, what tables it found, and how it turned."""

    key: tuple[Any, ...]
    spectrum: Spectrum
    kinds: tuple[Any, ...]
    turn: Turn


def _kind(table: Tensor | None) -> Any:
    """What decides whom a table serves, besides what it holds."""
    return table if table is None else (type(table), table.dtype, table.device, table.shape)


def _turn_of(
    head_dim: int, width: int, last: bool, interleaved: bool, interleaved_out: bool | None
) -> Turn:
    out = interleaved if interleaved_out is None else interleaved_out
    return Turn(interleaved, out, head_dim - width if last else 0)


def _largest(at: Tensor) -> Tensor:
    """The last position of each sequence, or of all if they share theirs."""
    return at.amax(-1) if at.dim() == 2 and at.shape[0] > 1 else at.max()


def leading(q: Tensor, k: Tensor) -> Tensor:
    """The more precise of the two, with a gradient if one has it: what serves it serves both."""
    x, other = (q, k) if q.element_size() >= k.element_size() else (k, q)
    if x.requires_grad or not other.requires_grad or torch.compiler.is_compiling():
        return x
    if other.dtype is x.dtype:
        return other
    # What is no number of this kind is refused in its own words; of inference mode, it stays.
    may_have = x.is_floating_point() and not x.is_inference()
    return x.detach().requires_grad_() if may_have else x


def _of_angles(phi: Tensor, device: torch.device, gain: float | Tensor) -> tuple[Tensor, Tensor]:
    """Tables of these angles: of one sequence, they serve all."""
    cos, sin = of_angles(phi, device, gain)
    return (cos[0], sin[0]) if cos.dim() == 3 and cos.shape[0] == 1 else (cos, sin)


def _same_place(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.data_ptr() == b.data_ptr() and a.dtype is b.dtype and a.shape == b.shape


class RopeTables(RotaryTables):
    """The arguments of `RoPE`, checked, and the tables that follow from them.

    Tables are kept for sequences that fit the trained length, whose tokens have one position
    each. Lengths that a rule slows further, several coordinates, and coordinates that are not
    whole have their cosines and sines worked out at each call.
    """

    _checked: Checked | None = None

    def __init__(
        self,
        *,
        head_dim: int,
        max_seq_len: int | None,
        base: float,
        interleaved: bool,
        interleaved_out: bool | None,
        rotary_dim: int | None,
        last: bool,
        scaling: Rule | None,
        axes: Axes | None,
    ) -> None:
        who = type(self).__name__
        if max_seq_len is not None:
            max_seq_len = checks.integer(who, "max_seq_len", max_seq_len)
        super().__init__(registered=max_seq_len is not None)
        self.head_dim = checks.even(who, "head_dim", head_dim)
        self.max_seq_len = max_seq_len
        self.base = checks.positive_float(who, "base", base)
        self.interleaved = checks.boolean(who, "interleaved", interleaved)
        if interleaved_out is not None:
            checks.boolean(who, "interleaved_out", interleaved_out)
        self.interleaved_out = interleaved_out
        if rotary_dim is not None:
            rotary_dim = checks.even(who, "rotary_dim", rotary_dim)
        if rotary_dim is not None and rotary_dim > self.head_dim:
            rule = f"rotary_dim must be at most head_dim={self.head_dim}"
            way_out = "Pass None to rotate all of a head."
            raise ValueError(checks.message(who, rule, rotary_dim, way_out))
        self.rotary_dim = rotary_dim
        self.last = checks.boolean(who, "last", last)
        self.scaling = checks.instance(who, "scaling", scaling, Rule, _NO_RULE)
        self.axes = checks.instance(who, "axes", axes, Axes, "Pass axes.Axial(2), say.")
        if axes is not None:
            axes.check(who, self._width())
        self._rest()
        # What the rule cannot scale is refused now, and not at the first call; and what it makes
        # is remembered, because torch.export cannot work it out.
        turn_steps(self._resting)
        if max_seq_len is not None:
            device = torch.get_default_device()
            self._build(self._resting, max_seq_len, device, widest(device))

    def _check(self, who: str, name: str, x: Tensor) -> None:
        checks.float_tensor(who, name, x)
        # What a call costs is felt at every token of every layer.
        if x.dim() != 4 or x.shape[3] != self.head_dim:
            checks.rank(who, name, x, (4,), "(B, H, L, D)")
            way_out = "Build RoPE with that head_dim."
            checks.equal(who, f"head_dim of {name}", x.shape[3], self.head_dim, way_out)

    def _key(
        self, q: Tensor, k: Tensor, offset: Any = 0, position_ids: Any = None
    ) -> tuple[Any, ...] | None:
        """All that a call depends on but its positions, if one like it need not be checked again.

        A token that is decoded costs less than its checks, and the next is like it.
        """
        at = offset if position_ids is None else position_ids
        number = type(at) is int and position_ids is None
        if not (is_plain(q, k) if number else is_plain(q, k, at)):
            return None
        if forward_ad._current_level >= 0:
            return None
        return (
            None if number else (position_ids is None, at.shape, at.dtype, at.device),
            q.shape, k.shape, q.dtype, k.dtype, q.device, k.device,
            self.max_seq_len, self.base, self.scaling, self.axes,
            self.head_dim, self.rotary_dim, self.last, self.interleaved, self.interleaved_out,
        )  # fmt: skip

    def _again(
        self,
        key: tuple[Any, ...],
        found: Checked | None,
        q: Tensor,
        k: Tensor,
        offset: Any,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Rows, Turn] | None:
        """What a call takes that differs from the one ``found`` in its positions alone.

        Those in a tensor are held against the tables by the kernel.
        """
        if found is None or found.key != key:
            return None
        spectrum, held = self._spectrum, self._held()
        cos, sin = held["cos_cached"], held["sin_cached"]
        # The same before and after, so that no other thread was writing them meanwhile.
        if spectrum is not found.spectrum or self._spectrum is not spectrum:
            return None
        kinds = _kind(cos), _kind(sin)
        if kinds != found.kinds:
            return None
        recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
        if recorded and (cos.is_inference() or sin.is_inference()):
            # It cannot be saved for a gradient.
            return None
        grows, end = self.max_seq_len is None, None
        if type(offset) is int and position_ids is None:
            # Sizes that were read before: reading them takes longer than adding them up.
            end = offset + key[1][2]
            if offset < 0 or end > kinds[0][3][0]:
                return None
            rows = Rows(offset)
        elif grows and recorded:
            # What a checkpoint saves goes as far as the largest of them.
            return None
        elif position_ids is None:
            rows = Rows(0, offset.unsqueeze(1))
        elif type(offset) is int and offset == 0:
            rows = Rows(0, position_ids if position_ids.dim() == 2 else position_ids.unsqueeze(0))
        else:
            return None
        if grows:
            outlive_capture(cos, sin)
        if grows or q.is_cuda:
            cos, sin = self._as_read(leading(q, k), cos, sin, end)
        return cos, sin, rows, found.turn

    def _remember(
        self,
        key: tuple[Any, ...],
        q: Tensor,
        k: Tensor,
        offset: Any,
        position_ids: Tensor | None,
        taken: Any,
    ) -> None:
        """Let calls like this one go unchecked, if they then take the same tables and rows."""
        if any(getattr(type(self), name) is not getattr(RopeTables, name) for name in _SKIPPED):
            return
        if 0 in (*key[1], *key[2]):
            # A kernel that has nothing to do looks at no positions.
            return
        # From the key alone: another thread may have changed the arguments meanwhile.
        limit, base, rule, axes, head_dim, rotary_dim, *layout = key[-9:]
        if rule is not None:
            if rule.trained_length() is not None:
                return
            rule = rule.at(None)
        width, spectrum = head_dim if rotary_dim is None else rotary_dim, self._spectrum
        tables = self._covering(leading(q, k), Spectrum(width, base, rule, axes), limit or 0)
        # Past the limit the kernel would find what a longer table has there.
        if spectrum is None or tables is None or limit not in (None, tables[0].shape[0]):
            return
        kinds = tuple(map(_kind, tables))
        found = Checked(key, spectrum, kinds, _turn_of(head_dim, width, *layout))
        short = self._again(key, found, q, k, offset, position_ids)
        if short is None or short[2].start != taken[2].start:
            return
        places = zip(
            (*short[:2], short[2].positions), (*taken[:2], taken[2].positions), strict=True
        )
        if all(_same_place(a, b) for a, b in places):
            self._checked = found

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_checked": None}

    def _turn(self) -> Turn:
        layout = self.last, self.interleaved, self.interleaved_out
        return _turn_of(self.head_dim, self._width(), *layout)

    def _width(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def _count(self) -> int | None:
        return None if self.axes is None else self.axes.count()

    def _spread(self, at: Tensor) -> Tensor:
        """Positions as coordinates that are all the same, where there are several."""
        return at if self.axes is None else at.expand(self.axes.count(), *at.shape)

    def _at(self, seq_len: int | Tensor | None) -> Spectrum:
        """What is turned by in a sequence of this length; lengths in a tensor are left open."""
        rule = self.scaling
        if rule is not None and not isinstance(seq_len, Tensor):
            rule = rule.at(seq_len)
        return Spectrum(self._width(), self.base, rule, self.axes)

    def _rest(self) -> None:
        """Work out what the kept tables are made of, again if an argument was changed since."""
        self._resting, self._made_of = self._at(None), (self.scaling, self.axes)

    def _length(self, who: str, x: Tensor | None, seq_len: Any) -> Any:
        """The length to take the rule at; None where that makes no difference to a short one."""
        if seq_len is None:
            return None
        trained = None if self.scaling is None else self.scaling.trained_length()
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
                if low == high or (trained is not None and high <= trained):
                    seq_len = high
        else:
            seq_len = checks.integer(who, "seq_len", seq_len, least=0)
        if trained is None:
            return None
        if isinstance(seq_len, Tensor):
            return seq_len if x is None else seq_len.to(x.device)
        if x is not None and not may_keep(x):
            # One graph for every length: the comparison is made inside it.
            return torch.full((), seq_len, dtype=torch.int64, device=x.device)
        return None if seq_len <= trained else seq_len

    def _asks(self) -> bool:
        """Whether the rule depends on how long a sequence is."""
        return self.scaling is not None and self.scaling.trained_length() is not None

    def _last(self, x: Tensor, rows: Rows) -> Any:
        """One past the last position of each sequence, if the rule asks for it."""
        if not self._asks():
            return None
        end = rows.start + (x.shape[2] if rows.advances() else 1)
        if rows.positions is None or rows.positions.numel() == 0:
            return end
        return _largest(rows.positions) + end

    def _tables_for(
        self,
        who: str,
        x: Tensor,
        offset: int | Tensor,
        position_ids: Tensor | None,
        seq_len: Any,
        *,
        inverse: bool = False,
    ) -> tuple[Tensor, Tensor, Rows]:
        """Cosines, sines, and the rows of them that the tokens of ``x`` take."""
        if isinstance(position_ids, Tensor) and (
            position_ids.is_floating_point() or (self.axes is not None and position_ids.dim() > 1)
        ):
            checks.exclusive_offset(who, offset)
            phi, gain = self._own_angles(who, x, position_ids, seq_len)
            return *_of_angles(phi, x.device, 1 / gain if inverse else gain), Rows()
        if position_ids is None and self.axes is not None and not self.axes.of_text():
            rule = f"position_ids must be given, because {self.axes} has several coordinates"
            raise ValueError(checks.message(who, rule, None, "Pass positions.grid(H, W), say."))
        limit, need = self.max_seq_len, None
        rows = rows_of(who, x, offset, position_ids, "max_seq_len", limit)
        if rows.positions is None:
            need = rows.start + x.shape[2]
            checks.sequence(who, rows.start, x.shape[2], "max_seq_len", limit)
        elif limit is None:
            need = checks.extent(who, rows.positions)
            if need and rows.advances():
                checks.sequence(who, need - 1, x.shape[2])
                need += x.shape[2] - 1
        length = None
        if self.scaling is not None or seq_len is not None:
            length = self._length(who, x, self._last(x, rows) if seq_len is None else seq_len)
        rest, (scaling, axes) = self._resting, self._made_of
        if (
            rest.base != self.base
            or rest.dim != self._width()
            or scaling is not self.scaling
            or axes is not self.axes
        ):
            self._rest()
        if length is None and (not inverse or self._resting.gain() == 1.0):
            return self._cos_sin(who, x, self._resting, rows, need)
        at = rows.numbers(x.shape[2], x.device)
        checks.extent(who, at, "max_seq_len", limit)
        phi, gain = self._angles_and_gain(self._spread(at), length)
        return *_of_angles(phi, x.device, 1 / gain if inverse else gain), Rows()

    def _own_angles(
        self, who: str, x: Tensor, position_ids: Tensor, seq_len: Any
    ) -> tuple[Tensor, float | Tensor]:
        """Angles and gain of tokens that have coordinates of their own."""
        at = self._coordinates(who, "position_ids", x, position_ids)
        return self._angles_and_gain(at, self._length(who, x, self._span(at, seq_len)))

    def _coordinates(self, who: str, name: str, x: Tensor, at: Tensor) -> Tensor:
        return checks.coordinates(
            who, name, at, x.shape, x.device, self._count(), "max_seq_len", self.max_seq_len
        )

    def _span(self, at: Tensor, seq_len: Any) -> Any:
        """The length that positions speak of, for each sequence, unless another is given."""
        if seq_len is not None or at.numel() == 0 or not self._asks():
            return seq_len
        most = _largest(at if self.axes is None else at.amax(0))
        return most.floor().to(torch.int64).clamp(min=-1) + 1

    def _angles_and_gain(self, at: Tensor, length: Any) -> tuple[Tensor, float | Tensor]:
        spectrum = self._at(length)
        length = length if isinstance(length, Tensor) else None
        if widest(at.device) != torch.float64:
            at, length = at.cpu(), None if length is None else length.cpu()
        return angles(at, spectrum, length), spectrum.gain(length)

    def _turned_by(
        self, who: str, k: Tensor, phi: Tensor, gain: float | Tensor, rows: Rows
    ) -> Tensor:
        cos, sin = _of_angles(phi, k.device, gain)
        turn = self._turn()
        # Keys that were rotated before are in the layout of the output.
        turn = Turn(turn.interleaved_out, turn.interleaved_out, turn.column)
        return turn_all(who, "max_seq_len", [k], cos, sin, rows, turn)[0]
