"""Patch a loaded model to run on our rotation and attention, to drop its rotation, or to extend it.

Every function here reads the whole model before it changes a module, so an error changes nothing.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from posenc._contract import checks
from posenc._contract.tracing import device_assert, in_transform
from posenc.attention import biased_attention
from posenc.configs import LAYOUT
from posenc.interop.huggingface import biased
from posenc.interop.huggingface.biased import Attention
from posenc.interop.huggingface.modules import (
    Norms,
    Tables,
    holds_other_rates,
    plan_norms,
    rotary_forward,
    tables_of,
)
from posenc.interop.huggingface.recognition import NotUnderstood
from posenc.interop.huggingface.rewrite import (
    ATTENTION,
    EXTENSION,
    PATCHED,
    Replacement,
    attribute_for,
    install,
    keeps_rotation,
    processor_for,
    replacements,
    restore_processor,
    uninstall,
)
from posenc.nn import DualChunk, RoPE, SelfExtend, rope_layers
from posenc.nn.extended import ExtendedRoPE

# Forms of tables that a RoPE has too, where all tokens and the first channels rotate.
_PLAIN = ("doubled", "repeated", "single", "complex")
# Attributes of an extended model, and of its modules: their configs before.
_EXTENDED, _BEFORE = "_posenc_extended", "_posenc_configs"
_Plan = tuple[nn.Module, dict[str, Replacement]]
_UNKNOWN = ("sliding_window", "softcap", "s_aux")
_UNCHANGED = "Use the model as it is: nothing was changed."


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
    are. Rotary modules take their rates from the config, if it has them. An RMSNorm of queries or
    keys directly before the rotation is computed in one kernel with it. Attention layers with ALiBi
    or T5's buckets call :func:`posenc.attention.biased_attention`, which makes no matrix; a few
    calls, such as short ones on the CPU, still run the model's own attention.

    Patch before you compile. ``docs/recipes/huggingface.md`` has the details: what is rounded,
    which calls run the model's own attention, and what stays as it is.

    Args:
        model: A model of transformers, a transformer of diffusers, or any part of one.
        fuse: Compute norms together with the rotation, where they come directly before it.

    Returns:
        What was replaced, and where; and which modules may rotate by code that stays.

    Raises:
        ValueError: If the model is patched already, if nothing in it rotates or has such a bias,
            or if one of its rotating functions matches none of ours, or an attention layer with a
            bias in a model that does not rotate. The message names it, and nothing is patched.

    Examples:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
        >>> model = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=9))
        >>> print(patch(model))
        layers.0.self_attn (LlamaAttention): apply_rotary_pos_emb [doubled; half]
        rotary_emb (LlamaRotaryEmbedding): tables [doubled; rates from the config]
        >>> unpatch(model)
    """
    checks.boolean("patch", "fuse", fuse)
    planned: list[_Plan] = []
    processors: list[tuple[Any, Any]] = []
    rotary: list[tuple[str, nn.Module, Tables]] = []
    places, kept, norms = list[Place](), list[Kept](), list[Norms]()
    tables, edited = list[Table](), list[str]()
    for path, module, methods, keeps in _scanned("patch", model):
        kind = type(module).__name__
        is_rotary = any(
            name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)
        )
        with _naming("patch", path, module):
            processor, by_processor = processor_for(module)
            ours = tables_of(module) if is_rotary else None
        places += _places(path, module, methods)
        kept += [Kept(path, kind)] * keeps
        if methods:
            planned.append(_planned(path, module, methods))
        if processor is not None:
            places += [Place(path, type(processor).__name__, *old) for old in by_processor]
            processors.append((module, processor))
        if fuse and (methods or processor is not None):
            fused, rows = plan_norms(path, module, methods, processor)
            planned += [(norm, {"forward": method}) for norm, method in fused]
            norms += rows
        if is_rotary:
            form, rates = ("unchanged", "its own") if ours is None else (ours.form, ours.rates)
            tables.append(Table(path, kind, form, rates))
        if ours is not None:
            rotary.append((path, module, ours))
            edited += [f"{path} ({kind})"] * holds_other_rates(module, ours)
    for path, module, ours in rotary:
        method = rotary_forward(type(module), replace(ours, rounded=bool(kept)))
        planned.append(_planned(path, module, [method]))
    attending, attentions = _with_bias(model, rotates=bool(places))
    for path, (module, method) in attending.items():
        planned.append(_planned(path, module, [method]))
    if not planned and not processors:
        _fail_unrotated("patch", "model must have rotary embeddings, ALiBi or T5's buckets", model)
    _refuse_converted(model, places)
    if edited:
        problem = f"inv_freq should hold the rates of the config, got others in {', '.join(edited)}"
        hint = "Write them into the config: the patched model takes its rates from it."
        warnings.warn(f"patch: {problem}.\n  {hint}", UserWarning, stacklevel=2)
    for plan in planned:
        install(*plan)
    for module, processor in processors:
        install(module, {})
        module.processor = processor
    return Report(tuple(places), tuple(tables), tuple(attentions), tuple(norms), tuple(kept))


