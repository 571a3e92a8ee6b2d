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

# Queries of a piece. With fewer SDPA's own tiles get small, with more the bias leaves the cache.
CHUNK = 256
# Scores that are made at once for all heads: at decode the loop over heads would be the cost.
WHOLE = 2**21

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
    """One call of SDPA."""

    heads: slice
    key_heads: slice
    rows: slice
    columns: slice
    bias: Tensor


def _pieces(
    heads: int,
    key_heads: int,
    at: Tensor,
    first: Tensor,
    last: Tensor,
    low: Tensor,
    high: Tensor,
    slopes: Tensor,
) -> Iterator[_Piece]:
    """Calls whose keys, from ``low`` to ``high``, are all that their queries need.

    ``at``, ``first`` and ``last`` are ``[1 or B, Q]``, ``low`` and ``high`` ``[1 or B, 1 or H,
    Q]``, ``slopes`` ``[1 or B, H]``.
    """
    queries = at.shape[-1]
    # Read here once: a value read in the loop would be waited for each time.
    lows, highs = (_ends(low, heads, "min"), _ends(high, heads, "max"))
    whole = heads * queries * (max(map(max, highs)) + 1 - min(map(min, lows))) <= WHOLE
    rows_of = [slice(0, queries)] if whole else _slices(queries, CHUNK)
    share = heads // key_heads
    for rows in rows_of:
        chunks = slice(rows.start // CHUNK, -(-rows.stop // CHUNK))
        starts = [min(head[chunks]) for head in lows]
        stops = [max(head[chunks]) + 1 for head in highs]
        index = torch.arange(min(starts), max(stops), device=at.device)
        behind = (index - at[:, None, rows, None]).abs().to(slopes.dtype)
        hidden = (index < first[:, None, rows, None]) | (index > last[:, None, rows, None])
        veil = torch.zeros_like(behind).masked_fill(hidden, float("-inf"))
        for some in [slice(0, heads)] if whole else _slices(heads, 1):
            columns = slice(min(starts[some]), max(stops[some]))
            near = slice(columns.start - min(starts), columns.stop - min(starts))
            steep = slopes[:, some, None, None]
            bias = torch.addcmul(veil[..., near], behind[..., near], steep, value=-1)
            groups = slice(some.start // share, (some.stop - 1) // share + 1)
            yield _Piece(some, groups, rows, columns, bias)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(a, min(a + step, length)) for a in range(0, length, step)]


def _ends(x: Tensor, heads: int, which: str) -> list[list[int]]:
    """Smallest or largest of each chunk, over the sequences, for each head."""
    x = x.amin(0) if which == "min" else x.amax(0)
    chunks = x.split(CHUNK, -1)
    ends = torch.stack([c.amin(-1) if which == "min" else c.amax(-1) for c in chunks], -1)
    return ends.expand(heads, -1).tolist()


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    # CPU kernels take a float32 bias beside halves; those of other devices want one dtype.
    wide = q.dtype if q.device.type == "cpu" else bias.dtype
    out = F.scaled_dot_product_attention(
        q.to(wide),
        k.to(wide),
        v.to(wide),
        attn_mask=bias.expand(len(q), -1, -1, -1),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.to(q.dtype)


def _forward(q: Tensor, k: Tensor, v: Tensor, *plan: Any) -> Tensor:
    *where, scale = plan
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    for p in _pieces(q.shape[1], k.shape[1], *where) if out.numel() else ():
        near = slice(None), p.key_heads, p.columns
        picked = q[:, p.heads, p.rows], k[near], v[near]
        out[:, p.heads, p.rows] = _sdpa(*picked, p.bias, scale)
    return out


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *plan: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *where, scale = plan
    wide = torch.promote_types(q.dtype, torch.float32)
    to_q = torch.empty_like(q)
    to_k, to_v = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    for p in _pieces(q.shape[1], k.shape[1], *where) if grad.numel() else ():
        near = slice(None), p.key_heads, p.columns
        picked = q[:, p.heads, p.rows], k[near], v[near]
        with torch.enable_grad():
            a, b, c = (x.detach().requires_grad_() for x in picked)
            out = _sdpa(a, b, c, p.bias, scale)
        dq, dk, dv = torch.autograd.grad(out, (a, b, c), grad[:, p.heads, p.rows])
        to_q[:, p.heads, p.rows] = dq
        to_k[near] += dk
        to_v[near] += dv
    return to_q, to_k.to(k.dtype), to_v.to(v.dtype)


LIBRARY.impl("alibi_chunked", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("alibi_chunked_backward", _gradients, "CompositeExplicitAutograd")


@torch.library.register_fake("posenc::alibi_chunked", lib=LIBRARY)
def _(q: Tensor, k: Tensor, v: Tensor, *plan: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


@torch.library.register_fake("posenc::alibi_chunked_backward", lib=LIBRARY)
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *plan: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*_backward(grad, *ctx.saved_tensors, ctx.scale), *([None] * 7))


torch.library.register_autograd("posenc::alibi_chunked", _back, setup_context=_keep, lib=LIBRARY)
