"""ALiBi attention in plain torch, a few queries of one head at a time: memory O(L).

It is a custom op, ``posenc::alibi_chunked``, because the sizes of its pieces depend on values,
which a compiler cannot trace. Its backward recomputes every piece: nothing of size ``Q × K`` is
saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from posenc._contract import checks
from posenc._contract.tracing import has_native_bf16
from posenc.kernels.ops import define_op
from posenc.numerics.spans import Spans

# Queries of a piece: from MIN_CHUNK to CHUNK, so that it has about SCORES scores.
CHUNK, MIN_CHUNK, SCORES = 256, 32, 2**21
# All heads are one piece up to DENSE_SCORES scores: at decode the loop over heads would cost more
# than pruning saves, except, on a CPU, with more than DENSE_KEYS keys to read.
DENSE_SCORES, DENSE_KEYS = 2**20, 2**18

Gradients = tuple[Tensor, Tensor, Tensor]


class _Piece(NamedTuple):
    """Some queries of some heads, the keys they need, and the bias between them."""

    heads: slice
    kv_heads: slice
    rows: slice
    keys: slice
    bias: Tensor

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, keys and values of this piece."""
        key_rows = (slice(None), self.kv_heads, self.keys)
        return q[:, self.heads, self.rows], k[key_rows], v[key_rows]


def is_dense(q: Tensor, k: Tensor) -> bool:
    """Whether all heads are one piece, with all keys."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    few_keys = not q.is_cpu or batch * heads * keys <= DENSE_KEYS
    return few_keys and heads * queries * keys <= DENSE_SCORES


def _pieces(q: Tensor, k: Tensor, *plan: Tensor) -> Iterator[_Piece]:
    """All queries of all heads, each piece with the keys that it needs."""
    own, first, last, low, high, slopes = plan
    (_, heads, queries, _), keys = q.shape, k.shape[2]
    seen = Spans(*(x[:, None, :, None].int() for x in (own, first, last)))
    if is_dense(q, k):
        distance, mask = _distance_and_mask(0, keys, seen, slopes.dtype)
        bias = torch.addcmul(mask, distance, slopes[..., None, None], value=-1)
        yield _Piece(slice(None), slice(None), slice(None), slice(None), bias)
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
            yield _Piece(slice(head, head + 1), slice(kv_head, kv_head + 1), rows, each, bias)
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
    # CPU kernels take a float32 bias beside bfloat16; those of other devices want one dtype.
    # Where the CPU cannot multiply a dtype, float32 is ten to a hundred times faster.
    native = has_native_bf16() if q.dtype == torch.bfloat16 else q.dtype.itemsize > 2
    wide = q.dtype if q.device.type == "cpu" and native else bias.dtype
    mask, gqa = bias.expand(q.shape[0], -1, -1, -1), q.shape[1] != k.shape[1]
    out: Tensor = F.scaled_dot_product_attention(
        q.to(wide), k.to(wide), v.to(wide), attn_mask=mask, scale=scale, enable_gqa=gqa
    )
    return out.to(q.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, *plan: Any) -> None:
    """Refuse shapes that would leave part of the result unwritten: users can call the op."""
    *queries, slopes, _ = plan
    batch, heads, length, width = q.shape
    fits = k.shape == (batch, k.shape[1], v.shape[2], width) and k.shape[:2] == v.shape[:2]
    fits = fits and heads % k.shape[1] == 0 and slopes.shape[-1] == heads
    if not fits or any(each.shape[-1] != length for each in queries):
        rule = "q, k, v must be (B, H, Q, D), (B, Hk, K, D), (B, Hk, K, Dv), one slope for a head"
        got = ", ".join(str(tuple(each.shape)) for each in (q, k, v, *queries, slopes))
        checks.fail("alibi_chunked", rule, got, "Call posenc.attention.alibi_attention instead.")


def _forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
    _check(q, k, v, *given)
    *plan, scale = given
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    if not out.numel():
        return out
    # Autocast would round the wide tensors.
    with torch.autocast(q.device.type, enabled=False):
        for p in _pieces(q, k, *plan):
            if p.heads == slice(None):
                return _sdpa(q, k, v, p.bias, scale).contiguous()
            out[:, p.heads, p.rows] = _sdpa(*p.take(q, k, v), p.bias, scale)
    return out


def _gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Gradients:
    *plan, scale = given
    wide = torch.promote_types(q.dtype, torch.float32)
    to_q, to_k, to_v = (x.new_zeros(x.shape, dtype=wide) for x in (q, k, v))
    if grad.numel():
        with torch.autocast(q.device.type, enabled=False):
            for p in _pieces(q, k, *plan):
                above = grad[:, p.heads, p.rows]
                dq, dk, dv = _sdpa_gradients(above, *p.take(q, k, v), p.bias, scale)
                to_q[:, p.heads, p.rows] = dq
                to_k[:, p.kv_heads, p.keys] += dk
                to_v[:, p.kv_heads, p.keys] += dv
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
    if any(ctx.needs_input_grad[3:]):
        rule = "nothing but q, k and v may require a gradient"
        way_out = "Call alibi_attention, whose dense backend has gradients to the slopes."
        checks.fail("alibi_chunked", rule, "another tensor that does", way_out, RuntimeError)
    # With create_graph=True autograd records the operations of the backward pass.
    backward = _gradients if torch.is_grad_enabled() else _backward
    return (*backward(grad, *ctx.saved_tensors, ctx.scale), *([None] * 7))


# own, first, last: [1 or B, Q]; low, high: [1 or B, 1 or H, Q]; slopes: [1 or B, H].
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor own, Tensor first, Tensor last, "
    "Tensor low, Tensor high, Tensor slopes, float scale"
)
attend = define_op(
    "alibi_chunked", f"({_INPUTS}) -> Tensor", _forward, _fake, _setup_context, _autograd
)
_backward = define_op(
    "alibi_chunked_backward",
    f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)
