"""Attention layers of models with ALiBi or with T5's buckets, on our attention.

Each function here replaces the ``forward`` of an attention class, and has its parameters. Its mask
is ``[B, K]``, true at padding, or ``[1, 0]`` if there is none. It returns no weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad, scaled_dot_product_attention

from posenc._contract import checks
from posenc.attention import DistanceTable, RunningSum, biased_attention
from posenc.attention.biases import Bias
from posenc.functional import t5_buckets


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
    k, v, start = _cached(layer_past, self.layer_idx, k, v)
    sums = _alibi_sums(alibi * self.beta, self.num_heads)
    out = self.dense(_attend(q, k, v, sums, attention_mask, self.inv_norm_factor, start))
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
    k, v, start = _cached(layer_past, self.layer_idx, k, v)
    sums = _alibi_sums(alibi * self.inv_norm_factor, self.num_heads)
    out = _attend(q, k, v, sums, attention_mask, self.inv_norm_factor, start)
    return self.dense(out), None


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
    k, v, start = _cached(past_key_values, self.layer_idx, k, v)
    sums = _alibi_sums(position_bias[..., -k.shape[2] :], self.n_heads)
    out = _attend(q, k, v, sums, attention_mask, self.softmax_scale, start)
    return self.out_proj(out), None


def t5(
    self: Any,
    hidden_states: Tensor,
    mask: Any = None,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None, None]:
    """T5 and its kin; the first layer returns its table for the others, as ``position_bias``."""
    if key_value_states is not None:
        return _cross(self, hidden_states, key_value_states, mask, past_key_values), None, None
    table = _bucket_table(self) if position_bias is None else position_bias
    return _self(self, hidden_states, table, mask, past_key_values), table, None


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
    table = _bucket_table(self)
    return _self(self, hidden_states, table, attention_mask, past_key_values), None


def _heads(x: Tensor, heads: int) -> Tensor:
    """``[B, L, H D]`` as ``[B, H, L, D]``."""
    split: Tensor = x.unflatten(-1, (heads, -1))
    return split.transpose(1, 2)


def _cached(cache: Any, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
    """All keys and values, and the key index of the first query."""
    if cache is None:
        return k, v, None
    start = cache.get_seq_length(layer)
    return *cache.update(k, v, layer), start


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias,
    padding: Tensor,
    scale: float,
    start: Any,
    causal: bool = True,
) -> Tensor:
    """Attention, ``[B, Q, H D]``."""
    width = v.shape[3]
    if padding.shape[1]:
        if padding.shape[1] != k.shape[2]:
            rule = f"attention_mask must have {k.shape[2]} columns, one for each key"
            way_out = "Pass a mask of all tokens, those in the cache included."
            checks.fail("the patched model", rule, padding.shape[1], way_out)
        q, k, v, bias = _hide(q, k, v, bias, padding)
    out = biased_attention(q, k, v, bias, scale=scale, query_offset=start, causal=causal)
    return out[..., :width].transpose(1, 2).flatten(2)


def _hide(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, padding: Tensor
) -> tuple[Tensor, Tensor, Tensor, Bias]:
    """Lower the scores of keys at padding by 2^20, so that their weights are zero.

    Unlike document ids, which cannot express padding between tokens, this serves every mask, and a
    compiled graph need not read it. The number is finite, because a query at padding may see only
    such keys, and its weights must not be NaN.
    """
    if isinstance(bias, RunningSum):
        return q, k, v, RunningSum(torch.where(padding[:, None], 2.0**20, bias.values))
    # Sixteen further channels: 256 for queries, -256 or 0 for keys, exact in every dtype. GPUs read
    # rows whose width is a multiple of 16 faster.
    low = (-256.0 * padding).to(k.dtype)[:, None, :, None].expand(*k.shape[:3], 16)
    # SDPA's kernel for CPUs has one width for all three.
    v = pad(v, (0, 16)) if v.is_cpu else v
    return pad(q, (0, 16), value=256.0), torch.cat((k, low), -1), v, bias


def _alibi_sums(alibi: Tensor, heads: int) -> RunningSum:
    """The model's own bias of each key, ``[B H or H, 1, K]``, with its slopes and its rounding.

    The model leaves out the query's position, since softmax does not see what all keys share.
    """
    wide = torch.promote_types(alibi.dtype, torch.float32)
    return RunningSum(-alibi.to(wide).reshape(-1, heads, alibi.shape[-1]))


def _bucket_table(layer: Any) -> Tensor:
    """Bias of each head and distance, ``[H, R]``, from the layer's own weights."""
    embedding, causal = layer.relative_attention_bias, layer.is_decoder
    count, far = layer.relative_attention_num_buckets, layer.relative_attention_max_distance
    distance = torch.arange(0 if causal else -far, far + 1, device=embedding.weight.device)
    table: Tensor = embedding(t5_buckets(distance, count, far, causal=causal))
    return table.T


def _self(layer: Any, x: Tensor, table: Tensor, padding: Tensor, cache: Any) -> Tensor:
    q, k, v = (_heads(of(x), layer.n_heads) for of in (layer.q, layer.k, layer.v))
    cache = getattr(cache, "self_attention_cache", cache)
    k, v, start = _cached(cache, layer.layer_idx, k, v)
    causal = layer.is_decoder
    bias = DistanceTable(table, 0 if causal else table.shape[1] // 2)
    out: Tensor = layer.o(_attend(q, k, v, bias, padding, layer.scaling, start, causal))
    return out


def _cross(layer: Any, x: Tensor, states: Tensor, padding: Tensor, cache: Any) -> Tensor:
    """Attention to the encoder's states, which has no bias."""
    q, at = _heads(layer.q(x), layer.n_heads), layer.layer_idx
    updated = getattr(cache, "is_updated", None)
    if updated is not None and updated.get(at):
        held = cache.cross_attention_cache.layers[at]
        k, v = held.keys, held.values
    else:
        k, v = (_heads(of(states), layer.n_heads) for of in (layer.k, layer.v))
        if cache is not None:
            k, v = getattr(cache, "cross_attention_cache", cache).update(k, v, at)
        if updated is not None:
            updated[at] = True
    seen = ~padding[:, None, None] if padding.shape[1] else None
    made = scaled_dot_product_attention(q, k, v, seen, scale=layer.scaling)
    out: Tensor = layer.o(made.transpose(1, 2).flatten(2))
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


def _buckets(layer: Any) -> bool:
    return hasattr(layer, "has_relative_attention_bias") and hasattr(layer, "o")


# Pickle stores what is here, so nothing is a lambda.
_KINDS = (
    Kind(bloom, "alibi", "attention_mask", _always, attrgetter("attention_dropout.p")),
    Kind(falcon, "alibi", "attention_mask", _falcon_alibi, attrgetter("attention_dropout.p")),
    Kind(mpt, "alibi", "attention_mask", _always, attrgetter("attn_dropout_p")),
    Kind(t5, "buckets", "mask", _buckets, attrgetter("dropout")),
    Kind(umt5, "buckets", "attention_mask", _buckets, attrgetter("dropout")),
)
_PARAMETERS = {tuple(inspect.signature(kind.forward).parameters)[:-1]: kind for kind in _KINDS}


def kind_of(layer: nn.Module) -> Kind | None:
    """Our function for an attention layer, by the parameters of its forward; not tried yet."""
    names = tuple(inspect.signature(type(layer).forward).parameters)
    for ours, kind in _PARAMETERS.items():
        if names[: len(ours)] == ours and kind.has_bias(layer):
            return kind
    return None