def unpatch(model: nn.Module) -> None:
    """Restore the code of ``model``: its outputs are bit for bit those before the patch.

    Hooks and wrappers that were added after the patch stay.

    Args:
        model: The patched model, a part of it, or a copy of either.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    patched_modules = [module for module in modules if PATCHED in vars(module)]
    if not patched_modules:
        got, hint = type(model).__name__, "Pass the model that was patched."
        checks.fail("unpatch", "model must be patched", got, hint)
    _detach(modules)
    for module in patched_modules:
        uninstall(module)
        restore_processor(module)


@contextmanager
def patched(model: nn.Module, *, fuse: bool = True) -> Iterator[Report]:
    """Patch ``model`` for a ``with`` block, which gets the report of :func:`patch`."""
    report = patch(model, fuse=fuse)
    try:
        yield report
    finally:
        unpatch(model)


def _scanned(
    who: str, model: nn.Module, *, identity: bool = False
) -> list[tuple[str, nn.Module, list[Replacement], bool]]:
    """For each module: its path, the module, methods that replace those that rotate, if any.

    The last is whether the module may rotate by code that stays; if ``identity``, for methods that
    do not rotate, that is an error.
    """
    if not isinstance(model, nn.Module):
        rule = "model must be a torch.nn.Module"
        checks.fail(who, rule, type(model).__name__, "Load it, and pass the model.", TypeError)
    classes: dict[type, tuple[list[Replacement], bool]] = {}
    scanned = []
    for path, module in model.named_modules():
        kind = type(module)
        if PATCHED in vars(module):
            got, hint = f"a patched {kind.__name__} at '{path}'", "Call unpatch(model) first."
            checks.fail(who, "model must not be patched", got, hint)
        with _naming(who, path, module):
            if kind not in classes:
                methods = replacements(kind, identity=identity)
                classes[kind] = methods, not methods and keeps_rotation(kind)
            methods, keeps = classes[kind]
            if identity and keeps:
                raise NotUnderstood("rotating code of its own")
        # Falcon's attention rotates only without ALiBi, that of a conformer only if it says so.
        scheme = getattr(module, "position_embeddings_type", "rotary")
        rotates = scheme == "rotary" and biased.kind_of(module) is None
        scanned.append((path, module, methods if rotates else [], keeps))
    return scanned


@contextmanager
def _naming(who: str, path: str, module: nn.Module) -> Iterator[None]:
    """Name the module at ``path`` in the error for rotating code that is not understood."""
    try:
        yield
    except NotUnderstood as error:
        kind = type(module)
        rule = "every rotating function must be known to posenc"
        got = f"{error} in {kind.__module__}.{kind.__name__} at '{path}'"
        checks.fail(who, rule, got, _UNCHANGED)


def _places(path: str, module: nn.Module, methods: list[Replacement]) -> list[Place]:
    cls = type(module).__name__
    return [Place(path, cls, *replaced) for one in methods for replaced in one.replaced]


def _planned(path: str, module: nn.Module, methods: list[Replacement]) -> _Plan:
    """A module, and its new methods by the attributes that get them."""
    return module, {attribute_for(module, path, method): method for method in methods}


def _with_bias(model: nn.Module, *, rotates: bool) -> tuple[biased.Plan, list[Attention]]:
    """The plan for attention with a bias, which a model that rotates need not have."""
    try:
        return biased.plan(model)
    except NotUnderstood as error:
        if rotates:
            return {}, []
        rule = "every attention with a bias must be known to posenc"
        checks.fail("patch", rule, f"{error}", _UNCHANGED)


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


def drop_rotation(model: nn.Module, *, layers: Collection[int] | None = None) -> Report:
    """Take the rotation out of ``model``, until :func:`unpatch`: queries and keys stay as they are.

    This is DroPE's first step. Its second is a short training at the original length, without which
    the model is worse than before; ``docs/rotary/further.md`` has the recipe. The config still
    describes a rotation, so drop it again after loading the weights.

    Args:
        model: A transformers model, or any part of one.
        layers: Indices of the layers that stop rotating; all if None.

    Returns:
        What was replaced, and where.

    Examples:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
        >>> model = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=9))
        >>> print(drop_rotation(model, layers=[3]))
        layers.3.self_attn (LlamaAttention): apply_rotary_pos_emb [not rotated; half]
        >>> unpatch(model)

    References:
        Gelberg et al., *Extending the Context of Pretrained LLMs by Dropping Their Positional
        Embeddings*, 2025.
    """
    who = "drop_rotation"
    wanted = None if layers is None else {checks.integer(who, "layers", i, least=0) for i in layers}
    rotating = _rotating(who, model)
    if wanted is not None:
        missing = wanted - {_index(path) for path, _, _ in rotating}
        if missing:
            known = {_index(path) for path, _, _ in rotating} - {None}
            hint = f"Pass some of {sorted(known)}."  # type: ignore[type-var]
            checks.fail(who, "layers must be layers that rotate", sorted(missing), hint)
        rotating = [row for row in rotating if _index(row[0]) in wanted]
    for plan in [_planned(*row) for row in rotating]:
        install(*plan)
    places = [place for row in rotating for place in _places(*row)]
    return Report(tuple(replace(place, variant="not rotated") for place in places))


def self_extend(model: nn.Module, *, group: int, window: int) -> Report:
    """Let ``model`` read past its trained length by Self-Extend, until :func:`unpatch`.

    Every layer that rotates gets :class:`posenc.SelfExtend` with the rotation of its config, as an
    attention implementation of transformers. Positions are counted from a sequence's first token;
    ``position_ids`` are not read. A cache that was filled before is of no use: it holds
    rotated keys. Sequences may be padded, but not packed, and caches grow: a static one is an
    error, as are sliding windows, soft caps, sinks, and dropout of the attention. Until unpatch the
    model has a copy of its config, because other models may share the object.

    Args:
        model: A transformers model; of a multimodal one, its language model.
        group: Tokens that share a position far from the query.
        window: Keys of each query, itself included, with exact positions.

    Returns:
        What was replaced, and where.

    Examples:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
        >>> model = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=9))
        >>> print(self_extend(model, group=8, window=1024))
        layers.0.self_attn (LlamaAttention): apply_rotary_pos_emb [SelfExtend; half]
        >>> unpatch(model)
    """
    return _extend("self_extend", model, partial(SelfExtend, group=group, window=window))


def dual_chunk(model: nn.Module, *, chunk: int, window: int) -> Report:
    """As :func:`self_extend`, by Dual Chunk Attention: :class:`posenc.DualChunk`.

    Args:
        model: A transformers model; of a multimodal one, its language model.
        chunk: Tokens of a chunk.
        window: Tokens before each query, in the chunk before, whose distances are exact.

    Returns:
        What was replaced, and where.
    """
    return _extend("dual_chunk", model, partial(DualChunk, chunk=chunk, window=window))


def _extend(who: str, model: nn.Module, extend: Callable[[RoPE], ExtendedRoPE]) -> Report:
    extensions: dict[nn.Module, ExtendedRoPE | None] = {}
    planned: list[_Plan] = []
    places: list[Place] = []
    layers: dict[int, list[RoPE | None]] = {}
    for path, module, methods in _rotating(who, model):
        config: Any = getattr(module, "config", None)
        index, ropes = _index(path), layers.get(id(config), [])
        if not ropes and hasattr(config, "_attn_implementation"):
            ropes = layers[id(config)] = rope_layers(config)
        if index is None or index >= len(ropes):
            got, hint = f"{type(module).__name__} at '{path}'", "Pass the language model."
            checks.fail(who, "every module that rotates must be an attention layer", got, hint)
        window = getattr(config, "sliding_window", None)
        if getattr(module, "sliding_window", window) is not None:
            got, hint = f"'{path}' with {window}", "Set sliding_window=None in the config first."
            checks.fail(who, "layers must see all keys, without a sliding window", got, hint)
        rope, rotations = ropes[index], _places(path, module, methods)
        if rope is not None:
            _check_rotation(who, rope, rotations)
        extensions[module] = None if rope is None else extend(rope)
        variant = "not rotated" if rope is None else type(extensions[module]).__name__
        places += [replace(place, variant=variant) for place in rotations]
        planned.append(_planned(path, module, methods))
    _check_rates(who, model, [each.rope for each in extensions.values() if each is not None])
    _attach(who, model, extensions)
    for plan in planned:
        install(*plan)
    return Report(tuple(places))


def _rotating(who: str, model: nn.Module) -> list[tuple[str, nn.Module, list[Replacement]]]:
    """The modules that rotate: path, module, and methods that do not rotate."""
    scanned = _scanned(who, model, identity=True)
    rotating = [(path, module, methods) for path, module, methods, _ in scanned if methods]
    if not rotating:
        _fail_unrotated(who, "model must have rotary embeddings", model)
    return rotating


def _fail_unrotated(who: str, rule: str, model: nn.Module) -> NoReturn:
    """Refuse a model of whose rotation nothing is seen."""
    got = f"{type(model).__name__}, which calls no function that rotates"
    hint = "Use the model as it is: without rotary positions it needs no patch."
    if type(model).__module__.partition(".")[0] not in ("transformers", "diffusers"):
        hint = (
            "If it rotates, its function has neither rotary, rotate nor rope in its name, like "
            "timm's apply_rot_embed_cat: call a posenc module in its attention instead."
        )
    checks.fail(who, rule, got, hint)


def _check_rotation(who: str, rope: RoPE, places: list[Place]) -> None:
    """Refuse a model whose code rotates in another way than the config says."""
    layout = "interleaved" if rope.interleaved else "half"
    for place in places:
        if place.variant not in _PLAIN or place.layout.split()[0] != layout:
            rule = f"the model must rotate the first channels of all tokens, in pairs of {layout}"
            checks.fail(who, rule, place, _UNCHANGED)


def _check_rates(who: str, model: nn.Module, ropes: list[RoPE]) -> None:
    """Refuse a model whose rotary modules have other rates than the config says."""
    for path, module in model.named_modules():
        if not any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            continue
        ours = tables_of(module)
        rates = None if ours is None or ours.form not in _PLAIN else ours.by_layer.get(None)
        if (
            rates is None
            or rates.order
            or any(rates.exact().ne(r.scaled_inv_freq()).any() for r in ropes)
        ):
            rule = "the rates of every rotary module must follow from the config"
            got = f"{type(module).__name__} at '{path}'"
            checks.fail(who, rule, got, _UNCHANGED)


def _index(path: str) -> int | None:
    """The index of the layer that a module is in."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(number[1]) if number else None


