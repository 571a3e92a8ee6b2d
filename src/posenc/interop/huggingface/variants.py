"""What a rotating function of a model means, found by trying it.

One name means several things (``rotate_half`` takes adjacent pairs in Cohere, halves in Llama), so
a function is known by what it does: it is called on small random tensors, and the `Variant` whose
result agrees to rounding is its meaning. What agrees with none is not understood, and not replaced.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posenc.interop.huggingface import rotation, special
from posenc.interop.huggingface.probing import FAILURES, WIDEN, Known, same

# What model code calls the tensors that it rotates, and the tables that it rotates them by.
_ROTATED = {"q", "k", "x", "xq", "xk", "query", "key", "tensor", "hidden_states"}
_COMPLEX = {"freqs_cis", "freqs_ci"}
_IGNORED = {"position_ids", "kwargs"}
_AXIS = "unsqueeze_dim"

# How pairs of channels share the entries of a table row that was made for all channels.
_PAIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "doubled": lambda table: table[..., : table.shape[-1] // 2],
    "repeated": lambda table: table[..., ::2],
    "single": lambda table: table,
}


@dataclass(frozen=True, slots=True)
class Variant:
    """The meaning of a rotating function.

    Attributes:
        tables: How a row of cos holds its ``P`` numbers: ``doubled`` (0 1 … 0 1 …), ``repeated``
            (0 0 1 1 …), ``single`` or ``complex``.
        layout: ``half``, ``interleaved``, or ``interleaved to half``.
        axis: Where the tables get an axis for the heads: an index, ``unsqueeze_dim`` if the caller
            says, ``tokens`` if any table is read as one row for each token before the heads, or
            None if they come with one.
        tokens: ``all``; ``patches only`` if tokens before the table's are left alone; ``last rows
            for queries`` if fewer queries than rows take the last ones.
        last: Whether the last channels are rotated, rather than the first.
        backwards: Whether the angle is negated.
        bare: Whether queries alone, with None for keys, come back without the None.
    """

    tables: str
    layout: str
    axis: int | str | None
    tokens: str = "all"
    last: bool = False
    backwards: bool = False
    bare: bool = False

    def __str__(self) -> str:
        said = [self.tables] + [self.tokens] * (self.tokens != "all")
        said += ["last channels"] * self.last + ["backwards"] * self.backwards
        return ", ".join(said)


def _function(names: tuple[str, ...], variant: Variant, default_axis: int) -> Callable[..., Any]:
    """A function of the given parameter names that rotates as ``variant`` says, by our op."""
    rotating = [name for name in names if name in _ROTATED]
    flags = {
        "interleaved": variant.layout != "half",
        "interleaved_out": variant.layout == "interleaved",
        "last": variant.last,
        "backwards": variant.backwards,
    }
    freqs = next((name for name in names if name in _COMPLEX), None)
    pick = _PAIRS[variant.tables if freqs is None else "single"]
    fixed, tokens, bare = variant.axis, variant.tokens, variant.bare

    def rotated(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if freqs is not None:
            cos, sin = given[freqs].real, given[freqs].imag
        else:
            cos, sin = pick(given["cos"]), pick(given["sin"])
        axis = given.get(_AXIS, default_axis) if fixed == _AXIS else fixed
        if axis == "tokens":
            cos, sin = (t.reshape(-1, 1, t.shape[-1]) for t in (cos, sin))
        elif axis is not None:
            cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
        xs = [given[name] for name in rotating if given.get(name) is not None]
        if tokens == "all":
            ys = rotation.rotate_all(xs, cos, sin, **flags)
        else:
            ys = [_rotate_some(tokens, x, cos, sin, flags) for x in xs]
        if len(ys) == 1 and (bare or len(rotating) == 1):
            return ys[0]
        return tuple(ys) if len(ys) == len(rotating) else (ys[0], None)

    return rotated


def _rotate_some(
    tokens: str, x: Tensor, cos: Tensor, sin: Tensor, flags: dict[str, bool]
) -> Tensor:
    """Rotate the last tokens, one for each row; or all tokens by the last rows."""
    length = x.shape[-2]
    before = length - cos.shape[-2] if tokens == "patches only" else 0
    if tokens == "last rows for queries":
        cos, sin = cos[..., -length:, :], sin[..., -length:, :]
    (y,) = rotation.rotate_all([x[..., before:, :]], cos, sin, **flags)
    return torch.cat((x[..., :before, :], y), dim=-2) if before else y


_known: MutableMapping[Any, Known | None] = WeakKeyDictionary()


def recognise(original: Callable[..., Any]) -> Known | None:
    """Variant, layout and our function for ``original``, or None if nothing of ours agrees."""
    if original not in _known:
        with torch.device("cpu"), torch.no_grad():
            _known[original] = _search(original)
    return _known[original]


def _search(original: Callable[..., Any]) -> Known | None:
    # A function that the kernels package wrapped is a module, and says this of its forward alone.
    parameters = inspect.signature(getattr(original, "forward", original)).parameters
    names = tuple(parameters)
    if names in special.PROBES:
        known, tries = special.PROBES[names]
        agrees = all(same(known.function(*given), original(*given)) for given in tries)
        return known if agrees else None
    tables = _COMPLEX & set(names) or {"cos", "sin"}
    asks = _AXIS in names
    if not tables <= set(names) <= tables | _ROTATED | _IGNORED | {_AXIS}:
        return None
    default = parameters[_AXIS].default if asks else 1
    answers: dict[str, list[tuple[dict[str, Any], Any]]] = {}
    for variant in _variants(tables <= _COMPLEX, asks):
        form = variant.tables
        if form not in answers:
            asked = [(given, _try(original, given)) for given in _probes(form, names)]
            answers[form] = [(given, answer) for given, answer in asked if answer is not None]
        ours = _function(names, variant, default)
        agree = (same(_try(ours, given), answer) for given, answer in answers[form])
        if answers[form] and all(agree):
            return Known(str(variant), variant.layout, ours)
    return None


def _variants(is_complex: bool, asks: bool) -> Iterator[Variant]:
    """Every variant, the likeliest first."""
    forms = ("complex",) if is_complex else tuple(_PAIRS)
    axes: tuple[int | str | None, ...] = (_AXIS,) if asks else (None, 1, -2, "tokens")
    layouts = ("half", "interleaved", "interleaved to half")
    tokens, no = ("all", "patches only", "last rows for queries"), (False, True)
    for bare, backwards, last, which in itertools.product(no, no, no, tokens):
        for form, layout, axis in itertools.product(forms, layouts, axes):
            yield Variant(form, layout, axis, which, last, backwards, bare)


# Shapes of what is rotated and of its tables, but for the channels: heads 3, tokens 5.
_SHAPES = (
    ((2, 3, 5), (2, 5), 1),
    ((2, 5, 3), (2, 5), 2),
    ((5, 3), (5,), -2),
    ((1, 5, 3), (5,), None),
    ((2, 5, 3), (5, 1), None),
    ((2, 3, 5), (5,), None),
    ((2, 3, 5), (2, 1, 5), None),
    ((2, 5), (2, 5), None),
)


def _probes(form: str, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Arguments to try a function on; those that it does not take, it refuses."""
    made = torch.Generator().manual_seed(0)
    for (shape, rows, axis), width in itertools.product(_SHAPES, (8, 12)):
        if _AXIS in names and axis is None:
            continue
        phi = torch.rand(*rows, 4, generator=made, dtype=torch.float32) * 6
        given: dict[str, Any] = {"cos": WIDEN[form](phi.cos()), "sin": WIDEN[form](phi.sin())}
        if form == "complex":
            given = {
                name: torch.complex(phi.cos(), phi.sin()) for name in names if name in _COMPLEX
            }
        if _AXIS in names:
            given[_AXIS] = axis
        for name in names:
            if name in _ROTATED:
                given[name] = torch.randn(*shape, width, generator=made, dtype=torch.float32)
        xs = {name: x for name, x in given.items() if name in _ROTATED}
        yield given
        yield {**given, **{name: torch.cat((x, x), dim=-2) for name, x in xs.items()}}
        if len(xs) == 2:
            first, second = xs
            yield {**given, first: xs[first][..., -2:, :]}
            yield {**given, second: None}
        if "position_ids" in names:
            # Ours does not read them: a function that picks rows by them is not understood.
            ids = torch.arange(rows[-1]).flip(0)
            yield {**given, "position_ids": ids}
            yield {**given, "position_ids": ids[None]}


def _try(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """What a function answers, or None where it raises or gives other shapes than it got."""
    try:
        answer = function(**given)
    except FAILURES:
        return None
    got = [answer] if isinstance(answer, Tensor) else answer
    asked = [x for name, x in given.items() if name in _ROTATED]
    fits = all(y is None or y.shape == x.shape for x, y in zip(asked, got, strict=False))
    return answer if fits else None
