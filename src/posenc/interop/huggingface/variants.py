"""Find out what a rotating function of a model does, by calling it.

One name stands for several functions (``rotate_half`` pairs neighbours in Cohere, halves in Llama),
so each is called on small random tensors, and its results are compared with those of every
`Variant`. For a function that agrees with none, `patch` fails.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posenc.interop.huggingface import diffusion, rotation, special
from posenc.interop.huggingface.probing import FAILURES, WIDEN, Known, same
from posenc.kernels import Spec
from posenc.kernels.spec import TOKENS_FIRST, TWINS

# Parameter names in model code: the tensors to rotate, complex tables, and others.
_ROTATED = set("q k v x t xq xk x_in query key tensor hidden_states".split())
_COMPLEX = {"freqs_cis", "freqs_ci"}
_AXIS, _POSITIONS = "unsqueeze_dim", "position_ids"

# Take one number per pair from a row with one per channel.
_PAIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "doubled": lambda table: table[..., : table.shape[-1] // 2],
    "repeated": lambda table: table[..., ::2],
    "single": lambda table: table,
}


@dataclass(frozen=True, slots=True)
class Variant:
    """What a rotating function does."""

    tables: str  # how a row of cos holds its numbers: a key of WIDEN
    layout: str  # half, interleaved, or interleaved to half
    # Where the tables get an axis for the heads: an index; unsqueeze_dim, an argument; tokens, if
    # tables are flattened to one row for each token; None, if they come with the axis.
    axis: int | str | None
    # all; patches only, if the last tokens have rows and the others are not rotated; last rows for
    # queries, if there are fewer queries than rows.
    tokens: str = "all"
    last: bool = False  # the last channels are rotated, rather than the first
    backwards: bool = False  # the angle is negated
    bare: bool = False  # queries without keys are returned as a tensor, not as (q, None)
    picks: bool = False  # position_ids pick the rows, rather than being ignored

    def __str__(self) -> str:
        words = [self.tables] + [self.tokens] * (self.tokens != "all")
        words += ["last channels"] * self.last + ["backwards"] * self.backwards
        words += ["rows by position"] * self.picks
        return ", ".join(words)


def _function(
    names: tuple[str, ...], variant: Variant, default_axis: int, still: bool = False
) -> Callable[..., Any]:
    """A function with these parameter names that rotates as ``variant`` says, by our op.

    If ``still``, it returns what it is given.
    """
    rotating = [name for name in names if name in _ROTATED]
    flags = {
        "interleaved": variant.layout != "half",
        "interleaved_out": variant.layout == "interleaved",
        "last": variant.last,
        "backwards": variant.backwards,
    }
    freqs = next((name for name in names if name in _COMPLEX), None)
    pick = _PAIRS[variant.tables if freqs is None else "single"]
    layout = -1 if still else _layout(names, variant, default_axis)

    def rotated(*args: Any, **kwargs: Any) -> Any:
        if layout >= 0 and len(args) == 4 and not kwargs:
            result = rotation.rotate_at_once(*args, layout)
            if result is not None:
                return result
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        xs = [given[name] for name in rotating if given.get(name) is not None]
        if still:
            return packed(xs)
        if freqs is not None:
            cos, sin = given[freqs].real, given[freqs].imag
        else:
            cos, sin = pick(given["cos"]), pick(given["sin"])
        if variant.picks:
            cos, sin = cos[given[_POSITIONS]], sin[given[_POSITIONS]]
        axis = given.get(_AXIS, default_axis) if variant.axis == _AXIS else variant.axis
        if axis == "tokens":
            cos, sin = (t.reshape(-1, 1, t.shape[-1]) for t in (cos, sin))
        elif axis is not None:
            cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
        if variant.tokens == "all":
            ys = rotation.rotate_all(xs, cos, sin, **flags)
        else:
            ys = [_rotate_some(variant.tokens, x, cos, sin, flags) for x in xs]
        return packed(ys)

    def packed(ys: list[Any]) -> Any:
        if len(ys) == 1 and (variant.bare or len(rotating) == 1):
            return ys[0]
        return tuple(ys) if len(ys) == len(rotating) else (ys[0], None)

    return rotated


def _layout(names: tuple[str, ...], variant: Variant, default_axis: int) -> int:
    """The layout for native code of a call with q, k, cos and sin; -1 if there is more to do."""
    q, k, *tables = names[:4]
    axis = default_axis if variant.axis == _AXIS else variant.axis
    simple = {q, k} <= _ROTATED and tables == ["cos", "sin"] and variant.tokens == "all"
    if not simple or variant.picks or variant.last or axis not in (1, 2):
        return -1
    # Of one number for each channel, native code takes the first of each pair.
    if variant.tables != ("repeated" if variant.layout != "half" else "doubled"):
        return -1
    spec = Spec(variant.layout != "half", variant.layout == "interleaved", 0, variant.backwards)
    return spec.bits() + TWINS + (TOKENS_FIRST if axis == 2 else 0)


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


@functools.cache
def recognise(original: Callable[..., Any], *, still: bool = False) -> Known | None:
    """Our function that gives what ``original`` gives, or None.

    If ``still``, a function that takes and returns the same, but does not rotate.
    """
    with torch.device("cpu"), torch.no_grad(), warnings.catch_warnings():
        # Functions may warn of arguments that do not suit them.
        warnings.simplefilter("ignore")
        return _search(original, still)


def _search(original: Callable[..., Any], still: bool) -> Known | None:
    # A function that the kernels package wrapped is a module, and its forward has the signature.
    parameters = inspect.signature(getattr(original, "forward", original)).parameters
    names = tuple(parameters)
    for probes in (special.PROBES, diffusion.PROBES):
        if names in probes:
            known, tries = probes[names]
            agrees = all(same(known.function(*given), original(*given)) for given in tries)
            return known if agrees and not still else None
    default = parameters[_AXIS].default if _AXIS in names else 1
    found = _matching(original, names, default, still)
    rotating = tuple(name for name in names if name in _ROTATED)
    for form in diffusion.forms(names[len(rotating) :]) if found is None and not still else ():
        plain = _matching(form.plain(original), (*rotating, "cos", "sin"), 1)
        if plain is not None:
            return form.known(plain, names, len(rotating))
    return found


def _matching(
    original: Callable[..., Any], names: tuple[str, ...], default: int, still: bool = False
) -> Known | None:
    """Our function for one with these parameter names, found by trying every variant."""
    tables = _COMPLEX & set(names) or {"cos", "sin"}
    if not tables <= set(names) <= tables | _ROTATED | {_AXIS, _POSITIONS, "kwargs"}:
        return None
    results: dict[str, list[tuple[dict[str, Any], Any]]] = {}
    for variant in _variants(tables <= _COMPLEX, names):
        form = variant.tables
        if form not in results:
            tried = [(given, _try(original, given)) for given in _probes(form, names)]
            results[form] = [(given, result) for given, result in tried if result is not None]
        ours = _function(names, variant, default)
        agree = (same(_try(ours, given), result) for given, result in results[form])
        if results[form] and all(agree):
            made = _function(names, variant, default, still=True) if still else ours
            return Known(str(variant), variant.layout, made)
    return None


def _variants(is_complex: bool, names: tuple[str, ...]) -> Iterator[Variant]:
    """Every variant, the likeliest first."""
    forms = ("complex",) if is_complex else tuple(_PAIRS)
    axes: tuple[int | str | None, ...] = (_AXIS,) if _AXIS in names else (None, 1, -2, "tokens")
    layouts = ("half", "interleaved", "interleaved to half")
    tokens, no = ("all", "patches only", "last rows for queries"), (False, True)
    picks = no if _POSITIONS in names else (False,)
    for pick, bare, backwards, last, which in itertools.product(picks, no, no, no, tokens):
        for form, layout, axis in itertools.product(forms, layouts, axes):
            yield Variant(form, layout, axis, which, last, backwards, bare, pick)


# Shapes of queries and of tables without their channels, for 3 heads and 5 tokens; and
# unsqueeze_dim. Tables with more axes than queries have heads that the queries' channels hold.
_SHAPES = (
    ((2, 3, 5), (2, 5), 1),
    ((2, 3, 5), (5,), 1),
    ((2, 5, 3), (2, 5), 2),
    ((5, 3), (5,), -2),
    ((1, 5, 3), (5,), None),
    ((2, 5, 3), (5, 1), None),
    ((2, 3, 5), (5,), None),
    ((2, 3, 5), (2, 1, 5), None),
    ((2, 5), (2, 5), None),
    ((2, 5), (2, 3, 5), None),
)


def _probes(form: str, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Arguments to call a function with; it may raise on some of them."""
    made = torch.Generator().manual_seed(0)
    for (shape, rows, axis), width in itertools.product(_SHAPES, (8, 12)):
        if _AXIS in names and axis is None:
            continue
        phi = torch.rand(*rows, 4, generator=made, dtype=torch.float32) * 6
        given: dict[str, Any] = {"cos": WIDEN[form](phi.cos()), "sin": WIDEN[form](phi.sin())}
        if form == "complex":
            given = dict.fromkeys(_COMPLEX & set(names), torch.complex(phi.cos(), phi.sin()))
        if _AXIS in names:
            given[_AXIS] = axis
        size = (*shape, 3 * width if len(rows) > len(shape) else width)
        rotating = [name for name in names if name in _ROTATED]
        xs = {name: torch.randn(size, generator=made, dtype=torch.float32) for name in rotating}
        given |= xs
        yield given
        yield {**given, **{name: torch.cat((x, x), dim=-2) for name, x in xs.items()}}
        if len(xs) == 2:
            first, second = xs
            yield {**given, first: xs[first][..., -2:, :]}
            yield {**given, second: None}
        if _POSITIONS in names:
            ids = torch.arange(rows[-1]).flip(0)
            yield {**given, _POSITIONS: ids}
            yield {**given, _POSITIONS: ids[None]}


def _try(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The result of a function, or None if it raises or returns other shapes than it got."""
    try:
        result = function(**given)
    except FAILURES:
        return None
    ys = [result] if isinstance(result, Tensor) else result
    xs = [x for name, x in given.items() if name in _ROTATED]
    fits = all(y is None or y.shape == x.shape for x, y in zip(xs, ys, strict=False))
    return result if fits else None
