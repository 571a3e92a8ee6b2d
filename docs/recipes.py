"""What a folder needs besides small sizes: fields of its configuration, inputs, classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import tiny
import torch
from torch import nn

# Changes to a configuration, by folder or by the name of the model's class.
CONFIGS: dict[str, dict[str, Any]] = {}
# Configuration classes of models that do not name their own.
CONFIG_CLASSES: dict[str, Any] = {}
# Models to build, where not every model of the folder is to be tried in turn.
CLASSES: dict[str, list[str]] = {}
# Classes that nothing makes on this machine, and why they are left out of the count.
UNREACHABLE: dict[str, set[str]] = {
    "falcon": {"FalconFlashAttention2"},
    "gptj": {"GPTJFlashAttention2"},
}


def calls(name: str, model: nn.Module, wanted: set[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ways to run a model, whole first, then module by module."""
    for given in tiny.inputs(model):
        yield "the whole", partial(model, **given)
    for path, module in model.named_modules():
        if type(module).__name__ in wanted:
            yield path, lambda m=module: m(**layer_inputs(m))
            break


def layer_inputs(module: nn.Module) -> dict[str, Any]:
    """Random states and tables for an attention module alone."""
    made = torch.Generator().manual_seed(1)
    takes = inspect.signature(module.forward).parameters
    linear = next(m for m in module.modules() if isinstance(m, nn.Linear))
    states = torch.randn(2, 9, linear.in_features, generator=made)
    phi = torch.rand(2, 9, module.head_dim // 2, generator=made) * 6
    tables = tuple(torch.cat((t, t), dim=-1) for t in (phi.cos(), phi.sin()))
    given: dict[str, Any] = {"hidden_states": states, "position_embeddings": tables}
    if "attention_mask" in takes and takes["attention_mask"].default is inspect.Parameter.empty:
        given["attention_mask"] = None
    return given
