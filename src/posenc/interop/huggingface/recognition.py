"""Recognise what a rotating function of a model does, by calling it.

One name stands for several functions (``rotate_half`` pairs neighbours in Cohere, halves in Llama),
so each is called on small random tensors, and its results are compared with those of every
`Variant`, or of a function for a single model. For a function that agrees with none, `patch` fails.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from posenc.interop.huggingface import rotation
from posenc.interop.huggingface.rotation import ONE_ARGUMENT, PAIRS, TWO_ARGUMENTS, WIDEN, Form
from posenc.ops import Spec
from posenc.ops.rotation.spec import DOUBLED_TABLES, TOKENS_FIRST

# Parameter names in model code: the tensors to rotate, tables in one argument, and others.
_ROTATED = set("q k v x t xq xk x_in query key tensor hidden_states".split())
_ONE_TABLE = {"freqs", "freqs_ci", "freqs_cis", "rope", "rotary_emb"}
_AXIS, _POSITIONS = "unsqueeze_dim", "position_ids"
# Names of functions that rotate, and exceptions that compute positions, rates or tables.
_ROTATES = re.compile(r"rotary|rotate|rope")
_EXCEPTIONS = re.compile(
    r"rope_(parameters|deltas|index|params|freqs)|rotary_freqs|_init|propert|^rope$"
    r"|^_?(get|build|create|pad|prepare|slice|store|pre)_|_mrope$"
)

# Exceptions of a model's functions that are called with unsuitable arguments.
FAILURES = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)


class NotUnderstood(Exception):
    """A function rotates in a way that none of ours does."""


class Match(NamedTuple):
    """Our function for one of a model, whose variant and layout are empty if it does not rotate."""

    variant: str
    layout: str
    function: Callable[..., Any]
    # With the same parameters and results, but without a rotation.
    identity: Callable[..., Any] | None = None


def rotates(name: str) -> bool:
    """Whether a function's name says that it rotates."""
    return bool(_ROTATES.search(name)) and not _EXCEPTIONS.search(name)


def same(got: Any, expected: Any, error: float = 1e-5) -> bool:
    """Whether two results have the same shapes and differ by at most ``error``.

    A result in half precision, whatever its arguments are, may differ by its rounding too.
    """
    if isinstance(expected, Tensor):
        alike = isinstance(got, Tensor) and got.shape == expected.shape
        halved = expected.dtype in (torch.bfloat16, torch.float16)
        rounding = torch.finfo(expected.dtype).eps / 2 if halved else 0.0
        return alike and torch.allclose(expected.to(got.dtype), got, rtol=rounding, atol=error)
    if expected is None or isinstance(got, Tensor) or got is None:
        return got is expected
    pairs = zip(got, expected, strict=False)
    return len(got) == len(expected) and all(same(a, b, error) for a, b in pairs)


Trait = Literal["", "patches only", "last channels", "backwards"]


@dataclass(frozen=True, slots=True)
class Variant:
    """What a rotating function does."""

    tables: str  # how a row of cos holds its numbers: a key of WIDEN
    layout: str  # half, interleaved, or interleaved to half
    # Where the tables get an axis for the heads: an index; unsqueeze_dim, an argument; tokens, if
    # tables are flattened to one row for each token; None, if they come with the axis.
    axis: int | str | None
    # What it does besides: the last tokens have rows, and the others are not rotated; the last
    # channels are rotated, rather than the first; or the angle is negated.
    trait: Trait = ""
    bare: bool = False  # queries without keys are returned as a tensor, not as (q, None)

    def describe(self, form: str) -> str:
        """The variant in words, of a function that gets tables in ``form``."""
        tables = "" if form and self.tables == "single" else self.tables
        return ", ".join(filter(None, (form, tables, self.trait)))


