"""Patch a loaded transformers model to drop its rotation, or to read past its trained length."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from posenc._contract import checks
from posenc.interop.huggingface import attending, tables
from posenc.interop.huggingface.biased import kind_of
from posenc.interop.huggingface.patching import (
    Place,
    Report,
    attribute_for,
    install,
    unpatch,
)
from posenc.interop.huggingface.probing import WIDEN, NotUnderstood
from posenc.interop.huggingface.rewrite import PATCHED, Replacement, keeps_rotation, replacements
from posenc.nn import DualChunk, RoPE, SelfExtend, rope_layers
from posenc.nn.extended import ExtendedRoPE

__all__ = ["drop_rotation", "dual_chunk", "self_extend", "unpatch"]

# The forms of cos and sin that a RoPE has too, where all tokens and the first channels rotate.
_PLAIN = tuple(WIDEN)


class Still(NamedTuple):
    """A module that will not rotate any more: our methods, and what they replace."""

    module: nn.Module
    methods: dict[str, Replacement]
    places: tuple[Place, ...]

    def said(self, variant: str) -> list[Place]:
        """The report, with what came instead of the rotation."""
        return [replace(place, variant=variant) for place in self.places]


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
    found = rotating = _rotating(who, model)
    if wanted is not None:
        found = {path: each for path, each in rotating.items() if _index(path) in wanted}
        if missing := wanted - set(map(_index, found)):
            hint = f"Pass some of {sorted({i for i in map(_index, rotating) if i is not None})}."
            checks.fail(who, "layers must be layers that rotate", sorted(missing), hint)
    for each in found.values():
        install(each.module, each.methods)
    return Report(tuple(place for each in found.values() for place in each.said("not rotated")))


def self_extend(model: nn.Module, *, group: int, window: int) -> Report:
    """Let ``model`` read past its trained length by Self-Extend, until :func:`unpatch`.

    Every layer that rotates gets :class:`posenc.SelfExtend` with the rotation of its config, as an
    attention implementation of transformers. Positions are counted from a sequence's first token;
    ``position_ids`` are not read. A cache that was filled before is of no use: it holds
    rotated keys. Sequences may be padded, but not packed, and caches grow: a static one is an
    error, as are sliding windows, soft caps, sinks, and dropout of the attention.

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
    found = _rotating(who, model)
    held: dict[nn.Module, ExtendedRoPE | None] = {}
    places: list[Place] = []
    layers: dict[int, list[RoPE | None]] = {}
    for path, each in found.items():
        config: Any = getattr(each.module, "config", None)
        index, ropes = _index(path), layers.get(id(config), [])
        if not ropes and hasattr(config, "_attn_implementation"):
            ropes = layers[id(config)] = rope_layers(config)
        if index is None or index >= len(ropes):
            got, hint = f"{type(each.module).__name__} at '{path}'", "Pass the language model."
            checks.fail(who, "every module that rotates must be an attention layer", got, hint)
        window = getattr(config, "sliding_window", None)
        if getattr(each.module, "sliding_window", window) is not None:
            got, hint = f"'{path}' with {window}", "Set sliding_window=None in the config first."
            checks.fail(who, "layers must see all keys, without a sliding window", got, hint)
        rope = ropes[index]
        if rope is not None:
            _check_rotation(who, rope, each.places)
        held[each.module] = None if rope is None else extend(rope)
        places += each.said("not rotated" if rope is None else type(held[each.module]).__name__)
    _check_rates(who, model, [each.rope for each in held.values() if each is not None])
    attending.attach(who, model, held)
    for each in found.values():
        install(each.module, each.methods)
    return Report(tuple(places))


def _check_rotation(who: str, rope: RoPE, places: tuple[Place, ...]) -> None:
    """Refuse a model whose code rotates in another way than the config says."""
    layout = "interleaved" if rope.interleaved else "half"
    for place in places:
        if place.variant not in _PLAIN or place.layout.split()[0] != layout:
            rule = f"the model must rotate the first channels of all tokens, in pairs of {layout}"
            checks.fail(who, rule, place, "Use the model as it is: nothing was changed.")


def _check_rates(who: str, model: nn.Module, ropes: list[RoPE]) -> None:
    """Refuse a model whose rotary modules have other rates than the config says."""
    for path, module in model.named_modules():
        if not any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            continue
        ours = tables.understood(module)
        rates = None if ours is None or ours.form not in _PLAIN else ours.by_layer.get(None)
        if (
            rates is None
            or rates.order
            or any(rates.exact().ne(r.scaled_inv_freq()).any() for r in ropes)
        ):
            rule = "the rates of every rotary module must follow from the config"
            got = f"{type(module).__name__} at '{path}'"
            checks.fail(who, rule, got, "Use the model as it is: nothing was changed.")


def _rotating(who: str, model: nn.Module) -> dict[str, Still]:
    """The modules that rotate, by path, with methods that do not."""
    if not isinstance(model, nn.Module):
        rule = "model must be a torch.nn.Module"
        checks.fail(who, rule, type(model).__name__, "Pass the model.", TypeError)
    classes: dict[type, list[Replacement]] = {}
    found: dict[str, Still] = {}
    for path, module in model.named_modules():
        kind = type(module)
        if PATCHED in vars(module):
            got, hint = f"a patched {kind.__name__} at '{path}'", "Call unpatch(model) first."
            checks.fail(who, "model must not be patched", got, hint)
        try:
            if kind not in classes:
                classes[kind] = replacements(kind, still=True)
                if not classes[kind] and keeps_rotation(kind):
                    raise NotUnderstood("rotating code of its own")
        except NotUnderstood as error:
            rule = "every rotating function must be known to posenc"
            got = f"{error} in {kind.__module__}.{kind.__name__} at '{path}'"
            checks.fail(who, rule, got, "Use the model as it is: nothing was changed.")
        # Falcon's attention rotates only without ALiBi.
        methods = [] if kind_of(module) else classes[kind]
        if methods:
            places = [Place(path, kind.__name__, *old) for one in methods for old in one.replaced]
            named = {attribute_for(module, path, one): one for one in methods}
            found[path] = Still(module, named, tuple(places))
    if not found:
        got = f"{type(model).__name__}, which calls no function that rotates"
        checks.fail(who, "model must have rotary embeddings", got, "Use the model as it is.")
    return found


def _index(path: str) -> int | None:
    """The index of the layer that a module is in."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(number[1]) if number else None
