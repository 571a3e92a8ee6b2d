"""A loaded transformers model made to run on our rotation, and made itself again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NoReturn

from torch import nn

from posenc._contract import checks
from posenc.interop.huggingface import tables, variants
from posenc.interop.huggingface.rewrite import NotUnderstood, Rewriter, rotates
from posenc.numerics.configs import LAYOUT

_RECORD = "_posenc_patch"
_REPLICATE = "_replicate_for_data_parallel"
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Place:
    """One rotating function that one module no longer calls.

    Attributes:
        module: Path of the module in the model, as in ``named_modules``.
        cls: Its class.
        function: The function that made way for ours.
        variant: How the model's tables hold their numbers.
        layout: ``half``, ``interleaved``, or ``interleaved to half``.
    """

    module: str
    cls: str
    function: str
    variant: str
    layout: str

    def __str__(self) -> str:
        return f"{self.module} ({self.cls}): {self.function} [{self.variant}; {self.layout}]"


@dataclass(frozen=True, slots=True)
class Table:
    """One rotary module whose cosines and sines are now exact.

    Attributes:
        module: Path of the module in the model.
        cls: Its class.
        form: How a row holds its numbers.
        rates: ``from the config``, worked out in float64; or ``its own``, as the module holds them.
    """

    module: str
    cls: str
    form: str
    rates: str

    def __str__(self) -> str:
        return f"{self.module} ({self.cls}): tables [{self.form}; rates {self.rates}]"


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was replaced.

    Attributes:
        places: One for each module and function that rotates.
        tables: One for each rotary module that gives exact tables; others keep their own.
    """

    places: tuple[Place, ...]
    tables: tuple[Table, ...] = ()

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.places, *self.tables)))


def patch(model: nn.Module) -> Report:
    """Make ``model`` run on our rotation and tables, until :func:`unpatch`.

    Each function that rotates is tried on small random tensors, and replaced where one of ours
    agrees with it. The modules that call it get a ``forward`` of their own, whose code is the
    model's and whose rotation is ours: other models of the class stay as they are, and the
    weights, the state dict and the classes are untouched. All or nothing: if any function is not
    understood, the model is left as it was. Patch first, then compile.

    Args:
        model: A transformers model, or any part of one.

    Returns:
        What was replaced, and where.

    Raises:
        ValueError: If the model is patched already, if nothing in it rotates, or if one of its
            functions rotates in a way that is not understood; the message names it.

    Examples:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
        >>> model = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=9))
        >>> print(patch(model))
        layers.0.self_attn (LlamaAttention): apply_rotary_pos_emb [doubled; half]
        rotary_emb (LlamaRotaryEmbedding): tables [doubled; rates from the config]
        >>> unpatch(model)
    """
    if not isinstance(model, nn.Module):
        rule = "model must be a torch.nn.Module"
        raise TypeError(checks.message("patch", rule, type(model).__name__, "Pass the model."))
    for path, module in model.named_modules():
        if _RECORD in vars(module):
            got = f"a patched {type(module).__name__} at '{path}'"
            way_out = "Call unpatch(model) first."
            raise ValueError(checks.message("patch", "model must not be patched", got, way_out))
    classes: dict[type, list[Replacement]] = {}
    slots: list[tuple[nn.Module, _Slot]] = []
    places: list[Place] = []
    exact: list[Table] = []
    for path, module in model.named_modules():
        kind = type(module)
        if kind not in classes:
            classes[kind] = replacements(kind, path)
        for method in classes[kind]:
            slots.append((module, _slot(module, path, method)))
            places += [Place(path, kind.__name__, *gone) for gone in method.gone]
        if tables.differ_in_halves(module):
            _refuse(kind, path, "a table that turns the two channels of a pair differently")
        ours = tables.forward_for(module) if _makes_tables(module) else None
        if ours is not None:
            exact.append(Table(path, kind.__name__, *ours[:2]))
            slots.append((module, _slot(module, path, Replacement("forward", ours[2], True, ()))))
    if not places:
        got = f"{type(model).__name__}, which calls no function that rotates"
        way_out = "Nothing was changed. Models without rotary positions need no patch."
        raise ValueError(checks.message("patch", "model must rotate", got, way_out))
    _refuse_converted(model, places)
    for module, slot in slots:
        vars(module).setdefault(_RECORD, _Record()).slots.append(slot)
        vars(module)[slot.name] = slot.ours
        vars(module)[_REPLICATE] = MethodType(_replica, module)
    return Report(tuple(places), tuple(exact))


def _refuse_converted(model: nn.Module, places: list[Place]) -> None:
    """Weights that `posenc convert` moved are not what the model's own code rotates."""
    for place in places:
        own = getattr(model.get_submodule(place.module), "config", getattr(model, "config", None))
        said, code = getattr(own, LAYOUT, None), place.layout.split()[0]
        if said not in (None, code):
            rule = f"the weights must be in the layout of the model's code, {code}"
            way_out = f"Convert them: posenc convert MODEL -o NEW --to {code}"
            raise ValueError(checks.message("patch", rule, f"{said} ({LAYOUT})", way_out))


