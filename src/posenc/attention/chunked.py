"""ALiBi attention in plain torch, a few queries of one head at a time: memory O(L).

It is a custom op, ``posenc::alibi_chunked``, because the sizes of its pieces depend on values,
which a compiler cannot trace. :func:`alibi_attention` checks its arguments, and calls it only
where the slopes need no gradient. Its backward recomputes every piece: nothing of size ``Q × K``
is saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posenc._contract.tracing import has_native_bf16
from posenc.attention.pruning import Plan, needed_keys
from posenc.kernels.ops import define_op
from posenc.numerics.spans import Spans

# Queries of a piece: from MIN_CHUNK to CHUNK, so that it has about SCORES scores.
CHUNK, MIN_CHUNK, SCORES = 256, 32, 2**21
# Up to DENSE_SCORES scores, and on a CPU up to DENSE_KEYS keys, all heads are one piece: at decode
# the loop over heads would cost more than pruning saves.
DENSE_SCORES, DENSE_KEYS = 2**20, 2**18

Gradients = tuple[Tensor, Tensor, Tensor]
_Index = tuple[slice, ...]
_ALL: _Index = (slice(None),)


def attend(q: Tensor, k: Tensor, v: Tensor, start: int | Tensor, plan: Plan) -> Tensor:
    """Attention in pieces."""
    # A dense piece reads all keys. A compiled graph serves all lengths, so it always prunes.
    prune = plan.prune and (torch.compiler.is_compiling() or not is_dense(q, k))
    slopes, ends, bound, scale, causal, _, aligned = plan
    plan = Plan(slopes, ends, bound, scale, causal, prune, aligned)
    seen, low, high = needed_keys(q, k, start, plan)
    wide_slopes = torch.atleast_2d(slopes).to(torch.promote_types(q.dtype, torch.float32))
    out: Tensor = attend_op(q, k, v, *seen, low, high, wide_slopes, scale)
    return out


def is_dense(q: Tensor, k: Tensor) -> bool:
    """Whether all heads are one piece, with all keys."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    few_keys = not q.is_cpu or batch * heads * keys <= DENSE_KEYS
    return few_keys and heads * queries * keys <= DENSE_SCORES


