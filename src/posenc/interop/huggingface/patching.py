"""Patch a loaded model to run on our rotation and attention, and undo it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from posenc._contract import checks
from posenc.configs import LAYOUT
from posenc.interop.huggingface import attending, norms, processors, stacks, tables
from posenc.interop.huggingface.biased import kind_of
from posenc.interop.huggingface.norms import Norms
from posenc.interop.huggingface.probing import NotUnderstood
from posenc.interop.huggingface.rewrite import (
    PATCHED,
    Replacement,
    keeps_rotation,
    replacements,
    rotary_forward,
)
from posenc.interop.huggingface.stacks import Attention

_REPLICATE = "_replicate_for_data_parallel"


@dataclass(frozen=True, slots=True)
class Place:
    """One call of a rotating function that was replaced in one module.

    Attributes:
        module: Path of the module in the model, as in ``named_modules``.
        cls: Its class; that of its attention processor in a model of diffusers.
        function: Name of the function that was replaced.
        variant: Form of its cos and sin, such as ``doubled``, and any further traits.
        layout: ``half``, ``interleaved``, or ``interleaved to half``; ``as the call says`` if the
            function has arguments for it, as that of diffusers has.
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
    """One rotary module, and where its cosines and sines come from.

    Attributes:
        module: Path of the module in the model.
        cls: Its class.
        form: Form of our cos and sin, such as ``doubled``; ``unchanged`` if the module keeps its
            own forward.
        rates: ``from the config``, in float64; or ``its own``, from its ``inv_freq`` buffer.
    """

    module: str
    cls: str
    form: str
    rates: str

    def __str__(self) -> str:
        return f"{self.module} ({self.cls}): tables [{self.form}; rates {self.rates}]"