def _function(
    names: tuple[str, ...], variant: Variant, default_axis: int, identity: bool = False
) -> Callable[..., Any]:
    """A function with these parameter names that rotates as ``variant`` says, by our op.

    If ``identity``, it returns its queries and keys as they are.
    """
    rotating = [name for name in names if name in _ROTATED]
    pick = PAIRS[variant.tables]
    layout = -1 if identity else _native_layout(names, variant, default_axis)
    how = {"last": variant.trait == "last channels", "backwards": variant.trait == "backwards"}

    def rotated(*args: Any, **kwargs: Any) -> Any:
        if layout >= 0 and len(args) == 4 and not kwargs:
            result = rotation.try_native_rotation(*args, layout)
            if result is not None:
                return result
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        xs = [given[name] for name in rotating if given.get(name) is not None]
        if identity:
            return packed(xs)
        cos, sin = pick(given["cos"]), pick(given["sin"])
        axis: Any = given.get(_AXIS, default_axis) if variant.axis == _AXIS else variant.axis
        if axis == "tokens":
            cos, sin = (t.reshape(-1, 1, t.shape[-1]) for t in (cos, sin))
        elif axis is not None:
            cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
        if variant.trait != "patches only":
            return packed(rotation.rotate_all(xs, cos, sin, variant.layout, **how))
        rows = cos.shape[-2]
        ends = [x[..., x.shape[-2] - rows :, :] for x in xs]
        ends = [rotation.rotate_all([x], cos, sin, variant.layout, **how)[0] for x in ends]
        starts = (x[..., : x.shape[-2] - rows, :] for x in xs)
        return packed([torch.cat(parts, dim=-2) for parts in zip(starts, ends, strict=True)])

    def packed(ys: list[Any]) -> Any:
        if len(ys) == 1 and (variant.bare or len(rotating) == 1):
            return ys[0]
        return tuple(ys) if len(ys) == len(rotating) else (ys[0], None)

    return rotated


def _native_layout(names: tuple[str, ...], variant: Variant, default_axis: int) -> int:
    """The layout for native code of a call with q, k, cos and sin; -1 if there is more to do."""
    q, k, *tables = names[:4]
    axis = default_axis if variant.axis == _AXIS else variant.axis
    simple = {q, k} <= _ROTATED and tables == ["cos", "sin"]
    if not simple or variant.trait not in ("", "backwards") or axis not in (1, 2):
        return -1
    # Of one number for each channel, native code takes the first of each pair.
    interleaved, backwards = variant.layout != "half", variant.trait == "backwards"
    if variant.tables != ("repeated" if interleaved else "doubled"):
        return -1
    spec = Spec(interleaved, variant.layout == "interleaved", 0, backwards)
    return spec.bits() + DOUBLED_TABLES + (TOKENS_FIRST if axis == 2 else 0)


@functools.cache
def recognise(original: Callable[..., Any]) -> Match | None:
    """Our function that gives what ``original`` gives, or None."""
    with torch.device("cpu"), torch.no_grad(), warnings.catch_warnings():
        # Functions may warn of arguments that do not suit them.
        warnings.simplefilter("ignore")
        # A function that the kernels package wrapped is a module, whose forward has the signature.
        parameters = inspect.signature(getattr(original, "forward", original)).parameters
        names = tuple(parameters)
        if names in _special():
            match, tries = _special()[names]
            agrees = all(same(match.function(*given), original(*given)) for given in tries)
            return match if agrees else None
        tensors = tuple(name for name in names if name in _ROTATED)
        if {"cos", "sin"} <= set(names) <= _ROTATED | {"cos", "sin", _AXIS, _POSITIONS, "kwargs"}:
            return _matching(original, names, parameters)
        forms: tuple[Form, ...] = ()
        if names[len(tensors) :] == ("freqs_cos", "freqs_sin"):
            forms = (TWO_ARGUMENTS,)
        elif len(names) == len(tensors) + 1 and names[-1] in _ONE_TABLE:
            forms = ONE_ARGUMENT
        matches = (_in_form(original, names, len(tensors), form) for form in forms)
        return next((match for match in matches if match is not None), None)


def _in_form(
    original: Callable[..., Any], names: tuple[str, ...], count: int, form: Form
) -> Match | None:
    """Our function for one that takes ``count`` tensors, and then tables in ``form``."""

    def plain(cos: Tensor, sin: Tensor, **tensors: Any) -> Any:
        return original(*tensors.values(), *form.pack(cos, sin))

    def unpacking(function: Callable[..., Any]) -> Callable[..., Any]:
        def rotated(*args: Any, **kwargs: Any) -> Any:
            given = (*args, *(kwargs[name] for name in names[len(args) :]))
            return function(*given[:count], *form.unpack(*given[count:]))

        return rotated

    match = _matching(plain, (*names[:count], "cos", "sin"), {}, form.name)
    if match is None or match.identity is None:
        return None
    functions = unpacking(match.function), unpacking(match.identity)
    return Match(match.variant, match.layout, *functions)


