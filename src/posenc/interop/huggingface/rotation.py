"""The rotation for tables and tensors of the forms that models have, with the norm before it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc import ops
from posenc._contract import checks
from posenc._contract.position_checks import UNLIMITED
from posenc.functional.rotary import halved, rotate_rows
from posenc.ops import Norm, Spec, TableRows
from posenc.ops.rotation.rotation import norm_rotate_qk_op, rotate_qk_op
from posenc.ops.rotation.spec import TOKENS_FIRST

_WHO = "the patched model"

# How a row holds the numbers of its pairs: of 0 1, doubled is 0 1 0 1, repeated 0 0 1 1.
WIDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "doubled": lambda pairs: torch.cat((pairs, pairs), dim=-1),
    "repeated": lambda pairs: pairs.repeat_interleave(2, dim=-1),
    "single": lambda pairs: pairs,
}
# The numbers of the pairs in such a row.
PAIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "doubled": lambda row: row[..., : row.shape[-1] // 2],
    "repeated": lambda row: row[..., ::2],
    "single": lambda row: row,
}


class Form(NamedTuple):
    """How the arguments of a rotating function hold cosines and sines."""

    name: str
    pack: Callable[[Tensor, Tensor], tuple[Any, ...]]
    unpack: Callable[..., tuple[Tensor, Tensor]]


def _matrices(cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    rows = torch.stack((cos, -sin), dim=-1), torch.stack((sin, cos), dim=-1)
    return (torch.stack(rows, dim=-2),)


TWO_ARGUMENTS = Form("", lambda cos, sin: (cos, sin), lambda cos, sin: (cos, sin))
ONE_ARGUMENT = (
    Form("", lambda cos, sin: ((cos, sin),), lambda tables: (tables[0], tables[1])),
    Form(
        "complex",
        lambda cos, sin: (torch.complex(cos, sin),),
        lambda tables: (tables.real, tables.imag),
    ),
    Form("matrices", _matrices, lambda tables: (tables[..., 0, 0], tables[..., 1, 0])),
    Form(
        "joined",
        lambda cos, sin: (torch.cat((cos, sin), dim=-1),),
        lambda tables: tables.chunk(2, dim=-1),
    ),
)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys: a drop-in for the function of this name in transformers' models.

    Use it in your own model code; for a transformers model, call :func:`patch`.

    Args:
        q: ``(B, H, L, D)``, or ``(B, L, H, D)``.
        k: As ``q``; the head count may differ.
        cos: ``(B, L, D)`` or ``(1, L, D)``, one number per channel, as their rotary modules
            return it, or ``(L, D)``. A narrower table rotates only the first channels.
        sin: As ``cos``.
        unsqueeze_dim: Where the heads are: 1, or 2 for ``(B, L, H, D)``.

    Returns:
        New tensors like ``q`` and ``k``.

    Examples:
        >>> import torch
        >>> q = k = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
        >>> cos, sin = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
        >>> apply_rotary_pos_emb(q, k, cos, sin)[0].flatten()
        tensor([0., 1.])
    """
    who = "apply_rotary_pos_emb"
    if unsqueeze_dim not in (1, 2):
        rule, hint = "unsqueeze_dim must be 1 or 2", "Pass 2 for tensors of (B, L, H, D)."
        checks.fail(who, rule, unsqueeze_dim, hint)
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        checks.float_tensor(who, name, x)
    if q.shape[-1:] == cos.shape[-1:]:
        layout = 0 if unsqueeze_dim == 1 else TOKENS_FIRST
        rotated = rotate_qk_op.try_native(q, k, cos, sin, None, 0, layout)
        if rotated is not None:
            return rotated  # type: ignore[no-any-return]
    for name, x in (("q", q), ("k", k)):
        checks.rank(who, name, x, (4,), "(B, H, L, D), or (B, L, H, D) with unsqueeze_dim=2")
        batch, length, width = x.shape[0], x.shape[3 - unsqueeze_dim], cos.shape[-1]
        leads = (length,), (1, length), (batch, length)
        if (
            cos.shape[:-1] not in leads
            or sin.shape != cos.shape
            or width % 2
            or width > x.shape[-1]
        ):
            size = f"{length} tokens and an even number of at most {x.shape[-1]} channels"
            rule = f"cos and sin must be alike, with rows for {size} of {name}"
            got = f"{tuple(cos.shape)} and {tuple(sin.shape)} for {name} of {tuple(x.shape)}"
            hint = "Pass (L, D), (1, L, D) or (B, L, D), and unsqueeze_dim=2 for (B, L, H, D)."
            checks.fail(who, rule, got, hint)
    c, s = (x[None] if x.dim() == 2 else x for x in (cos, sin))
    c = halved(who, "cos", c, False).unsqueeze(unsqueeze_dim)
    s = halved(who, "sin", s, False).unsqueeze(unsqueeze_dim)
    a, b = rotate_all([q, k], c, s)
    return a, b