def _attach(who: str, model: Any, layers: dict[Any, ExtendedRoPE | None]) -> None:
    """Make the attention ``layers`` of a transformers model attend by ours."""
    if not hasattr(model, "set_attn_implementation"):
        rule = "model must be a transformers model"
        checks.fail(who, rule, type(model).__name__, "Pass the model around its layers.", TypeError)
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, _document_ids)
    _copy_configs(model)
    try:
        model.set_attn_implementation(ATTENTION)
        if any(layer.config._attn_implementation != ATTENTION for layer in layers):
            rule = "model must let its attention implementation be set"
            checks.fail(who, rule, type(model).__name__, _UNCHANGED)
    except BaseException:
        _restore_configs(model.modules())
        raise
    vars(model)[_EXTENDED] = True
    for layer, extension in layers.items():
        # Not as a submodule: the model's modules stay as they are. None is for no rotation.
        vars(layer)[EXTENSION] = extension


def _detach(modules: list[nn.Module]) -> None:
    """Undo `_attach` for all ``modules``, which are those of the model or include them."""
    layers = [module for module in modules if EXTENSION in vars(module)]
    models = [module for module in modules if _EXTENDED in vars(module)]
    if layers and not models:
        rule, got = "model must be the one that was extended", "a part of it"
        checks.fail("unpatch", rule, got, "Pass the whole model.")
    for model in models:
        del vars(model)[_EXTENDED]
        _restore_configs(model.modules())
    for layer in layers:
        del vars(layer)[EXTENSION]


