"""Our attention as an attention implementation of transformers, for layers that do not rotate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from posenc._contract import checks
from posenc._contract.tracing import device_assert, in_transform
from posenc.attention import biased_attention
from posenc.interop.huggingface.rewrite import ATTENTION, HELD
from posenc.interop.huggingface.stacks import can_read
from posenc.nn.extended import ExtendedRoPE

# An attribute of the model, the implementation that it had.
_BEFORE = "_posenc_implementation"
_UNKNOWN = ("sliding_window", "softcap", "s_aux")


def attach(who: str, model: Any, layers: dict[Any, ExtendedRoPE | None]) -> None:
    """Make the attention ``layers`` of a transformers model attend by ours."""
    if not hasattr(model, "set_attn_implementation"):
        rule = "model must be a transformers model"
        checks.fail(who, rule, type(model).__name__, "Pass the model around its layers.", TypeError)
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, _document_ids)
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    if any(layer.config._attn_implementation != ATTENTION for layer in layers):
        model.set_attn_implementation(before)
        rule = "model must let its attention implementation be set"
        hint = "Use the model as it is: nothing was changed."
        checks.fail(who, rule, type(model).__name__, hint)
    vars(model)[_BEFORE] = before
    for layer, held in layers.items():
        # Not as a submodule: the model's modules stay as they are. None is for no rotation.
        vars(layer)[HELD] = held


def detach(modules: Iterable[nn.Module]) -> None:
    """Undo `attach` for all ``modules``, which are those of the model or include them."""
    layers = [module for module in modules if HELD in vars(module)]
    models: list[Any] = [module for module in modules if _BEFORE in vars(module)]
    if layers and not models:
        rule, got = "model must be the one that was extended", "a part of it"
        checks.fail("unpatch", rule, got, "Pass the whole model.")
    for model in models:
        model.set_attn_implementation(vars(model).pop(_BEFORE))
    for layer in layers:
        del vars(layer)[HELD]


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
    found = [name for name in _UNKNOWN if others.get(name) is not None]
    if dropout or found:
        rule = "attention must be plain: without dropout, a window, a soft cap and sinks"
        got = ", ".join(found) or f"dropout={dropout}"
        checks.fail(who, rule, got, "Call model.eval(), or unpatch the model.")
    if attention_mask is not None and attention_mask.dim() != 2:
        hint = "Pass attention_mask of shape (B, K)."
        checks.fail(who, "attention_mask must have two axes", tuple(attention_mask.shape), hint)
    how: Any = {"scale": scaling, "document_ids": attention_mask}
    held: ExtendedRoPE | None = vars(module)[HELD]
    attend = biased_attention if held is None else held.attention
    return attend(query, key, value, **how).transpose(1, 2), None


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
    if can_read(attention_mask):
        hides, holes = torch.stack((~attention_mask.all(), ~one_run)).tolist()
        if holes:
            checks.fail(who, rule, "padding between tokens", "Pass the tokens without it.")
        if not hides:
            return None
    elif not in_transform(attention_mask):
        device_assert(one_run, f"{who}: {rule}.")
    return torch.where(attention_mask, 0, -1)