def try_native_rotation(
    q: Any, k: Any, cos: Any, sin: Any, layout: int
) -> tuple[Tensor, Tensor] | None:
    """Rotate queries and keys by native code, together with their norms; None if it cannot."""
    rotated: tuple[Tensor, Tensor] | None
    if type(q) is Pending:
        if type(k) is not Pending or not (q.is_waiting() and k.is_waiting()):
            return None
        norm, of_k = q.call, k.call
        if norm.eps != of_k.eps or norm.shift != of_k.shift:
            return None
        weights = norm.weight, of_k.weight
        how = None, 0, layout, norm.eps, norm.shift
        rotated = norm_rotate_qk_op.try_native(q.x, k.x, *weights, cos, sin, *how)
    elif type(k) is Pending:
        return None
    else:
        rotated = rotate_qk_op.try_native(q, k, cos, sin, None, 0, layout)
    return rotated


def rotate_all(
    xs: list[Any],
    cos: Tensor,
    sin: Tensor,
    layout: str = "half",
    *,
    last: bool = False,
    backwards: bool = False,
) -> list[Tensor]:
    """Rotate ``xs [..., D]`` by tables ``[..., P]``; ValueError if they do not broadcast.

    Those of ``xs`` that are `Pending` are normalised as well, in the same kernel.
    ``last`` rotates the last ``2P`` channels instead of the first, ``backwards`` by ``-angle``.
    """
    if cos.dim() == 4 and cos.shape[-3] != 1 and xs[0].dim() == 3:
        # LTX-2 rotates before it splits the heads, by tables of (B, H, L, P).
        split = [x.unflatten(-1, (cos.shape[-3], -1)).transpose(-2, -3) for x in xs]
        ys = rotate_all(split, cos, sin, layout, last=last, backwards=backwards)
        return [y.transpose(-2, -3).flatten(-2) for y in ys]
    # The op takes heads before tokens, with any strides.
    swapped = cos.dim() > 2 and cos.shape[-2] == 1 and cos.shape[-3] != 1
    if swapped:
        cos, sin = cos.transpose(-2, -3), sin.transpose(-2, -3)
        xs = [x.transpose(-2, -3) for x in xs]
    first_channel = xs[0].shape[-1] - 2 * cos.shape[-1] if last else 0
    spec = Spec(layout != "half", layout == "interleaved", first_channel, backwards)
    # The op takes one tensor, or queries and keys.
    if len(xs) <= 2 and all(_alike(x, xs[0], cos) for x in xs[1:]):
        ys = _rotate(xs, cos, sin, spec)
    else:
        ys = [y for x in xs for y in _rotate([x], cos, sin, spec)]
    return [y.transpose(-2, -3) for y in ys] if swapped else ys


def _has_heads(cos: Tensor) -> bool:
    """Whether each head has a table of its own."""
    return cos.dim() > 2 and cos.shape[-3] != 1


