"""Models whose attention has a bias: which layers take ours, and for which calls.

The model that holds the layers makes no matrix for a mask any more, but passes a row for each
sequence, ``[B, K]``, unless there are so few scores that a matrix is faster. Calls that our
attention cannot serve run the model's own code instead.
"""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posenc._contract import checks
from posenc._contract.tracing import in_capture, in_forward_mode, is_plain, is_readable
from posenc.interop.huggingface.biased import HIDDEN, Kind, kind_of
from posenc.interop.huggingface.probing import FAILURES, Known, NotUnderstood, same
from posenc.interop.huggingface.rewrite import PATCHED, Replacement, Rewriter

_MASKS = ("attention_mask", "encoder_attention_mask")
_MAKERS = {"create_causal_mask", "create_bidirectional_mask"}
# Of a head; up to here T5, whose buckets cost most, is faster with a matrix.
FEW_SCORES = 2**13
_WEIGHTS = ("output_attentions", "output_cross_attentions")


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention layer that was put on our attention.

    Attributes:
        module: Path of the layer in the model.
        cls: Its class.
        bias: ``alibi``, ``buckets``, or ``none`` for attention to an encoder.
        dropout: Dropout of its weights. If above zero, the model's own attention runs in training.
    """

    module: str
    cls: str
    bias: str
    dropout: float

    def __str__(self) -> str:
        own = f"; its own in training, dropout {self.dropout:g}" if self.dropout else ""
        return f"{self.module} ({self.cls}): attention [{self.bias}{own}]"


Plan = dict[str, tuple[nn.Module, Replacement]]


def plan(model: nn.Module) -> tuple[Plan, list[Attention]]:
    """Our methods for the attention layers of ``model`` and for the models that hold them.

    Each is tried in a small random model. ``NotUnderstood`` names what differs from ours.
    """
    modules = dict(model.named_modules())
    layers = {path: kind for path, one in modules.items() if (kind := kind_of(one)) is not None}
    for path, one in modules.items():
        named = {name for name, _ in (*one.named_children(), *one.named_parameters(recurse=False))}
        if path not in layers and "relative_attention_bias" in named:
            raise NotUnderstood(f"{_name(one)} at '{path}'")
    planned: Plan = {}
    found: list[Attention] = []
    forwards: dict[type, Replacement] = {}
    for path, kind in layers.items():
        layer, holder = modules[path], _holder(modules, path)
        stack = modules[holder]
        if holder not in planned:
            _try(stack, f"{_name(layer)} at '{path}'")
            planned[holder] = stack, stack_forward(type(stack))
        forward = forwards.setdefault(type(layer), attention_forward(type(layer), kind))
        planned[path] = layer, forward
        bias = "none" if path.endswith("EncDecAttention") else kind.bias
        found.append(Attention(path, type(layer).__name__, bias, kind.dropout(layer)))
    return planned, found


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _holder(modules: dict[str, nn.Module], path: str) -> str:
    """Path of the nearest module around an attention layer that makes its mask."""
    above = path
    while above:
        above = above.rpartition(".")[0]
        forward = inspect.unwrap(type(modules[above]).forward)
        if _MAKERS & set(forward.__code__.co_names):
            return above
    raise NotUnderstood(f"{_name(modules[path])} at '{path}', without the model around it")


def _rebuilt(kind: type) -> Any:
    """The forward of a class with our masks."""
    return Rewriter(_padding_instead).rewrite("forward", kind.forward)[0]  # type: ignore[attr-defined]


def _padding_instead(name: str, function: Any) -> Known | None:
    if name not in _MAKERS:
        return None

    @functools.wraps(function)
    def padding(
        config: Any,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        encoder_hidden_states: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        queries = inputs_embeds.shape[1]
        keys = queries if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        keys += 0 if past_key_values is None else past_key_values.get_seq_length()
        wide = torch.promote_types(inputs_embeds.dtype, torch.float32)
        row = inputs_embeds.new_zeros((1, 1), dtype=wide)
        if attention_mask is not None and not _hides_nothing(attention_mask):
            if attention_mask.shape[1] != keys:
                rule = f"attention_mask must have {keys} columns, one for each key"
                hint = "Pass a mask of all tokens, those in the cache included."
                checks.fail("the patched model", rule, attention_mask.shape[1], hint)
            row = (attention_mask.to(inputs_embeds.device) == 0).to(wide) * HIDDEN
        if name != "create_causal_mask" or not _is_short(inputs_embeds, keys):
            return row
        later = row.new_full((queries, keys), float("-inf")).triu_(keys - queries + 1)
        return later - row[:, None]

    return Known("padding", "", padding)


def _is_short(x: Tensor, keys: int) -> bool:
    """Whether there are so few scores that SDPA's kernel for CPUs is faster with a matrix."""
    few = x.shape[1] * keys <= FEW_SCORES and x.dtype.itemsize > 2
    return few and x.is_cpu and is_plain(x) and not (torch.is_grad_enabled() or in_forward_mode())


