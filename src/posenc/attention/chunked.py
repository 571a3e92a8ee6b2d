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

# Queries of a chunk: fewer where there are many keys, so that the bias of a piece stays small.
CHUNK, LEAST = 256, 32
# Scores of a piece, and the most that are made at once for all heads: at decode the loop over
# heads would be the cost.
SCORES = 2**21

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
    """One call of SDPA: some chunks of one head, each with as many keys from its own start."""

    head: int
    rows: slice
    starts: list[int]
    width: int
    bias: Tensor


def _pieces(
    keys: int,
    at: Tensor,
    first: Tensor,
    last: Tensor,
    low: Tensor,
    high: Tensor,
    slopes: Tensor,
    *,
    chunks: int,
) -> Iterator[_Piece]:
    """Calls whose keys, from ``low`` to ``high``, are all that their queries need.

    ``at``, ``first`` and ``last`` are ``[1 or B, Q]``, ``low`` and ``high`` ``[1 or B, 1 or H,
    Q]``, ``slopes`` ``[1 or B, H]``. A piece has up to so many ``chunks``.
    """
    queries, heads = at.shape[-1], slopes.shape[-1]
    size = max(LEAST, min(CHUNK, SCORES // keys))
    # Read here once: a value read in the loop would be waited for each time.
    lows, highs = (_ends(low, heads, size, "min"), _ends(high, heads, size, "max"))
    for rows in _slices(queries, size * chunks):
        # A last chunk that is shorter is a piece of its own.
        whole = rows.start + (rows.stop - rows.start) // size * size
        for part in (slice(rows.start, whole), slice(whole, rows.stop)):
            if part.start < part.stop:
                yield from _of_rows(
                    part, size, keys, at, first, last, slopes, lows=lows, highs=highs
                )


def _of_rows(
    rows: slice,
    size: int,
    keys: int,
    at: Tensor,
    first: Tensor,
    last: Tensor,
    slopes: Tensor,
    *,
    lows: list[list[int]],
    highs: list[list[int]],
) -> Iterator[_Piece]:
    chunks = range(rows.start // size, -(-rows.stop // size))
    widths = [max(hi[c] + 1 - lo[c] for c in chunks) for lo, hi in zip(lows, highs, strict=True)]
    starts = [
        [min(low[c], keys - width) for c in chunks] for low, width in zip(lows, widths, strict=True)
    ]
    # The widest range of a chunk holds every head's: windows are about the same place.
    begins = [min(column) for column in zip(*starts, strict=True)]
    span = max(
        start + width - begin
        for row, width in zip(starts, widths, strict=True)
        for start, begin in zip(row, begins, strict=True)
    )
    # [1 or B, chunks, queries of a chunk, keys]; past the last key nothing is picked.
    index = torch.tensor(begins)[:, None, None] + torch.arange(span)
    index = index.to(at.device)
    own, low, high = (x[:, rows, None].unflatten(1, (len(chunks), -1)) for x in (at, first, last))
    behind = (index - own).abs().to(slopes.dtype)
    hidden = (index < low) | (index > high)
    veil = torch.zeros_like(hidden, dtype=slopes.dtype).masked_fill_(hidden, float("-inf"))
    for h, width in enumerate(widths):
        near = [slice(s - b, s - b + width) for s, b in zip(starts[h], begins, strict=True)]
        steep = slopes[:, h, None, None]
        bias = [
            torch.addcmul(veil[:, c, :, n], behind[:, c, :, n], steep, value=-1)
            for c, n in enumerate(near)
        ]
        yield _Piece(
            h, rows, starts[h], width, bias[0][:, None] if len(bias) == 1 else torch.stack(bias, 1)
        )


def _slices(length: int, step: int) -> list[slice]:
    return [slice(a, min(a + step, length)) for a in range(0, length, step)]


def _ends(x: Tensor, heads: int, size: int, which: str) -> list[list[int]]:
    """Smallest or largest of each chunk, over the sequences, for each head."""
    x = x.amin(0) if which == "min" else x.amax(0)
    chunks = x.split(size, -1)
    ends = torch.stack([c.amin(-1) if which == "min" else c.amax(-1) for c in chunks], -1)
    return ends.expand(heads, -1).tolist()


def _bias(
    keys: int, at: Tensor, first: Tensor, last: Tensor, low: Tensor, high: Tensor, slopes: Tensor
) -> Tensor | None:
    """The bias of all heads at once, ``[1 or B, H, Q, K]``, if it is small."""
    if at.shape[-1] * slopes.shape[-1] * keys > SCORES:
        return None
    index = torch.arange(keys, device=at.device)
    at, first, last = (x[:, None, :, None] for x in (at, first, last))
    behind = (index - at).abs().to(slopes.dtype)
    bias = behind * -slopes[..., None, None]
    return bias.masked_fill((index < first) | (index > last), float("-inf"))


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


def _picked(p: _Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of a piece, ``[B, chunks, ...]``: chunks take the place of heads."""
    group = p.head * k.shape[1] // q.shape[1]
    near = [slice(s, s + p.width) for s in p.starts]
    a = q[:, p.head, p.rows].unflatten(1, (len(near), -1))
    if len(near) == 1:
        return a, k[:, group, None, near[0]], v[:, group, None, near[0]]
    return a, *(torch.stack([x[:, group, n] for n in near], 1) for x in (k, v))


def _forward(q: Tensor, k: Tensor, v: Tensor, *plan: Any) -> Tensor:
    *where, scale = plan
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    if not out.numel():
        return out
    bias = _bias(k.shape[2], *where)
    if bias is not None:
        return _sdpa(q, k, v, bias, scale)
    for p in _pieces(k.shape[2], *where, chunks=1):
        out[:, p.head, p.rows] = _sdpa(*_picked(p, q, k, v), p.bias, scale).flatten(1, 2)
    return out


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *plan: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *where, scale = plan
    if not grad.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    bias = _bias(k.shape[2], *where)
    if bias is not None:
        return _sdpa_gradients(grad, q, k, v, bias, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    to_q = torch.empty_like(q)
    to_k, to_v = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    # SDPA's backward on the CPU runs one thread for each sequence and head.
    chunks = -(-torch.get_num_threads() // len(q)) if q.device.type == "cpu" else 1
    for p in _pieces(k.shape[2], *where, chunks=chunks):
        a, b, c = _picked(p, q, k, v)
        part = grad[:, p.head, p.rows].unflatten(1, (len(p.starts), -1))
        dq, dk, dv = _sdpa_gradients(part, a, b, c, p.bias, scale)
        to_q[:, p.head, p.rows] = dq.flatten(1, 2)
        group = p.head * k.shape[1] // q.shape[1]
        for n, start in enumerate(p.starts):
            to_k[:, group, start : start + p.width] += dk[:, n]
            to_v[:, group, start : start + p.width] += dv[:, n]
    return to_q, to_k.to(k.dtype), to_v.to(v.dtype)


def _sdpa_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        a, b, c = (x.detach().requires_grad_() for x in (q, k, v))
        out = _sdpa(a, b, c, bias, scale)
    dq, dk, dv = torch.autograd.grad(out, (a, b, c), grad)
    return dq, dk, dv


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