def _alike(x: Tensor, y: Tensor, cos: Tensor) -> bool:
    """Whether one call may rotate both: their shapes agree, head counts aside."""
    heads = not _has_heads(cos) or x.shape == y.shape
    return heads and x.shape[:-3] == y.shape[:-3] and x.shape[-2:] == y.shape[-2:]


def _rotate(xs: list[Any], cos: Tensor, sin: Tensor, spec: Spec) -> list[Tensor]:
    """Rotate tensors of like shapes in one call of the op, which takes ``[B, H, T, D]``."""
    cos_rows, sin_rows = _rows(xs[0], cos), _rows(xs[0], sin)
    fours = xs
    if _has_heads(cos):
        # Each head becomes a sequence, because sequences may have their own tables.
        fours = [x.reshape(math.prod(x.shape[:-2]), 1, *x.shape[-2:]) for x in xs]
    elif xs[0].dim() > 4:
        fours = [x.flatten(0, -4) for x in xs]
    elif xs[0].dim() < 4:
        fours = [x.reshape((1,) * (4 - x.dim()) + x.shape) for x in xs]
    if any(isinstance(x, Pending) for x in fours):
        ys = [_rotate_one(x, cos_rows, sin_rows, spec) for x in fours]
    else:
        ys = rotate_rows(_WHO, UNLIMITED, fours, cos_rows, sin_rows, TableRows(), spec)
    pairs = zip(xs, ys, strict=True)
    return [y if y.shape == x.shape else y.reshape(x.shape) for x, y in pairs]


def _rotate_one(x: Tensor | Pending, cos: Tensor, sin: Tensor, spec: Spec) -> Tensor:
    if isinstance(x, Pending):
        return x.rotate(cos, sin, spec)
    return rotate_rows(_WHO, UNLIMITED, [x], cos, sin, TableRows(), spec)[0]


def _rows(x: Tensor, table: Tensor) -> Tensor:
    """``table`` as the op takes it: ``[T, P]``, or ``[B, T, P]`` with rows for each sequence."""
    batch = table.shape[:-2]
    lead: tuple[int, ...] = x.shape[:-2]
    if all(size == 1 for size in batch):
        table, lead = table[(0,) * len(batch)], ()
    elif batch[-1] == 1:
        table, lead = table.squeeze(-3), x.shape[:-3]
    try:
        table = table.expand(*lead, x.shape[-2], table.shape[-1])
    except RuntimeError:
        rule = f"cos and sin must broadcast against queries and keys of shape {tuple(x.shape)}"
        checks.fail(_WHO, rule, tuple(batch), "Call unpatch, and report the model.")
    return table.flatten(0, -3) if lead else table


class NormCall:
    """One call of a norm: its arguments, and its result once that is computed."""

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        x: Tensor,
        weight: Tensor,
        eps: float,
        shift: float,
    ) -> None:
        self.forward, self.x, self.weight, self.eps, self.shift = forward, x, weight, eps, shift
        self.result: Tensor | None = None
        # A trial sets this, to be told whether one kernel takes the norm and the rotation.
        self.decided: Callable[[bool], None] | None = None