def stack_forward(kind: type) -> Replacement:
    """The forward of a model that holds attention layers."""
    theirs, rebuilt = kind.forward, _rebuilt(kind)  # type: ignore[attr-defined]
    names = tuple(inspect.signature(theirs).parameters)[1:]

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not _serves(module, given):
            return theirs(module, *args, **kwargs)
        return rebuilt(module, **given)

    return Replacement(kind, "forward", forward, (), (stack_forward, (kind,)))


def attention_forward(kind: type, known: Kind) -> Replacement:
    """The forward of an attention layer, which is ours if the mask has fewer axes than theirs."""
    theirs = kind.forward  # type: ignore[attr-defined]
    at = tuple(inspect.signature(theirs).parameters).index(known.mask) - 1

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        mask = args[at] if at < len(args) else kwargs.get(known.mask)
        ours = isinstance(mask, Tensor) and mask.dim() < 4
        return (known.forward if ours else theirs)(module, *args, **kwargs)

    return Replacement(kind, "forward", forward, (), (attention_forward, (kind, known)))


def _serves(stack: Any, given: dict[str, Any]) -> bool:
    """Whether our attention serves a call."""
    # A static cache has keys that are not there yet.
    if getattr(given.get("past_key_values"), "is_compileable", False):
        return False
    for name in _WEIGHTS:
        asked = given.get(name)
        if getattr(stack.config, name, False) if asked is None else asked:
            return False
    if stack.training:
        ours = ((one, kind_of(one)) for one in stack.modules() if PATCHED in vars(one))
        if any(kind.dropout(one) for one, kind in ours if kind is not None and one.training):
            return False
    masks = [given[name] for name in _MASKS if given.get(name) is not None]
    return all(isinstance(mask, Tensor) and mask.dim() == 2 for mask in masks)


def _hides_nothing(mask: Tensor) -> bool:
    """Whether a mask can be read, which it cannot in a compiled graph, and hides no key."""
    return can_read(mask) and bool(mask.all())


def can_read(mask: Tensor) -> bool:
    """Whether the values of a mask can be read, if need be by waiting for its device."""
    waits = is_plain(mask) and not mask.is_meta and not in_capture(mask)
    return waits or is_readable(mask)


# Sizes of the small model, by the names that configs have for them.
_SMALL = {"num_hidden_layers": 2, "vocab_size": 8, "d_kv": 4, "d_ff": 8, "ffn_hidden_size": 8}
_SMALL |= {"max_seq_len": 256, "output_attentions": False, "return_dict": True}


def _try(stack: Any, layer: str) -> None:
    """Compare our attention with the model's in a small random model with its config."""
    kind = type(stack)
    try:
        config = copy.deepcopy(stack.config)
        sizes = {**_SMALL, "hidden_size": 4 * config.num_attention_heads}
        for name, size in sizes.items():
            if hasattr(config, name):
                setattr(config, name, size)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.manual_seed(0)
            small = kind(config).float().eval()
            for weight in small.parameters():
                weight.normal_(0, 0.3)
            inputs = _inputs(small)
            expected = _outputs(small, **inputs)
            for one in small.modules():
                known = kind_of(one)
                if known is not None:
                    vars(one)["forward"] = functools.partial(known.forward, one)
            vars(small)["forward"] = functools.partial(_rebuilt(kind), small)
            got = _outputs(small, **inputs)
    except (*FAILURES, ImportError) as error:
        why = str(error).strip().partition("\n")[0]
        raise NotUnderstood(f"{layer}, which fails in a small model ({why})") from error
    if not same(got, expected, 1e-4):
        raise NotUnderstood(f"{layer}, which computes something else")


def _inputs(stack: Any) -> dict[str, Tensor]:
    """Three sequences: without padding, with some on the left, and with some on the right."""
    length, width = 150, stack.config.hidden_size
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, :7], mask[2, -40:] = 0, 0
    made = {
        "inputs_embeds": torch.randn(3, length, width, dtype=torch.float32),
        "attention_mask": mask,
    }
    if getattr(stack, "is_decoder", False):
        made["encoder_hidden_states"] = torch.randn(3, 90, width, dtype=torch.float32)
        made["encoder_attention_mask"] = mask[:, :90]
    return made


def _outputs(stack: Any, inputs_embeds: Tensor, attention_mask: Tensor, **others: Any) -> Tensor:
    """Hidden states of all tokens that are not padding; a decoder gets the last from a cache."""
    if getattr(stack, "is_decoder", True):
        cut = inputs_embeds.shape[1] - 30
        mask = attention_mask[:, :cut]
        first = stack(
            inputs_embeds=inputs_embeds[:, :cut], attention_mask=mask, use_cache=True, **others
        )
        others["past_key_values"] = first.past_key_values
        last = stack(inputs_embeds=inputs_embeds[:, cut:], attention_mask=attention_mask, **others)
        states = torch.cat((first.last_hidden_state, last.last_hidden_state), 1)
    else:
        states = stack(inputs_embeds=inputs_embeds, attention_mask=attention_mask).last_hidden_state
    return states[attention_mask.bool()]
