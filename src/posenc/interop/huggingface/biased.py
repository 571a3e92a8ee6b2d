"""Models whose attention has ALiBi or T5's buckets, on our attention.

Each function with the name of a model replaces the ``forward`` of an attention class, and has its
parameters. The model that holds the layers makes no matrix for a mask any more, but passes a row
for each sequence, uint8 ``[B, K]``, zero at padding; ``[1, 1]`` if there is no padding. Unlike
document ids, that serves padding between tokens, and a compiled graph need not read the mask.
Calls that our attention cannot serve run the model's own code instead, and so do short ones on the
CPU, where that is faster.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from posenc._contract import checks
from posenc._contract.tracing import in_capture, in_forward_mode, is_plain, is_readable
from posenc.attention import DistanceTable, RunningSum
from posenc.functional import t5_buckets
from posenc.functional.biased import attend_last
from posenc.interop.huggingface.recognition import FAILURES, Match, NotUnderstood, same
from posenc.interop.huggingface.rewrite import PATCHED, Replacement, Rewriter


def bloom(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor,
    layer_past: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """BLOOM; its bias is added to the scaled scores."""
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    k, v = _cached(layer_past, self.layer_idx, k, v)
    bias, how = _alibi(alibi, self.beta, q, k), {"scale": self.inv_norm_factor, "causal": True}
    out = self.dense(_merge(_attend(q, k, v, bias, attention_mask, prune=True, **how)))
    return residual + dropout(out, self.hidden_dropout, self.training), None


def falcon(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor,
    attention_mask: Tensor,
    position_ids: Any = None,
    layer_past: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Falcon; its bias is added before the scores are scaled."""
    q, k, v = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    k, v = _cached(layer_past, self.layer_idx, k, v)
    bias, scale = _alibi(alibi, self.inv_norm_factor, q, k), self.inv_norm_factor
    how = {"scale": scale, "causal": True, "prune": True}
    return self.dense(_merge(_attend(q, k, v, bias, attention_mask, **how))), None


