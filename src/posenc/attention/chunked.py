"""Attention in plain torch, a few queries at a time: memory O(L)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posenc._contract.tracing import (
    cpu_flash_attention,
    cpu_flash_gradients,
    has_native_bf16,
    without_autocast,
)
from posenc.attention.biases import Call
from posenc.attention.pieces import Piece, distances, pieces, reverse, sequences

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, None]:
    """The output, the log-sum-exp, and no ranges; see `op`."""
    if not q.shape[:3].numel():
        return *_new_results(q, v), None
    # Autocast would round the wide tensors.
    with without_autocast(q):
        parts = [_forward(q[some], k[some], v[some], alone) for some, alone in sequences(call)]
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(x) for x in zip(*parts, strict=True))
    return out, lse, None


def ranges_like(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """An empty tensor: the ranges of keys are found again in the backward pass."""
    return q.new_empty(0, dtype=torch.int32)


def backward(
    g: Tensor, g_lse: Tensor | None, saved: Sequence[Tensor], call: Call, to_values: bool
) -> Gradients:
    """The gradients of q, k, v and the bias's numbers; see `op`."""
    q, k, v, out, lse, _ = saved
    sees_nothing = lse == float("-inf")
    g_lse = torch.zeros_like(lse) if g_lse is None else g_lse
    # Its weights are zero in the pieces, and not NaN.
    lse, g_lse = lse.masked_fill(sees_nothing, 0.0), g_lse.masked_fill(sees_nothing, 0.0)
    grads = [torch.zeros_like(x, dtype=lse.dtype).contiguous() for x in (q, k, v)]
    values = call.values if to_values else None
    # Contiguous, as the op promises, also if the values are a transpose.
    to = q.new_empty(0) if values is None else q.new_zeros(values.shape, dtype=_exact(q))
    # SDPA's kernel keeps the gradients of the scores to itself.
    flash = values is None and _has_flash(q, v) and not g_lse.any()
    with torch.autocast(q.device.type, enabled=False):
        for some, alone in sequences(call) if lse.numel() else ():
            into = [x[some] for x in grads]
            wide = [_with_dense_rows(x[some].to(lse.dtype)) for x in (g, q, k, v, out, lse)]
            to_bias = None if values is None else _BiasGradient(q[some], k, alone)
            for piece in pieces(q[some], k[some], alone, written=not flash):
                if flash and wide[0][piece.queries].shape[:2].numel() > 1:
                    _flash_gradients(wide, piece, call.scale, into)
                    continue
                ds = _piece_gradients(wide, g_lse[some], piece, call.scale, into)
                if to_bias is not None:
                    to_bias.add(ds, piece)
            if to_bias is not None and values is not None:
                batched = call.kind != "table" and len(values) > 1
                to[some if batched else slice(None)] += to_bias.result(g_lse[some])
    dq, dk, dv = (x.to(q.dtype) for x in grads)
    return dq, dk, dv, to if values is None else to.to(values.dtype)


def _new_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, not yet written."""
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of sequences that see the same keys."""
    wide = torch.promote_types(q.dtype, torch.float32)
    # Where the CPU cannot multiply a dtype, float32 is ten to a hundred times faster.
    native = has_native_bf16() if q.dtype == torch.bfloat16 else q.dtype.itemsize > 2
    flash = _has_flash(q, v)
    work = q.dtype if flash and native else wide
    bare = call.first is not None
    if call.kind == "table" and call.values is not None:
        bare = bare or call.values.amin().item() == float("-inf")
    result, (q1, k1, v1) = None, (_with_dense_rows(x.to(work)) for x in (q, k, v))
    for queries, keys, mask, _ in pieces(q, k, call, written=not flash):
        attend = cpu_flash_attention if flash else _attend
        some, sums = attend(reverse(q1[queries], 2), k1[keys], v1[keys], mask, call.scale)
        if bare and mask is not None:
            sums = sums.masked_fill(mask.amax(-1) == float("-inf"), float("-inf"))
        some, sums = reverse(some, 2), reverse(sums, 2)
        if sums.shape == q.shape[:3]:
            return some.to(q.dtype).contiguous(), sums.contiguous()
        result = _new_results(q, v) if result is None else result
        result[0][queries], result[1][queries] = some, sums
    assert result is not None
    return result