def _matching(
    original: Callable[..., Any], names: tuple[str, ...], parameters: Any, form: str = ""
) -> Match | None:
    """Our function for one with these parameter names, found by trying every variant."""
    default = parameters[_AXIS].default if _AXIS in names else 1
    results: dict[str, list[tuple[dict[str, Any], Any]]] = {}
    for variant in _variants(names):
        tables = variant.tables
        if tables not in results:
            tried = [(given, _result(original, given)) for given in _probes(tables, names)]
            results[tables] = [(given, result) for given, result in tried if result is not None]
        ours = _function(names, variant, default)
        agree = (same(_result(ours, given), result) for given, result in results[tables])
        if results[tables] and all(agree):
            identity = _function(names, variant, default, identity=True)
            return Match(variant.describe(form), variant.layout, ours, identity)
    return None


def _variants(names: tuple[str, ...]) -> Iterator[Variant]:
    """Every variant, the likeliest first."""
    axes: tuple[int | str | None, ...] = (_AXIS,) if _AXIS in names else (None, 1, -2, "tokens")
    layouts = "half", "interleaved", "interleaved to half"
    for bare, trait in itertools.product((False, True), get_args(Trait)):
        for tables, layout, axis in itertools.product(WIDEN, layouts, axes):
            yield Variant(tables, layout, axis, trait, bare)


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