class Pending:
    """The result of a norm, in a view of it, that is computed when it is needed.

    ``transpose``, ``view``, ``reshape`` and ``unflatten`` give another view, and our rotation
    normalises and rotates in one kernel. Every other operation takes the result of the norm's own
    forward. This is no tensor, so code that knows nothing of it fails, rather than read what is not
    normalised.
    """

    def __init__(
        self, call: NormCall, x: Tensor, heads: int | None = None, views: tuple[Any, ...] = ()
    ) -> None:
        self.call, self.x, self._views = call, x, views
        # The axis of the heads, counted from the end, if the norm is over all of them.
        self._heads = heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*computed(args), **computed(kwargs or {}))

    @property
    def shape(self) -> torch.Size:
        """Shape of the view."""
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the result."""
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        """Device of the result."""
        return self.x.device

    def dim(self) -> int:
        """Axes of the view."""
        return self.x.dim()

    def transpose(self, a: int, b: int) -> Any:
        """Swap two axes."""
        a, b = (axis if axis < 0 else axis - self.dim() for axis in (a, b))
        moved: dict[int | None, int] = {a: b, b: a}
        heads = moved.get(self._heads, self._heads)
        return self._view("transpose", (a, b), heads, keeps_rows=-1 not in (a, b))

    def view(self, *shape: Any) -> Any:
        """Give it another shape."""
        return self._reshape("view", shape)

    def reshape(self, *shape: Any) -> Any:
        """Give it another shape."""
        return self._reshape("reshape", shape)

    def unflatten(self, dim: int, sizes: Any) -> Any:
        """Split an axis."""
        return self._reshape("unflatten", (dim, sizes))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself, if it has that dtype and device."""
        x = self.x.to(*args, **kwargs)
        same = x.dtype == self.dtype and x.device == self.device
        return self if same else self.tensor().to(*args, **kwargs)

    def _reshape(self, name: str, args: tuple[Any, ...]) -> Any:
        width, before = self.call.weight.shape[0], self.x
        after = _viewed(before, name, args) if self._heads is None else before
        if after.shape[-1] == width:
            return self._view(name, args, None, keeps_rows=self._heads is None)
        splits = after.dim() > 1 and after.shape[-2] * after.shape[-1] == width
        return self._view(name, args, -2, keeps_rows=self._heads is None and splits)

    def _view(self, name: str, args: tuple[Any, ...], heads: int | None, keeps_rows: bool) -> Any:
        if not keeps_rows:
            return getattr(self.tensor(), name)(*args)
        x = _viewed(self.x, name, args)
        return Pending(self.call, x, heads, (*self._views, (name, args)))

    def tensor(self) -> Tensor:
        """The result, computed by the norm's own forward if it was not yet."""
        call = self.call
        if call.result is None:
            call.result = call.forward(call.x)
            if call.decided is not None:
                call.decided(False)
        viewed = call.result
        for name, args in self._views:
            viewed = getattr(viewed, name)(*args)
        return viewed

    def is_waiting(self) -> bool:
        """Whether one kernel may compute the norm and the rotation."""
        return self.call.result is None and self._heads in (None, -3)

    def rotate(self, cos: Tensor, sin: Tensor, spec: Spec) -> Tensor:
        """The result rotated; ``[B, H, T, D]`` in this view."""
        if not self.is_waiting():
            return ops.rotate([self.tensor()], cos, sin, TableRows(), spec)[0]
        call = self.call
        if call.decided is not None:
            call.decided(True)
        norm = Norm(call.eps, call.shift)
        return ops.norm_rotate(self.x, call.weight, cos, sin, TableRows(), spec, norm)


def _viewed(x: Tensor, name: str, args: tuple[Any, ...]) -> Tensor:
    # The input may have no such view where the result has one.
    viewed: Tensor = getattr(x, "reshape" if name == "view" else name)(*args)
    return viewed


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: Pending, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*computed(args))

    return operator


# Python looks operators up in the class, where __getattr__ is not asked.
for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    for _side in ("", "r"):
        setattr(Pending, f"__{_side}{_name}__", _operator(f"__{_side}{_name}__"))
for _name in ("__neg__", "__getitem__", "__setitem__", "__len__"):
    setattr(Pending, _name, _operator(_name))


def computed(value: Any) -> Any:
    """``value`` with tensors for what is pending in it, also inside lists and dictionaries."""
    if isinstance(value, Pending):
        return value.tensor()
    if isinstance(value, dict):
        return {key: computed(one) for key, one in value.items()}
    return type(value)(map(computed, value)) if type(value) in (list, tuple) else value


# A new function object for each patch would be compiled again.
@functools.cache
def taking_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, called with tensors for what is pending in its arguments."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*computed(args), **computed(kwargs))

    return called