@dataclass(frozen=True, slots=True)
class Kept:
    """One module whose code stays, though it may rotate: it calls no function that rotates.

    Its class overrides a method that rotates, or its ``forward`` takes ``position_embeddings``
    apart into ``cos`` and ``sin``.

    Attributes:
        module: Path of the module in the model.
        cls: Its class.
    """

    module: str
    cls: str

    def __str__(self) -> str:
        return f"{self.module} ({self.cls}): left as it is, calls no function that rotates"


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was replaced, and what was not.

    Attributes:
        places: One for each module and function that rotates.
        tables: One for each rotary module.
        attentions: One for each attention layer with a bias.
        norms: One for each module that rotates and has norms.
        kept: One for each module that may rotate by code of its own, which stays.
    """

    places: tuple[Place, ...]
    tables: tuple[Table, ...] = ()
    attentions: tuple[Attention, ...] = ()
    norms: tuple[Norms, ...] = ()
    kept: tuple[Kept, ...] = ()

    def __str__(self) -> str:
        rows = (*self.places, *self.norms, *self.tables, *self.attentions, *self.kept)
        return "\n".join(map(str, rows))


def patch(model: nn.Module, *, fuse: bool = True) -> Report:
    """Make ``model`` run on our rotation and attention, until :func:`unpatch`.

    Each function that rotates is called on small random tensors, and replaced by one of ours that
    gives the same result. The modules that call it get a ``forward`` of their own: the model's code
    with our rotation. Weights, state dict, classes and other models of these classes stay as they
    are. Rotary modules take their rates from the config instead of their buffers, where these
    follow from it. If any rotating function is unknown, nothing is patched. A module that rotates
    without calling a function, such as an attention of your own, stays as it is, and the report
    names it; the rotary modules then round cos and sin to the model's dtype, which it expects.
    Patch before you compile.

    Where an RMSNorm of the queries or keys comes directly before the rotation (Qwen3, Gemma 3,
    OLMo 2, Flux, Wan), one kernel computes both, with gradients. It rounds once; the model rounds
    after the norm too, once or twice, so in half precision the two differ by up to four unit
    roundoffs of the pair. A norm with hooks, or with weights of another dtype than its input, runs
    on its own.

    Attention layers with ALiBi (BLOOM, MPT, Falcon) or with T5's buckets call
    :func:`posenc.attention.biased_attention`, which makes no matrix, once a small random model with
    the same config has given the same hidden states with it. It gives padding tokens other hidden
    states than the model does. The model's own attention still runs for calls with a mask of four
    axes, with a static cache, for ``output_attentions``, and in training if the weights of the
    attention have dropout.

    In a transformer of diffusers, attention processors rotate. Each module that has one gets
    another, of a subclass that calls our rotation; set your own processors before you patch.

    Args:
        model: A model of transformers, a transformer of diffusers, or any part of one.
        fuse: Compute norms together with the rotation, where they come directly before it.

    Returns:
        What was replaced, and where.

    Raises:
        ValueError: If the model is patched already, if nothing in it rotates or has such a bias,
            or if one of its rotating functions or attention layers matches none of ours; the
            message names it.

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
        checks.fail("patch", rule, type(model).__name__, "Pass the model.", TypeError)
    checks.boolean("patch", "fuse", fuse)
    classes: dict[type, list[Replacement]] = {}
    planned: list[tuple[nn.Module, dict[str, Replacement]]] = []
    processing: list[tuple[nn.Module, Any]] = []
    places: list[Place] = []
    rotary, edited, rounded = list[Table](), list[Table](), list[Table]()
    exact: list[tuple[str, nn.Module, tables.Tables]] = []
    found, kept = list[Norms](), list[Kept]()
    for path, module in model.named_modules():
        kind = type(module)
        if PATCHED in vars(module):
            got, hint = f"a patched {kind.__name__} at '{path}'", "Call unpatch(model) first."
            checks.fail("patch", "model must not be patched", got, hint)
        try:
            if kind not in classes:
                classes[kind] = replacements(kind)
            processor, by_processor = processors.ours_for(module)
            buffers = [name for name, _ in module.named_buffers(recurse=False)]
            is_rotary = any(name.endswith("inv_freq") for name in buffers)
            ours = tables.understood(module) if is_rotary else None
            if not classes[kind] and keeps_rotation(kind):
                kept.append(Kept(path, kind.__name__))
        except NotUnderstood as error:
            rule = "every rotating function must be known to posenc"
            got = f"{error} in {kind.__module__}.{kind.__name__} at '{path}'"
            checks.fail("patch", rule, got, "Use the model without patch: nothing was changed.")
        # Falcon's attention rotates only without ALiBi.
        methods = [] if kind_of(module) else list(classes[kind])
        places += [Place(path, kind.__name__, *old) for one in methods for old in one.replaced]
        if processor is not None:
            places += [Place(path, type(processor).__name__, *old) for old in by_processor]
            processing.append((module, processor))
        if is_rotary:
            form, rates = ("unchanged", "its own") if ours is None else (ours.form, ours.rates)
            rotary.append(Table(path, kind.__name__, form, rates))
            rounded += rotary[-1:] if rates == "its own" and tables.is_rounded(module) else []
        if fuse and (methods or processor is not None):
            fused, said = norms.plan(path, module, methods, processor)
            planned += [(norm, {"forward": method}) for norm, method in fused]
            found += said
        if ours is not None:
            exact.append((path, module, ours))
            edited += rotary[-1:] if tables.holds_other_rates(module, ours) else []
        if methods:
            planned.append((module, {attribute_for(module, path, one): one for one in methods}))
    for path, module, ours in exact:
        method = rotary_forward(type(module), replace(ours, rounded=bool(kept)))
        planned.append((module, {attribute_for(module, path, method): method}))
    biased, attentions = _biased(model, rotates=bool(places))
    for path, (module, method) in biased.items():
        planned.append((module, {attribute_for(module, path, method): method}))
    if not planned and not processing:
        got = f"{type(model).__name__}, which calls no function that rotates"
        hint = "Use the model as it is: without rotary positions it needs no patch."
        rule = "model must have rotary embeddings, ALiBi or T5's buckets"
        checks.fail("patch", rule, got, hint)
    _refuse_converted(model, places)
    problem = "inv_freq should be in float32 if the config has no such rates, got half precision in"
    hint = "Keep that buffer in float32: the module computes its angles from it."
    _warn(problem, rounded, hint)
    problem = "inv_freq should hold the rates of the config, got others in"
    _warn(problem, edited, "Write them into the config: the patched model takes its rates from it.")
    for module, named in planned:
        install(module, named)
    for module, processor in processing:
        install(module, {})
        processors.install(module, processor)
    return Report(tuple(places), tuple(rotary), tuple(attentions), tuple(found), tuple(kept))


