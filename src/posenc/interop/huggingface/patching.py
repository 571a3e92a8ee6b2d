"""A loaded transformers model made to run on our rotation, and made itself again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType

from torch import nn

from posenc._contract import checks
from posenc.configs import LAYOUT
from posenc.interop.huggingface import tables
from posenc.interop.huggingface.methods import PATCHED, Replacement, of_tables, replacements
from posenc.interop.huggingface.probing import NotUnderstood
from posenc.interop.huggingface.report import Place, Report, Table

_REPLICATE = "_replicate_for_data_parallel"


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
    classes: dict[type, list[Replacement]] = {}
    placed: list[tuple[nn.Module, dict[str, Replacement]]] = []
    places: list[Place] = []
    rotary: list[Table] = []
    edited: list[Table] = []
    for path, module in model.named_modules():
        kind = type(module)
        if PATCHED in vars(module):
            got, way_out = f"a patched {kind.__name__} at '{path}'", "Call unpatch(model) first."
            raise ValueError(checks.message("patch", "model must not be patched", got, way_out))
        try:
            if kind not in classes:
                classes[kind] = replacements(kind)
            makes_tables, ours = _tables(module)
        except NotUnderstood as error:
            rule = "every function that rotates must be one that is understood"
            got = f"{error} in {kind.__module__}.{kind.__name__} at '{path}'"
            way_out = "The model is left as it was."
            raise ValueError(checks.message("patch", rule, got, way_out)) from None
        methods = list(classes[kind])
        places += [Place(path, kind.__name__, *gone) for one in methods for gone in one.gone]
        if makes_tables:
            said = ("unchanged", "its own") if ours is None else (ours.form, ours.rates)
            rotary.append(Table(path, kind.__name__, *said))
        if ours is not None:
            methods.append(of_tables(kind, ours))
            if tables.holds_other_rates(module, ours):
                edited.append(rotary[-1])
        if methods:
            placed.append((module, {_attribute(module, path, one): one for one in methods}))
    if not places:
        got = f"{type(model).__name__}, which calls no function that rotates"
        way_out = "Nothing was changed. Models without rotary positions need no patch."
        raise ValueError(checks.message("patch", "model must rotate", got, way_out))
    _refuse_converted(model, places)
    _warn(
        "the config should say the rates of every rotary module, got none for",
        [table for table in rotary if table.rates != "from the config"],
        "Keep inv_freq in float32: these modules rotate by what that buffer holds.",
    )
    _warn(
        "inv_freq should hold the rates of the config, got others in",
        edited,
        "Write them into the config: the rates of the config are used.",
    )
    for module, methods_at in placed:
        _put(module, methods_at)
    return Report(tuple(places), tuple(rotary))


def _tables(module: nn.Module) -> tuple[bool, tables.Tables | None]:
    """Whether a module makes tables, and what ours are to be."""
    rotary = any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
    return rotary, tables.understood(module) if rotary else None


def _warn(problem: str, modules: list[Table], way_out: str) -> None:
    if modules:
        named = ", ".join(f"{table.module} ({table.cls})" for table in modules)
        warnings.warn(f"patch: {problem} {named}.\n  {way_out}", UserWarning, stacklevel=3)


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
    found = [module for module in modules if PATCHED in vars(module)]
    if not found:
        got, way_out = type(model).__name__, "Pass what patch was called on."
        raise ValueError(checks.message("unpatch", "model must be patched", got, way_out))
    for module in found:
        for name, ours in _held(module).items():
            if name == ours.name:
                del vars(module)[name]
            else:
                vars(module)[name] = MethodType(getattr(ours.kind, ours.name), module)
        del vars(module)[PATCHED], vars(module)[_REPLICATE]


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


def _attribute(module: nn.Module, path: str, method: Replacement) -> str:
    """The attribute of the instance that a method is to be."""
    name = method.name
    # accelerate wraps forward in its hooks and calls what it keeps under this name.
    if name == "forward" and "_old_forward" in vars(module):
        name = "_old_forward"
    theirs, held = getattr(method.kind, method.name), vars(module).get(name)
    if held is not None and getattr(held, "__func__", held) is not theirs:
        rule, got = f"'{path}' must have the {method.name} of its class", repr(held)[:80]
        raise ValueError(checks.message("patch", rule, got, "Patch before wrapping methods."))
    return name


def _put(module: nn.Module, methods: dict[str, Replacement]) -> None:
    # Partials, since pickle has no way to write a method that belongs to an instance alone.
    vars(module).update({name: partial(ours, module) for name, ours in methods.items()})
    vars(module).update({PATCHED: True, _REPLICATE: partial(_replica, module)})


def _held(module: nn.Module) -> dict[str, Replacement]:
    """Which attributes of a patched module are ours, whatever was wrapped or hooked since."""
    functions = {name: getattr(value, "func", None) for name, value in vars(module).items()}
    return {name: ours for name, ours in functions.items() if isinstance(ours, Replacement)}


def _replica(module: nn.Module) -> nn.Module:
    """A copy for another device, as DataParallel makes it, that does not call the original."""
    made: nn.Module = type(module)._replicate_for_data_parallel(module)
    _put(made, _held(module))
    return made