def _pieces(q: Tensor, k: Tensor, *plan: Tensor) -> Iterator[tuple[_Index, _Index, Tensor]]:
    """Cut the work in pieces: where the queries are in ``q``, their keys in ``k``, and the bias."""
    own, first, last, low, high, slopes = plan
    (_, heads, queries, _), keys = q.shape, k.shape[2]
    seen = Spans(*(x[:, None, :, None].int() for x in (own, first, last)))
    if is_dense(q, k):
        distance, mask = _distance_and_mask(0, keys, seen, slopes.dtype)
        bias = torch.addcmul(mask, distance, slopes[..., None, None], value=-1)
        yield _ALL, _ALL, bias
        return
    size = max(MIN_CHUNK, min(CHUNK, SCORES // keys))
    for n, ranges in enumerate(_key_ranges(low, high, heads, keys, size)):
        rows = slice(n * size, min((n + 1) * size, queries))
        # Computed once for all heads: distances are the same, and windows are similar.
        start, stop = min(each.start for each in ranges), max(each.stop for each in ranges)
        chunk = Spans(*(x[:, :, rows] for x in seen))
        distance, mask = _distance_and_mask(start, stop, chunk, slopes.dtype)
        for head, each in enumerate(ranges):
            inner = slice(each.start - start, each.stop - start)
            slope = slopes[:, head, None, None, None]
            bias = torch.addcmul(mask[..., inner], distance[..., inner], slope, value=-1)
            kv_head = head * k.shape[1] // heads
            key_index = slice(None), slice(kv_head, kv_head + 1), each
            yield (slice(None), slice(head, head + 1), rows), key_index, bias
        # Free these before the next are allocated.
        del distance, mask, bias


def _distance_and_mask(
    start: int, stop: int, seen: Spans, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Distances to keys ``start .. stop - 1``, and minus infinity where they are hidden."""
    index = torch.arange(start, stop, dtype=torch.int32, device=seen.own.device)
    distance = (index - seen.own).abs_().to(dtype)
    hidden = (index < seen.first) | (index > seen.last)
    return distance, torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _key_ranges(low: Tensor, high: Tensor, heads: int, keys: int, size: int) -> list[list[slice]]:
    """The keys that a chunk of ``size`` queries needs, for each chunk and each head.

    The tensors are read once, because each read waits for the device. Queries that see no key get
    one, which the bias hides.
    """
    lows = torch.stack([x.amin((0, 2)) for x in low.split(size, -1)]).clamp(max=keys - 1)
    highs = torch.stack([x.amax((0, 2)) for x in high.split(size, -1)])
    ends = torch.stack([x.expand(-1, heads) for x in (lows, highs)])
    return [
        [slice(a, max(a, b) + 1) for a, b in zip(*chunk, strict=True)]
        for chunk in zip(*ends.tolist(), strict=True)
    ]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    # CPU kernels take a float32 bias beside bfloat16; those of other devices need one dtype.
    # Where the CPU cannot multiply a dtype, float32 is ten to a hundred times faster.
    native = has_native_bf16() if q.dtype == torch.bfloat16 else q.dtype.itemsize > 2
    wide = q.dtype if q.device.type == "cpu" and native else bias.dtype
    mask, gqa = bias.expand(q.shape[0], -1, -1, -1), q.shape[1] != k.shape[1]
    out: Tensor = F.scaled_dot_product_attention(
        q.to(wide), k.to(wide), v.to(wide), attn_mask=mask, scale=scale, enable_gqa=gqa
    )
    return out.to(q.dtype)


def _forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
    *plan, scale = given
    out = _fake(q, k, v)
    if not out.numel():
        return out
    # Autocast would round the wide tensors.
    with torch.autocast(q.device.type, enabled=False):
        for queries, keys, bias in _pieces(q, k, *plan):
            if queries == _ALL:
                return _sdpa(q, k, v, bias, scale).contiguous()
            out[queries] = _sdpa(q[queries], k[keys], v[keys], bias, scale)
    return out


def _gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Gradients:
    *plan, scale = given
    wide = torch.promote_types(q.dtype, torch.float32)
    to_q, to_k, to_v = (x.new_zeros(x.shape, dtype=wide) for x in (q, k, v))
    if grad.numel():
        with torch.autocast(q.device.type, enabled=False):
            for queries, keys, bias in _pieces(q, k, *plan):
                dq, dk, dv = _sdpa_gradients(
                    grad[queries], q[queries], k[keys], v[keys], bias, scale
                )
                to_q[queries] = dq
                to_k[keys] += dk
                to_v[keys] += dv
    return to_q.to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype)


def _sdpa_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float
) -> Gradients:
    r"""Gradients to ``q``, ``k`` and ``v``, in the dtype of the bias.

    .. math:: P = \text{softmax}(S), \quad dV = P^T dO, \quad
              dS = P \odot (dP - \text{rowsum}(P \odot dP)), \quad dP = dO\,V^T
    """
    shared = q.shape[1] // k.shape[1]

    def fold(x: Tensor) -> Tensor:
        """Put the queries of heads that share keys one after the other, as of one head."""
        return x.to(bias.dtype).reshape(x.shape[0], k.shape[1], shared * x.shape[2], x.shape[3])

    q, grad, bias = fold(q), fold(grad), fold(bias.expand(*q.shape[:3], -1))
    k, v = k.to(bias.dtype), v.to(bias.dtype)
    # Out of place, so that a second derivative can be taken through here.
    scores = q @ k.mT * scale + bias
    sees_nothing = scores.amax(-1, keepdim=True) == float("-inf")
    weights = scores.softmax(-1).masked_fill(sees_nothing, 0)
    dp = grad @ v.mT
    ds = (dp - (dp * weights).sum(-1, keepdim=True)) * weights * scale
    dq = (ds @ k).unflatten(2, (shared, -1)).flatten(1, 2)
    return dq, ds.mT @ q, weights.mT @ grad


def _fake(q: Tensor, k: Tensor, v: Tensor, *plan: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _fake_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *plan: Any) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # With create_graph=True autograd records the operations of the backward pass.
    backward = _gradients if torch.is_grad_enabled() else _backward
    return (*backward(grad, *ctx.saved_tensors, ctx.scale), *([None] * 7))


# own, first, last: [1 or B, Q]; low, high: [1 or B, 1 or H, Q]; slopes: [1 or B, H].
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor own, Tensor first, Tensor last, "
    "Tensor low, Tensor high, Tensor slopes, float scale"
)
attend_op = define_op(
    "alibi_chunked", f"({_INPUTS}) -> Tensor", _forward, _fake, _setup_context, _autograd
)
_backward = define_op(
    "alibi_chunked_backward",
    f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)