def _with_dense_rows(x: Tensor) -> Tensor:
    """``x``, or a copy where its last axis has a step: SDPA's kernel reads rows as dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _has_flash(q: Tensor, v: Tensor) -> bool:
    return q.is_cpu and q.shape[3] == v.shape[3] > 0


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    shared = q.shape[1] // k.shape[1]
    scores = _unfold(_fold(q, shared) @ k.mT, shared) * scale
    scores = scores if mask is None else scores + mask
    lse = scores.logsumexp(-1)
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)
    weights = (scores - finite[..., None]).exp()
    return _unfold(_fold(weights, shared) @ v, shared), lse


def _fold(x: Tensor, shared: int) -> Tensor:
    """Put the queries of heads that share keys one after the other, as of one head."""
    folded: Tensor = x.unflatten(1, (-1, shared)).flatten(2, 3)
    return folded


def _unfold(x: Tensor, shared: int) -> Tensor:
    unfolded: Tensor = x.unflatten(2, (shared, -1)).flatten(1, 2)
    return unfolded


def _flash_gradients(wide: list[Tensor], piece: Piece, scale: float, into: list[Tensor]) -> None:
    """Add the gradients of a piece to those of q, k and v."""
    queries, keys, mask, _ = piece
    g, q, out, lse = (wide[n][queries].flip(2) for n in (0, 1, 4, 5))
    k, v = wide[2][keys], wide[3][keys]
    to_q, to_k, to_v = cpu_flash_gradients(g, q, k, v, out, lse, mask, scale)
    into[0][queries] = to_q.flip(2)
    into[1][keys].add_(to_k)
    into[2][keys].add_(to_v)


def _piece_gradients(
    wide: list[Tensor], g_lse: Tensor, piece: Piece, scale: float, into: list[Tensor]
) -> Tensor:
    r"""Add the gradients of a piece to those of q, k and v; return that of the scores.

    .. math:: P = e^{S - lse}, \quad dV = P^T dO, \quad dP = dO\,V^T, \quad
              dS = P \odot (dP - \text{rowsum}(O \odot dO) + d\,lse)
    """
    queries, keys, mask, _ = piece
    g, q, out, lse = (wide[n][queries].flip(2) for n in (0, 1, 4, 5))
    shift = (g * out).sum(-1) - g_lse[queries].flip(2)
    k, v = wide[2][keys], wide[3][keys]
    shared = q.shape[1] // k.shape[1]
    q, g = _fold(q, shared), _fold(g, shared)
    # A product with a transposed matrix that lies in memory as such is up to twice as fast.
    scores = _unfold(q @ k.mT.contiguous(), shared).mul_(scale)
    if mask is not None:
        scores += mask
    weights = scores.sub_(lse[..., None]).exp_()
    ds = _unfold(g @ v.mT.contiguous(), shared).sub_(shift[..., None]).mul_(weights)
    folded = _fold(ds, shared)
    into[0][queries] = _unfold(folded @ k, shared).mul_(scale).flip(2)
    into[1][keys].add_(folded.mT @ q, alpha=scale)
    into[2][keys].add_(_fold(weights, shared).mT @ g)
    return ds


def _exact(x: Tensor) -> torch.dtype:
    """A dtype for long sums."""
    return torch.float64 if x.is_cpu else torch.promote_types(x.dtype, torch.float32)


class _BiasGradient:
    """The gradient of the bias's numbers, summed over pieces."""

    def __init__(self, q: Tensor, k: Tensor, call: Call) -> None:
        self.call = call
        self.distance = distances(call, q.shape[2], k.shape[2], q.device)
        width = len(self.distance)
        if call.kind == "sums" and call.values is not None:
            width = call.values.shape[2]
        self.sums = q.new_zeros((*q.shape[:2], width), dtype=_exact(q))

    def add(self, ds: Tensor, piece: Piece) -> None:
        """Add the gradient of a piece's scores: by key for running sums, else by distance."""
        heads, keys = piece.queries[1], piece.keys[2]
        if self.call.kind == "sums":
            self.sums[:, heads, keys].sub_(ds.sum(2))
            return
        *some, n, m = ds.shape
        width = n + m - 1
        # Each row starts one place after that above, so that diagonals become columns.
        spread = ds.new_zeros((*some, n, width))
        spread.as_strided(ds.shape, (*spread.stride()[:2], width + 1, 1)).copy_(ds)
        self.sums[:, heads, piece.at : piece.at + width].add_(spread.sum(2))

    def result(self, g_lse: Tensor) -> Tensor:
        """The gradient, of the shape of the values."""
        call, sums = self.call, self.sums
        assert call.values is not None
        if call.kind == "table":
            columns = (self.distance + call.zero).clamp(0, call.values.shape[1] - 1)
            return torch.zeros_like(call.values, dtype=sums.dtype).index_add_(
                1, columns, sums.sum(0)
            )
        if call.kind == "slopes":
            return -(sums * self.distance.abs()).sum(-1).sum_to_size(call.values.shape)
        # The gradients of a query's scores sum to that of its log-sum-exp.
        sums[:, :, call.start : call.start + g_lse.shape[2]] += g_lse
        return sums.sum_to_size(call.values.shape)