def _biased(model: nn.Module, *, rotates: bool) -> tuple[stacks.Plan, list[Attention]]:
    """The plan for attention with a bias, which a model that rotates need not have."""
    try:
        return stacks.plan(model)
    except NotUnderstood as error:
        if rotates:
            return {}, []
        rule = "every attention with a bias must be known to posenc"
        checks.fail("patch", rule, f"{error}", "Use the model without patch: nothing was changed.")


def _warn(problem: str, found: list[Table], hint: str) -> None:
    if found:
        names = ", ".join(f"{table.module} ({table.cls})" for table in found)
        warnings.warn(f"patch: {problem} {names}.\n  {hint}", UserWarning, stacklevel=3)


def _refuse_converted(model: nn.Module, places: list[Place]) -> None:
    """Refuse weights that `posenc convert` left in a layout that the model's code does not read."""
    for place in places:
        module = model.get_submodule(place.module)
        config = getattr(module, "config", getattr(model, "config", None))
        marked, code = getattr(config, LAYOUT, None), place.layout.split()[0]
        if marked not in (None, code):
            rule = f"the weights must be in the layout of the model's code, {code}"
            hint = f"Convert them: posenc convert MODEL -o NEW --to {code}"
            checks.fail("patch", rule, f"{marked} ({LAYOUT})", hint)


def unpatch(model: nn.Module) -> None:
    """Restore the code of ``model``: its outputs are bit for bit those before the patch.

    Hooks and wrappers that were added after the patch stay.

    Args:
        model: The patched model, a part of it, or a copy of either.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    found = [module for module in modules if PATCHED in vars(module)]
    if not found:
        got, hint = type(model).__name__, "Pass the model that was patched."
        checks.fail("unpatch", "model must be patched", got, hint)
    attending.detach(modules)
    for module in found:
        for name, ours in _replacements_of(module).items():
            if name == ours.name:
                del vars(module)[name]
            else:
                vars(module)[name] = MethodType(getattr(ours.kind, ours.name), module)
        processors.restore(module)
        del vars(module)[PATCHED], vars(module)[_REPLICATE]


@contextmanager
def patched(model: nn.Module, *, fuse: bool = True) -> Iterator[Report]:
    """Patch ``model`` for a ``with`` block, which gets the report of :func:`patch`."""
    report = patch(model, fuse=fuse)
    try:
        yield report
    finally:
        unpatch(model)


def attribute_for(module: nn.Module, path: str, method: Replacement) -> str:
    """The attribute of ``module`` that gets ``method``."""
    name = method.name
    # accelerate's hooks wrap forward and call the original by this name.
    if name == "forward" and "_old_forward" in vars(module):
        name = "_old_forward"
    theirs, held = getattr(method.kind, method.name), vars(module).get(name)
    if held is not None and getattr(held, "__func__", held) is not theirs:
        rule, got = f"'{path}' must have the {method.name} of its class", repr(held)[:80]
        checks.fail("patch", rule, got, "Patch before wrapping methods.")
    return name


def install(module: nn.Module, methods: dict[str, Replacement]) -> None:
    """Give ``module`` our methods, by the attributes that get them."""
    # Pickle can store a partial, but not a bound method that the class does not have.
    vars(module).update({name: partial(ours, module) for name, ours in methods.items()})
    vars(module).update({PATCHED: True, _REPLICATE: partial(_replica, module)})


def _replacements_of(module: nn.Module) -> dict[str, Replacement]:
    """The replacements among a module's attributes, except those that were wrapped since."""
    functions = {name: getattr(value, "func", None) for name, value in vars(module).items()}
    return {name: ours for name, ours in functions.items() if isinstance(ours, Replacement)}


def _replica(module: nn.Module) -> nn.Module:
    """A replica for DataParallel, whose methods are bound to the replica."""
    made: nn.Module = type(module)._replicate_for_data_parallel(module)
    install(made, _replacements_of(module))
    return made
