"""ALiBi attention in plain torch, a few queries of one head at a time: memory O(L).

An op, ``posenc::alibi_chunked``, because how it is cut depends on values: a compiler sees one
call. Its backward makes every piece again, so nothing of size ``Q × K`` is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from posenc._contract import checks

# Queries of a chunk: fewer where there are many keys, so that the bias of a piece stays small.
CHUNK, LEAST = 256, 32
# Scores of a piece, and the most that are made at once for all heads: at decode the loop over
# heads would be the cost, until, on a CPU, there are so many keys that reading all of them is.
SCORES, AT_ONCE, KEYS_AT_ONCE = 2**21, 2**20, 2**18

_PLAN = "Tensor at, Tensor first, Tensor last, Tensor low, Tensor high, Tensor slopes, float scale"
LIBRARY = torch.library.Library("posenc", "FRAGMENT")
LIBRARY.define(f"alibi_chunked(Tensor q, Tensor k, Tensor v, {_PLAN}) -> Tensor")
LIBRARY.define(
    f"alibi_chunked_backward(Tensor grad, Tensor q, Tensor k, Tensor v, {_PLAN})"
    " -> (Tensor, Tensor, Tensor)"
)

attend = torch.ops.posenc.alibi_chunked.default
_backward = torch.ops.posenc.alibi_chunked_backward.default


class _Piece(NamedTuple):
    """Some queries of one head, the keys they need, and the bias between them."""

    head: int
    rows: slice
    keys: slice
    bias: Tensor


def _pieces(
    keys: int, at: Tensor, first: Tensor, last: Tensor, low: Tensor, high: Tensor, slopes: Tensor
) -> Iterator[_Piece]:
    """All queries of all heads, each piece with the keys from its least ``low`` to its ``high``.

    ``at``, ``first`` and ``last`` are ``[1 or B, Q]``, ``low`` and ``high`` ``[1 or B, 1 or H,
    Q]``, ``slopes`` ``[1 or B, H]``.
    """
    queries, heads = at.shape[-1], slopes.shape[-1]
    size = max(LEAST, min(CHUNK, SCORES // keys))
    # Read here once: a value read in the loop would be waited for each time.
    lows, highs = (_ends(low, heads, size, "min"), _ends(high, heads, size, "max"))
    for n, rows in enumerate(_slices(queries, size)):
        near = [_range(lows[h][n], highs[h][n], keys) for h in range(heads)]
        # Distances are the same for all heads, and windows are about the same place.
        begin = min(part.start for part in near)
        end = max(part.stop for part in near)
        own, least, most = (x[:, rows, None] for x in (at, first, last))
        behind, veil = _between(begin, end, own, least, most, slopes.dtype)
        for h, part in enumerate(near):
            inner = slice(part.start - begin, part.stop - begin)
            steep = slopes[:, h, None, None]
            bias = torch.addcmul(veil[..., inner], behind[..., inner], steep, value=-1)
            yield _Piece(h, rows, part, bias[:, None])
        # Not to be held while the next are made.
        del behind, veil, bias


def _between(
    begin: int, end: int, at: Tensor, first: Tensor, last: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Distances to keys ``begin .. end - 1``, and minus infinity where they are hidden."""
    index = torch.arange(begin, end, dtype=torch.int32, device=at.device)
    behind = (index - at.int()).abs_().to(dtype)
    hidden = (index < first.int()) | (index > last.int())
    veil = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return behind, veil


def _range(low: int, high: int, keys: int) -> slice:
    """From ``low`` to ``high``; one key, which the bias hides, for queries that see none."""
    low = min(low, keys - 1)
    return slice(low, max(low, high) + 1)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(a, min(a + step, length)) for a in range(0, length, step)]


def _ends(x: Tensor, heads: int, size: int, which: str) -> list[list[int]]:
    """Smallest or largest of each chunk, over the sequences, for each head."""
    x = x.amin(0) if which == "min" else x.amax(0)
    chunks = x.split(size, -1)
    ends = torch.stack([c.amin(-1) if which == "min" else c.amax(-1) for c in chunks], -1)
    return ends.expand(heads, -1).tolist()


def at_once(q: Tensor, k: Tensor) -> bool:
    """Whether all heads are taken together, and with all keys."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    few_keys = not q.is_cpu or batch * heads * keys <= KEYS_AT_ONCE
    return few_keys and heads * queries * keys <= AT_ONCE


def _bias(
    keys: int, at: Tensor, first: Tensor, last: Tensor, low: Tensor, high: Tensor, slopes: Tensor
) -> Tensor:
    """The bias of all heads at once, ``[1 or B, H, Q, K]``."""
    at, first, last = (x[:, None, :, None] for x in (at, first, last))
    behind, veil = _between(0, keys, at, first, last, slopes.dtype)
    return torch.addcmul(veil, behind, slopes[..., None, None], value=-1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    # CPU kernels take a float32 bias beside halves; those of other devices want one dtype.
    wide = q.dtype if q.device.type == "cpu" and _multiplied(q.dtype) else bias.dtype
    out: Tensor = F.scaled_dot_product_attention(
        q.to(wide),
        k.to(wide),
        v.to(wide),
        attn_mask=bias.expand(q.shape[0], -1, -1, -1),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.to(q.dtype)


def _multiplied(dtype: torch.dtype) -> bool:
    """Whether CPUs multiply it in hardware; where not, float32 is ten to a hundred times faster."""
    if dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype.itemsize > 2


def _picked(p: _Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a piece, ``[B, 1, ...]``."""
    group = p.head * k.shape[1] // q.shape[1]
    return q[:, p.head, None, p.rows], k[:, group, None, p.keys], v[:, group, None, p.keys]