def mpt(
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: Any = None,
    attention_mask: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """MPT; its bias is for ``max_seq_len`` keys, and the last of them are used."""
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
    q, k, v = (_heads(x, self.n_heads) for x in mixed.chunk(3, -1))
    k, v = _cached(past_key_values, self.layer_idx, k, v)
    # The model makes every mask boolean.
    mask = attention_mask.byte()
    bias = _alibi(position_bias[..., -k.shape[2] :], 1.0, q, k)
    how = {"scale": self.softmax_scale, "causal": True, "prune": True}
    return self.out_proj(_merge(_attend(q, k, v, bias, mask, **how))), None


def t5(
    self: Any,
    hidden_states: Tensor,
    mask: Any = None,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None, None]:
    """T5 and its kin; the first layer returns its numbers for the others, as ``position_bias``."""
    if key_value_states is not None:
        return _cross(self, hidden_states, key_value_states, mask, past_key_values), None, None
    return *_self(self, hidden_states, position_bias, mask, past_key_values), None


def umt5(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """UMT5; every layer has a table."""
    if encoder_hidden_states is not None:
        states = encoder_hidden_states
        return _cross(self, hidden_states, states, attention_mask, past_key_values), None
    return _self(self, hidden_states, None, attention_mask, past_key_values)[0], None


def _heads(x: Tensor, heads: int) -> Tensor:
    """``[B, L, H D]`` as ``[B, H, L, D]``."""
    split: Tensor = x.unflatten(-1, (heads, -1))
    return split.transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    """``[B, H, L, D]`` as ``[B, L, H D]``."""
    return x.transpose(1, 2).flatten(2)


def _cached(cache: Any, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """All keys and values."""
    return (k, v) if cache is None else cache.update(k, v, layer)


def _alibi(alibi: Tensor, factor: float, q: Tensor, k: Tensor) -> RunningSum:
    """A model's own bias of each key, ``[B H or H, 1, K]``, with its slopes and its rounding.

    The model leaves out the query's position, since softmax does not see what all keys share.
    """
    heads, keys = q.shape[1], k.shape[2]
    if alibi.shape[2] != keys:
        rule = f"the model's bias must be for {keys} keys, those in the cache included"
        checks.fail("the patched model", rule, alibi.shape[2], "Pass fewer tokens.")
    # The product has the rounding of a half.
    alibi = alibi if factor == 1.0 else alibi * factor
    wide = torch.promote_types(alibi.dtype, torch.float32)
    return RunningSum(-alibi.view(-1, heads, keys).to(wide))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: RunningSum | DistanceTable, mask: Tensor, **how: Any
) -> Tensor:
    """Attention of the last queries, ``[B, H, Q, D]``, without the keys at padding."""
    padding = mask if mask.shape[1] > 1 else None
    return attend_last(q, k, v, bias, padding=padding, **how)[0]


def _self(
    layer: Any, x: Tensor, numbers: Tensor | None, mask: Tensor, cache: Any
) -> tuple[Tensor, Tensor]:
    """Attention with a bias of buckets, and the numbers of this bias, see `_bucket_numbers`."""
    q, k, v = (_heads(of(x), layer.n_heads) for of in (layer.q, layer.k, layer.v))
    k, v = _cached(getattr(cache, "self_attention_cache", cache), layer.layer_idx, k, v)
    if numbers is None:
        numbers = _bucket_numbers(layer, q.shape[2], k.shape[2], q.device)
    causal = layer.is_decoder
    bias: RunningSum | DistanceTable
    if numbers.dim() == 3:
        bias = RunningSum(numbers)
    else:
        bias = DistanceTable(numbers, 0 if causal else numbers.shape[1] // 2)
    how = {"scale": layer.scaling, "causal": causal, "prune": False}
    return layer.o(_merge(_attend(q, k, v, bias, mask, **how))), numbers


def _bucket_numbers(layer: Any, queries: int, keys: int, device: torch.device) -> Tensor:
    """The bias of buckets, from the layer's own weights.

    For one query, minus the bias of each key, ``[1, H, K]``: a running sum. For more queries, the
    bias of each distance, ``[H, R]``.
    """
    count, far = layer.relative_attention_num_buckets, layer.relative_attention_max_distance
    causal = layer.is_decoder
    if queries == 1:
        distance = keys - 1 - torch.arange(keys, device=device)
    else:
        distance = torch.arange(0 if causal else -far, far + 1, device=device)
    buckets = t5_buckets(distance, count, far, causal=causal)
    bias: Tensor = layer.relative_attention_bias(buckets).T
    return -bias[None] if queries == 1 else bias


def _cross(layer: Any, x: Tensor, states: Tensor, padding: Tensor, cache: Any) -> Tensor:
    """Attention to the encoder's states, which has no bias."""
    q, at = _heads(layer.q(x), layer.n_heads), layer.layer_idx
    updated = getattr(cache, "is_updated", None)
    if updated is not None and updated.get(at):
        layer_cache = cache.cross_attention_cache.layers[at]
        k, v = layer_cache.keys, layer_cache.values
    else:
        k, v = (_heads(of(states), layer.n_heads) for of in (layer.k, layer.v))
        if cache is not None:
            k, v = getattr(cache, "cross_attention_cache", cache).update(k, v, at)
        if updated is not None:
            updated[at] = True
    is_padded = padding.shape[1] > 1
    if is_padded and k.is_cuda:
        # With a mask torch's would make a matrix of it.
        how = {"scale": layer.scaling, "causal": False, "prune": False}
        result = attend_last(q, k, v, None, padding=padding, **how)[0]
    else:
        seen = padding[:, None, None] != 0 if is_padded else None
        result = scaled_dot_product_attention(q, k, v, seen, scale=layer.scaling)
    out: Tensor = layer.o(_merge(result))
    return out


class Kind(NamedTuple):
    """Our function for a class of attention, and what it needs to know of a layer."""

    forward: Callable[..., Any]
    bias: str  # alibi or buckets
    mask: str  # name of the parameter
    has_bias: Callable[[Any], bool]
    dropout: Callable[[Any], float]  # of the attention weights, in training


def _always(layer: Any) -> bool:
    return True


def _falcon_alibi(layer: Any) -> bool:
    # Falcon's blocks have the parameters of its attention.
    return hasattr(layer, "_split_heads") and layer.config.alibi


def _has_buckets(layer: Any) -> bool:
    return hasattr(layer, "has_relative_attention_bias") and hasattr(layer, "o")


# Pickle stores what is here, so nothing is a lambda.
_KINDS = (
    Kind(bloom, "alibi", "attention_mask", _always, attrgetter("attention_dropout.p")),
    Kind(falcon, "alibi", "attention_mask", _falcon_alibi, attrgetter("attention_dropout.p")),
    Kind(mpt, "alibi", "attention_mask", _always, attrgetter("attn_dropout_p")),
    Kind(t5, "buckets", "mask", _has_buckets, attrgetter("dropout")),
    Kind(umt5, "buckets", "attention_mask", _has_buckets, attrgetter("dropout")),
)
_PARAMETERS = {tuple(inspect.signature(kind.forward).parameters)[:-1]: kind for kind in _KINDS}


def kind_of(layer: nn.Module) -> Kind | None:
    """Our function for an attention layer, by the parameters of its forward; not tried yet."""
    names = tuple(inspect.signature(type(layer).forward).parameters)
    for ours, kind in _PARAMETERS.items():
        if names[: len(ours)] == ours and kind.has_bias(layer):
            return kind
    return None


_MASKS = ("attention_mask", "encoder_attention_mask")
_MAKERS = {"create_causal_mask", "create_bidirectional_mask"}
# Of a head; up to here T5, whose buckets cost most, is faster by its own matrix.
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
        training = f"; its own in training, dropout {self.dropout:g}" if self.dropout else ""
        return f"{self.module} ({self.cls}): attention [{self.bias}{training}]"


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


def _padding_instead(name: str, function: Any) -> Match | None:
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
        states = inputs_embeds if encoder_hidden_states is None else encoder_hidden_states
        keys = states.shape[1]
        keys += 0 if past_key_values is None else past_key_values.get_seq_length()
        row = inputs_embeds.new_ones((1, 1), dtype=torch.uint8)
        if attention_mask is not None and not (can_read(attention_mask) and attention_mask.all()):
            if attention_mask.shape[1] != keys:
                rule = f"attention_mask must have {keys} columns, one for each key"
                hint = "Pass a mask of all tokens, those in the cache included."
                checks.fail("the patched model", rule, attention_mask.shape[1], hint)
            row = (attention_mask.to(inputs_embeds.device) != 0).byte()
        return row

    return Match("padding", "", padding)


def stack_forward(kind: type) -> Replacement:
    """The forward of a model that holds attention layers."""
    theirs, rebuilt = kind.forward, _rebuilt(kind)  # type: ignore[attr-defined]
    names = tuple(inspect.signature(theirs).parameters)[1:]

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not _serves(module, given):
            return theirs(module, *args, **kwargs)
        return rebuilt(module, **given)

    return Replacement(kind, "forward", forward, (stack_forward, (kind,)))


def attention_forward(kind: type, known: Kind) -> Replacement:
    """The forward of an attention layer, which is ours if the mask has fewer axes than theirs."""
    theirs = kind.forward  # type: ignore[attr-defined]
    at = tuple(inspect.signature(theirs).parameters).index(known.mask) - 1

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        mask = args[at] if at < len(args) else kwargs.get(known.mask)
        ours = isinstance(mask, Tensor) and mask.dim() < 4
        return (known.forward if ours else theirs)(module, *args, **kwargs)

    return Replacement(kind, "forward", forward, (attention_forward, (kind, known)))


def _serves(stack: Any, given: dict[str, Any]) -> bool:
    """Whether our attention serves a call."""
    # A static cache has keys that are not there yet.
    if getattr(given.get("past_key_values"), "is_compileable", False) or _is_short(given):
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


def _is_short(given: dict[str, Any]) -> bool:
    """Whether a call on the CPU has so few scores that the model's own attention is as fast."""
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None or not tokens.is_cpu or not is_plain(tokens):
        return False
    if torch.is_grad_enabled() or in_forward_mode():
        return False
    cache, queries = given.get("past_key_values"), tokens.shape[1]
    keys = queries + (0 if cache is None else cache.get_seq_length())
    return bool(queries * keys <= FEW_SCORES)


def can_read(mask: Tensor) -> bool:
    """Whether the values of a mask can be read, which they cannot in a compiled graph."""
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
            expected = small(**inputs).last_hidden_state
            for one in small.modules():
                known = kind_of(one)
                if known is not None:
                    vars(one)["forward"] = functools.partial(known.forward, one)
            vars(small)["forward"] = functools.partial(_rebuilt(kind), small)
            got = small(**inputs).last_hidden_state
    except (*FAILURES, ImportError) as error:
        why = str(error).strip().partition("\n")[0]
        raise NotUnderstood(f"{layer}, which fails in a small model ({why})") from error
    tokens = inputs["attention_mask"].bool()
    if not same(got[tokens], expected[tokens], 1e-4):
        raise NotUnderstood(f"{layer}, which computes something else")


def _inputs(stack: Any) -> dict[str, Tensor]:
    """Three sequences: without padding, with some on the left, and with some on the right."""
    length, width = 150, stack.config.hidden_size
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, :7], mask[2, -40:] = 0, 0
    states = torch.randn(3, length, width, dtype=torch.float32)
    inputs = {"inputs_embeds": states, "attention_mask": mask}
    if getattr(stack, "is_decoder", False):
        inputs |= {"encoder_hidden_states": states[:, :90], "encoder_attention_mask": mask[:, :90]}
    return inputs