def _probes(tables: str, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Arguments to call a function with; it may raise on some of them."""
    generator = torch.Generator().manual_seed(0)
    for (shape, rows, axis), width in itertools.product(_SHAPES, (8, 12)):
        if _AXIS in names and axis is None:
            continue
        phi = torch.rand(*rows, 4, generator=generator, dtype=torch.float32) * 6
        given: dict[str, Any] = {"cos": WIDEN[tables](phi.cos()), "sin": WIDEN[tables](phi.sin())}
        if _AXIS in names:
            given[_AXIS] = axis
        size = (*shape, 3 * width if len(rows) > len(shape) else width)
        tensors = [name for name in names if name in _ROTATED]
        xs = {name: torch.randn(size, generator=generator, dtype=torch.float32) for name in tensors}
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


def _result(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The result of a function, or None if it raises or returns other shapes than it got."""
    try:
        result = function(**given)
    except FAILURES:
        return None
    ys = [result] if isinstance(result, Tensor) else result
    xs = [x for name, x in given.items() if name in _ROTATED]
    fits = all(y is None or y.shape == x.shape for x, y in zip(xs, ys, strict=False))
    return result if fits else None


def _neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotation.rotate_all([x], cos, sin, "interleaved")[0]


def sine_first(
    sinusoidal_pos: Tensor,
    query_layer: Tensor,
    key_layer: Tensor,
    value_layer: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """RoFormer: one table, sines and then cosines; values are rotated as well if given."""
    sin, cos = sinusoidal_pos.chunk(2, dim=-1)
    xs = (query_layer, key_layer, value_layer)
    return tuple(_neighbours(x, cos, sin) for x in xs if x is not None)


def before_the_heads(
    self: Any, hidden_states: Tensor, relative_position_embeddings: Tensor
) -> Tensor:
    """Speech conformers: hidden states are rotated before the projections."""
    length, pairs = hidden_states.shape[1], self.head_size // 2
    cos, sin = relative_position_embeddings[:, :length, 0, :, :pairs].unbind(0)
    states = hidden_states.unflatten(-1, (self.num_heads, self.head_size))
    return rotation.rotate_all([states], cos, sin)[0].flatten(-2)


def memories(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_k_exclude_rope: int = 0,
    repeat_freqs_k: bool = False,
) -> tuple[Tensor, Tensor]:
    """SAM 2: the last keys are not rotated, and the others may be several frames of one grid."""
    cos, sin, count = cos[..., ::2], sin[..., ::2], k.shape[-2] - num_k_exclude_rope
    frames = count // q.shape[-2] if repeat_freqs_k else 1
    y = _neighbours(q, cos, sin)
    if count == 0:
        return y, k
    grids = k[..., :count, :].unflatten(-2, (frames, -1))
    rotated = _neighbours(grids, cos.unsqueeze(-3), sin.unsqueeze(-3)).flatten(-3, -2)
    return y, torch.cat((rotated, k[..., count:, :]), dim=-2)


def by_flags(
    x: Tensor,
    freqs_cis: Any,
    use_real: bool = True,
    use_real_unbind_dim: int = -1,
    sequence_dim: int = 2,
) -> Tensor:
    """Rotate as ``diffusers.models.embeddings.apply_rotary_emb`` does, by its flags.

    The tables are complex, or repeated for neighbours, or doubled for halves. Qwen-Image's function
    does not have the last flag.
    """
    if not use_real:
        freqs = freqs_cis.unsqueeze(-2)
        return _neighbours(x, freqs.real, freqs.imag)
    tables, layout = {-1: ("repeated", "interleaved"), -2: ("doubled", "half")}[use_real_unbind_dim]
    axis = {1: 1, 2: 0}[sequence_dim]
    cos, sin = (PAIRS[tables](table).unsqueeze(axis).to(x.device) for table in freqs_cis)
    return rotation.rotate_all([x], cos, sin, layout)[0]


def by_angles(t: Tensor, freqs: Tensor) -> Tensor:
    """Stable Audio 3: the last rows of a table of angles, for ``(B, L, H, D)``."""
    phi = PAIRS["doubled"](freqs[-t.shape[-3] :]).float().unsqueeze(1)
    return rotation.rotate_all([t], phi.cos(), phi.sin())[0]


@functools.cache
def _special() -> dict[tuple[str, ...], tuple[Match, list[tuple[Any, ...]]]]:
    """Functions of single models, by the names of their parameters.

    Each of ours has the parameters of the one that it replaces, and comes with arguments on which
    the two are compared.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    def tables(form: str, *shape: int) -> tuple[Tensor, Tensor]:
        phi = WIDEN[form](random(*shape))
        return phi.cos(), phi.sin()

    special = {}

    def add(variant: str, layout: str, function: Any, *tries: tuple[Any, ...]) -> None:
        names = tuple(inspect.signature(function).parameters)
        special[names] = Match(variant, layout, function), list(tries)

    q, k, more = random(2, 3, 5, 8), random(2, 1, 5, 8), random(2, 1, 12, 8)
    line = torch.cat(tables("single", 1, 1, 5, 4), dim=-1)
    add("sine first", "interleaved", sine_first, (line, q, k), (line, q, k, q))
    layer, both = SimpleNamespace(num_heads=3, head_size=8), tables("doubled", 7, 1, 1, 4)
    states = (layer, random(2, 5, 24), torch.stack(both))
    add("before the heads", "half", before_the_heads, states)
    grid = tables("repeated", 1, 1, 5, 4)
    frames = (q, k, *grid), (q, more[..., :7, :], *grid, 2), (q, more, *grid, 2, True)
    add("memories", "interleaved", memories, *frames, (q, k, *grid, 5))
    turned, doubled, repeated = q.transpose(1, 2), tables("doubled", 5, 4), tables("repeated", 5, 4)
    said, phi = ("real or complex", "as the call says"), random(2, 5, 4)
    real: list[tuple[Any, ...]] = [(q, repeated), (q, doubled, True, -2)]
    complex_ = torch.polar(torch.ones_like(phi), phi)
    other_axis = (turned, repeated, True, -1, 1), (turned, doubled, True, -2, 1)
    add(*said, by_flags, *real, *other_axis, (turned, complex_, False))
    fewer = tuple(inspect.signature(by_flags).parameters)[:-1]
    special[fewer] = Match(*said, by_flags), [*real, (turned, complex_[0], False)]
    last = WIDEN["doubled"](phi[1])
    add("angles, doubled", "half", by_angles, (turned, last), (turned[:, 2:], last))
    return special