def _check(q: Tensor, k: Tensor, v: Tensor, *plan: Any) -> None:
    """Refuse what would leave part of the result unwritten: anyone may call an op."""
    *where, slopes, _ = plan
    batch, heads, queries, width = q.shape
    fits = k.shape == (batch, k.shape[1], v.shape[2], width) and k.shape[:2] == v.shape[:2]
    fits = fits and heads % k.shape[1] == 0 and slopes.shape[-1] == heads
    if not fits or any(each.shape[-1] != queries for each in where):
        rule = "q, k, v must be (B, H, Q, D), (B, Hk, K, D), (B, Hk, K, Dv), one slope for a head"
        got = ", ".join(str(tuple(each.shape)) for each in (q, k, v, *where, slopes))
        way_out = "Call posenc.attention.alibi_attention, which prepares these."
        raise ValueError(checks.message("alibi_chunked", rule, got, way_out))


def _forward(q: Tensor, k: Tensor, v: Tensor, *plan: Any) -> Tensor:
    _check(q, k, v, *plan)
    # What is cast for speed would be cast back.
    with torch.autocast(q.device.type, enabled=False):
        return _attended(q, k, v, *plan)


def _attended(q: Tensor, k: Tensor, v: Tensor, *plan: Any) -> Tensor:
    *where, scale = plan
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    if not out.numel():
        return out
    if at_once(q, k):
        return _sdpa(q, k, v, _bias(k.shape[2], *where), scale).contiguous()
    for p in _pieces(k.shape[2], *where):
        out[:, p.head, p.rows] = _sdpa(*_picked(p, q, k, v), p.bias, scale)[:, 0]
    return out


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *plan: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, *plan)
    with torch.autocast(q.device.type, enabled=False):
        to_q, to_k, to_v = _summed(grad, q, k, v, *plan)
    return to_q.to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype)


def _summed(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *plan: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *where, scale = plan
    if grad.numel() and at_once(q, k):
        return _sdpa_gradients(grad, q, k, v, _bias(k.shape[2], *where), scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    to_q, to_k, to_v = (x.new_zeros(x.shape, dtype=wide) for x in (q, k, v))
    if not grad.numel():
        return to_q, to_k, to_v
    for p in _pieces(k.shape[2], *where):
        above = grad[:, p.head, None, p.rows]
        dq, dk, dv = _sdpa_gradients(above, *_picked(p, q, k, v), p.bias, scale)
        to_q[:, p.head, p.rows] = dq[:, 0]
        group = p.head * k.shape[1] // q.shape[1]
        to_k[:, group, p.keys] += dk[:, 0]
        to_v[:, group, p.keys] += dv[:, 0]
    return to_q, to_k, to_v


def _sdpa_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Gradients to ``q``, ``k`` and ``v``, in the dtype of the bias.

    .. math:: P = \text{softmax}(S), \quad dV = P^T dO, \quad
              dS = P \odot (dP - \text{rowsum}(P \odot dP)), \quad dP = dO\,V^T
    """
    shared = q.shape[1] // k.shape[1]

    def folded(x: Tensor) -> Tensor:
        """Heads that share keys as one, with all their queries."""
        return x.to(bias.dtype).reshape(x.shape[0], k.shape[1], shared * x.shape[2], x.shape[3])

    q, grad, bias = folded(q), folded(grad), folded(bias.expand(*q.shape[:3], -1))
    k, v = k.to(bias.dtype), v.to(bias.dtype)
    # Out of place, so that a second derivative can be taken through here.
    scores = q @ k.mT * scale + bias
    nothing = scores.amax(-1, keepdim=True) == float("-inf")
    weights = scores.softmax(-1).masked_fill(nothing, 0)
    slope = grad @ v.mT
    slope = (slope - (slope * weights).sum(-1, keepdim=True)) * weights * scale
    to_q = (slope @ k).unflatten(2, (shared, -1)).flatten(1, 2)
    return to_q, slope.mT @ q, weights.mT @ grad


LIBRARY.impl("alibi_chunked", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("alibi_chunked_backward", _gradients, "CompositeExplicitAutograd")


@torch.library.register_fake("posenc::alibi_chunked", lib=LIBRARY)
def _(q: Tensor, k: Tensor, v: Tensor, *plan: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


@torch.library.register_fake("posenc::alibi_chunked_backward", lib=LIBRARY)
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *plan: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if any(ctx.needs_input_grad[3:]):
        rule = "nothing but q, k and v must have a gradient in pieces"
        way_out = "alibi_attention takes all scores at once for one to the slopes."
        raise RuntimeError(checks.message("alibi_chunked", rule, "another that has", way_out))
    # Where a gradient of the gradient may be asked for, the steps themselves are recorded.
    back = _gradients if torch.is_grad_enabled() else _backward
    return (*back(grad, *ctx.saved_tensors, ctx.scale), *([None] * 7))


torch.library.register_autograd("posenc::alibi_chunked", _back, setup_context=_keep, lib=LIBRARY)
