"""A loaded transformers model made to run on our rotation, and made itself again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from posenc._contract import checks
from posenc.configs import LAYOUT
from posenc.interop.huggingface import tables
from posenc.interop.huggingface.methods import (
    RECORD,
    Replacement,
    of_tables,
    refuse,
    replacements,
)
from posenc.interop.huggingface.report import Place, Report, Table

_REPLICATE = "_replicate_for_data_parallel"
_REDUCE = "__reduce_ex__"


def patch(model: nn.Module) -> Report:
    """Make ``model`` run on our rotation and tables, until :func:`unpatch`.

    Each function that rotates is tried on small random tensors, and replaced where one of ours
    agrees with it. The modules that call it get a ``forward`` of their own, whose code is the
    model's and whose rotation is ours: other models of the class stay as they are, and the
    weights, the state dict and the classes are untouched. Rotary modules take their rates from the
    config, whatever became of their buffers; a warning names those whose rates it does not say. All
    or nothing: if any function is not understood, the model is left as it was. Patch first, then
    compile.

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
        if RECORD in vars(module):
            got = f"a patched {type(module).__name__} at '{path}'"
            way_out = "Call unpatch(model) first."
            raise ValueError(checks.message("patch", "model must not be patched", got, way_out))
    classes: dict[type, list[Replacement]] = {}
    placed: list[tuple[nn.Module, dict[str, Replacement]]] = []
    places: list[Place] = []
    rotary: list[Table] = []
    edited: list[Table] = []
    for path, module in model.named_modules():
        kind = type(module)
        if kind not in classes:
            classes[kind] = replacements(kind, path)
        methods = list(classes[kind])
        places += [Place(path, kind.__name__, *gone) for one in methods for gone in one.gone]
        if _makes_tables(module):
            if tables.differ_in_halves(module):
                refuse(kind, path, "a table that turns the two channels of a pair differently")
            ours = tables.understood(module)
            said = ("unchanged", "its own") if ours is None else (ours.form, ours.rates)
            rotary.append(Table(path, kind.__name__, *said))
            if ours is not None:
                methods.append(of_tables(kind, ours))
                if tables.holds_other_rates(module, ours):
                    edited.append(rotary[-1])
        if methods:
            placed.append((module, {_place(module, path, one): one for one in methods}))
    if not places:
        got = f"{type(model).__name__}, which calls no function that rotates"
        way_out = "Nothing was changed. Models without rotary positions need no patch."
        raise ValueError(checks.message("patch", "model must rotate", got, way_out))
    _refuse_converted(model, places)
    _warn_of_rates([table for table in rotary if table.rates != "from the config"], edited)
    for module, methods_at in placed:
        _put(module, methods_at)
    return Report(tuple(places), tuple(rotary))


def _warn_of_rates(own: list[Table], edited: list[Table]) -> None:
    if own:
        rule = "the config should say the rates of every rotary module"
        way_out = "Keep inv_freq in float32: these modules turn by what that buffer holds."
        _warn(rule, "none for", own, way_out)
    if edited:
        rule = "inv_freq should hold the rates of the config"
        way_out = "Write them into the config: the rates of the config are used."
        _warn(rule, "others in", edited, way_out)


def _warn(rule: str, got: str, modules: list[Table], way_out: str) -> None:
    named = ", ".join(f"{table.module} ({table.cls})" for table in modules)
    text = checks.message("patch", rule, f"{got} {named}", way_out)
    warnings.warn(text, UserWarning, stacklevel=4)


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

    Hooks and wrappers that were put around methods since the patch stay.

    Args:
        model: What :func:`patch` was called on, a part of it, or a copy of either.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    patched_ones = [module for module in modules if RECORD in vars(module)]
    if not patched_ones:
        got, way_out = type(model).__name__, "Pass what patch was called on."
        raise ValueError(checks.message("unpatch", "model must be patched", got, way_out))
    for module in patched_ones:
        for name, ours in _held(module).items():
            if name == ours.name:
                del vars(module)[name]
            else:
                vars(module)[name] = MethodType(getattr(ours.kind, ours.name), module)
        for name in (RECORD, _REPLICATE, _REDUCE):
            del vars(module)[name]


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


def _makes_tables(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _place(module: nn.Module, path: str, method: Replacement) -> str:
    """The attribute of the instance that a method is to be."""
    name = method.name
    # accelerate wraps forward in its hooks and calls what it keeps under this name.
    if name == "forward" and "_old_forward" in vars(module):
        name = "_old_forward"
    held = vars(module).get(name)
    if held is not None and getattr(held, "__func__", held) is not getattr(
        method.kind, method.name
    ):
        rule = f"'{path}' must have the {method.name} of its class"
        raise ValueError(
            checks.message("patch", rule, repr(held)[:80], "Patch before wrapping methods.")
        )
    return name


def _put(module: nn.Module, methods: dict[str, Replacement]) -> None:
    own = vars(module)
    own[RECORD] = tuple(methods.values())
    for name, ours in methods.items():
        own[name] = MethodType(ours.function, module) if ours.bound else ours.function
    own[_REPLICATE] = MethodType(_replica, module)
    # pickle and copy ask the instance, and the methods on it are made again where it is loaded.
    own[_REDUCE] = MethodType(_reduced, module)


def _held(module: nn.Module) -> dict[str, Replacement]:
    """Which attributes of a patched module are ours, whatever was wrapped or hooked since."""
    ours = {one.function: one for one in vars(module)[RECORD]}
    functions = {n: getattr(value, "__func__", value) for n, value in vars(module).items()}
    return {n: ours[f] for n, f in functions.items() if isinstance(f, FunctionType) and f in ours}


def _replica(module: nn.Module) -> nn.Module:
    """A copy for another device, as DataParallel makes it, that does not call the original."""
    made: nn.Module = type(module)._replicate_for_data_parallel(module)
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(made)[name] = MethodType(value.__func__, made)
    return made


def _reduced(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """A patched module, as pickle and copy take it: its own state, and what to put on it."""
    by_class: Any = type(module).__reduce_ex__(module, protocol)
    make, args, state, *rest = by_class
    held = _held(module)
    kept = {n: x for n, x in state.items() if n not in (RECORD, _REPLICATE, _REDUCE, *held)}
    return _restored, (make, args, held), kept, *rest


def _restored(
    make: Callable[..., nn.Module], args: tuple[Any, ...], held: dict[str, Replacement]
) -> nn.Module:
    module = make(*args)
    _put(module, held)
    return module