def _copy_configs(model: nn.Module) -> None:
    """Give the modules of ``model`` configs of their own: other models may share theirs."""
    # What several modules share, their copies share too.
    copies: dict[int, Any] = {}
    for module in model.modules():
        each = vars(module).items()
        configs = {name: value for name, value in each if hasattr(value, "_attn_implementation")}
        if configs:
            vars(module).update(copy.deepcopy(configs, copies), **{_BEFORE: configs})


def _restore_configs(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        vars(module).update(vars(module).pop(_BEFORE, {}))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer; ``attention_mask`` is what `_document_ids` returned."""
    who = "the extended model"
    unknown = [name for name in _UNKNOWN if others.get(name) is not None]
    if dropout or unknown:
        rule = "attention must be plain: without dropout, a window, a soft cap and sinks"
        got = ", ".join(unknown) or f"dropout={dropout}"
        checks.fail(who, rule, got, "Call model.eval(), or unpatch the model.")
    if attention_mask is not None and attention_mask.dim() != 2:
        hint = "Pass attention_mask of shape (B, K)."
        checks.fail(who, "attention_mask must have two axes", tuple(attention_mask.shape), hint)
    how: Any = {"scale": scaling, "document_ids": attention_mask}
    extension: ExtendedRoPE | None = vars(module)[EXTENSION]
    if extension is None:
        return biased_attention(query, key, value, causal=True, **how).transpose(1, 2), None
    return extension.attention(query, key, value, **how).transpose(1, 2), None


def _document_ids(
    *,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """An id for each key, ``(B, K)``, below zero for padding; None if nothing is padding."""
    from transformers.masking_utils import causal_mask_function

    who = "the extended model"
    fixed = isinstance(q_offset, Tensor) or (
        q_length is not None and q_offset + q_length != kv_length
    )
    if fixed or mask_function is not causal_mask_function:
        got = "a static cache" if fixed else "packed sequences, or another mask"
        hint = "Use a dynamic cache, and pad sequences instead of packing them."
        checks.fail(who, "the mask must be causal, over the keys so far", got, hint)
    if attention_mask is None:
        return None
    rule, begins = "padding must be at the ends of its row", attention_mask.clone()
    begins[:, 1:] &= ~attention_mask[:, :-1]
    one_run = (begins.sum(-1) <= 1).all()
    if biased.can_read(attention_mask):
        hides, holes = torch.stack((~attention_mask.all(), ~one_run)).tolist()
        if holes:
            checks.fail(who, rule, "padding between tokens", "Pass the tokens without it.")
        if not hides:
            return None
    elif not in_transform(attention_mask):
        device_assert(one_run, f"{who}: {rule}.")
    return torch.where(attention_mask, 0, -1)