def unpatch(model: nn.Module) -> None:
    """Give ``model`` back its own rotation: outputs are again what they were, bit for bit.

    Args:
        model: What :func:`patch` was called on, a part of it, or a copy of either.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    patched_ones = [module for module in modules if _RECORD in vars(module)]
    if not patched_ones:
        got, way_out = type(model).__name__, "Pass what patch was called on."
        raise ValueError(checks.message("unpatch", "model must be patched", got, way_out))
    for module in patched_ones:
        for slot in vars(module)[_RECORD].slots:
            if vars(module).get(slot.name) != slot.ours:
                rule = f"{type(module).__name__} must still have the {slot.name} that patch gave it"
                got, way_out = repr(vars(module).get(slot.name))[:80], "Remove what wraps it first."
                raise ValueError(checks.message("unpatch", rule, got, way_out))
    for module in patched_ones:
        for slot in vars(module).pop(_RECORD).slots:
            if slot.theirs is _ABSENT:
                del vars(module)[slot.name]
            else:
                vars(module)[slot.name] = slot.theirs
        del vars(module)[_REPLICATE]


@contextmanager
def patched(model: nn.Module) -> Iterator[Report]:
    """Patch ``model`` for a ``with`` block.

    Yields:
        The report of :func:`patch`.
    """
    report = patch(model)
    try:
        yield report
    finally:
        unpatch(model)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A name on a module, and what it means there with the patch and without."""

    name: str
    ours: Any
    theirs: Any


class _Record:
    """What a patched module remembers."""

    def __init__(self, slots: Iterable[_Slot] = ()) -> None:
        self.slots = list(slots)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Record:
        memo[id(_ABSENT)] = _ABSENT
        return _Record(deepcopy(self.slots, memo))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        rule = "a patched model cannot be pickled: its functions have no name to be found by"
        raise TypeError(f"patch: {rule}.\n  Call unpatch first, or use save_pretrained.")


def _replica(module: nn.Module) -> nn.Module:
    """A copy for another device, as DataParallel makes it, that does not call the original."""
    made: nn.Module = type(module)._replicate_for_data_parallel(module)
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(made)[name] = MethodType(value.__func__, made)
    return made


@dataclass(frozen=True, slots=True)
class Replacement:
    """A method to bind to instances, and the functions that it no longer calls."""

    name: str
    function: Callable[..., Any]
    bound: bool
    gone: tuple[tuple[str, str, str], ...]


def replacements(kind: type, path: str = "") -> list[Replacement]:
    """What the instances of a class need to rotate by our op."""
    found: dict[str, Replacement] = {}
    seen: dict[str, Any] = {}
    for owner in kind.__mro__:
        library = owner.__module__.split(".")[0] in ("builtins", "torch", "accelerate", "peft")
        inside = owner.__module__.startswith("transformers.")
        if library or (inside and ".models." not in owner.__module__):
            continue
        for name, value in vars(owner).items():
            static = isinstance(value, staticmethod)
            function = value.__func__ if static else value
            if name.startswith("__") or not isinstance(function, FunctionType):
                continue
            method = _method(name, function, not static, kind, path)
            if name in seen:
                # A method behind another is reached by super(), which no instance overrides.
                if method is not None and "super" in seen[name].__code__.co_names:
                    _refuse(kind, path, f"{owner.__name__}.{name}, called by super()")
                continue
            seen[name] = function
            if method is not None:
                found[name] = method
    return list(found.values())


def _method(
    name: str, function: FunctionType, bound: bool, kind: type, path: str
) -> Replacement | None:
    if rotates(name):
        known = variants.recognise(function)
        if known is not None:
            return Replacement(name, known.function, bound, ((name, known.variant, known.layout),))
    rewriter = Rewriter(_ours)
    try:
        made, replaced = rewriter.rewrite(function)
    except NotUnderstood as error:
        _refuse(kind, path, str(error))
    if replaced:
        gone = tuple(dict.fromkeys(_described(*one) for one in replaced))
        return Replacement(name, made, bound, gone)
    if rotates(name):
        _refuse(kind, path, f"the method {name}")
    return None


def _ours(original: Callable[..., Any]) -> Callable[..., Any] | None:
    known = variants.recognise(original)
    return None if known is None else known.function


def _described(name: str, original: Callable[..., Any]) -> tuple[str, str, str]:
    known = variants.recognise(original)
    assert known is not None
    return name, known.variant, known.layout


def _refuse(kind: type, path: str, what: str) -> NoReturn:
    rule = "every function that rotates must be one that is understood"
    got = f"{what} in {kind.__module__}.{kind.__name__} at '{path}'"
    raise ValueError(checks.message("patch", rule, got, "The model is left as it was."))


def _makes_tables(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _slot(module: nn.Module, path: str, method: Replacement) -> _Slot:
    """Where on the instance a method goes, and the method bound."""
    name = method.name
    # accelerate wraps forward in its hooks and calls what it keeps under this name.
    if name == "forward" and "_old_forward" in vars(module):
        name = "_old_forward"
    elif name in vars(module):
        rule = f"'{path}' must have the {name} of its class"
        got = repr(vars(module)[name])[:80]
        raise ValueError(checks.message("patch", rule, got, "Patch before wrapping methods."))
    ours = MethodType(method.function, module) if method.bound else method.function
    return _Slot(name, ours, vars(module).get(name, _ABSENT))
