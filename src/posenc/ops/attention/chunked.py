"""Attention in plain torch for the CPU and other devices: a few queries at a time, memory O(L).

A piece is a few queries of some heads, the keys that they need, and their bias. Its queries are in
reversed order: the bias of query ``n - 1 - r`` and key ``c`` then depends only on ``r + c``, so one
line of numbers, seen with both strides one, is the whole matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc._contract.tracing import (
    cpu_flash_attention,
    cpu_flash_gradients,
    has_native_bf16,
    without_autocast,
)
from posenc.ops.attention.biases import NUMBERS, DistanceTable, RunningSum, Slopes
from posenc.ops.attention.call import Call
from posenc.ops.attention.pruning import needed_keys

# Queries of a piece, at least and at most: few skip more hidden keys, many multiply faster. At most
# SCORES scores are written down at once.
ROWS, CHUNK, SCORES = 128, 256, 2**21
# Up to DENSE_SCORES scores, and on a CPU up to DENSE_KEYS keys, nothing is pruned: to find the keys
# would cost more than it saves.
DENSE_SCORES, DENSE_KEYS = 2**22, 2**18

Index = tuple[slice, slice, slice]


class Piece(NamedTuple):
    """Queries and keys by their indices in q and k, and the mask ``[1 or B, 1 or h, n, m]``."""

    queries: Index
    keys: Index
    mask: Tensor | None
    at: int  # where its first distance is in the line


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp."""
    if not q.shape[:3].numel():
        return _new_results(q, v)
    # Autocast would round the wide tensors, and refuses a join of halves that are not its own.
    with without_autocast(q):
        parts = [_forward(q[some], k[some], v[some], alone) for some, alone in _sequences(call)]
        out, lse = parts[0] if len(parts) == 1 else (torch.cat(x) for x in zip(*parts, strict=True))
    return out, lse


def backward(
    g: Tensor, g_lse: Tensor | None, saved: Sequence[Tensor], call: Call, to_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the bias's numbers; see `op`."""
    q, k, v, out, lse = saved
    sees_nothing = lse == float("-inf")
    g_lse = torch.zeros_like(lse) if g_lse is None else g_lse
    # The weights of such a query are zero in the pieces, and not NaN.
    lse, g_lse = lse.masked_fill(sees_nothing, 0.0), g_lse.masked_fill(sees_nothing, 0.0)
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype).contiguous() for x in (q, k, v))
    bias = call.bias
    values = bias.values if to_bias and isinstance(bias, NUMBERS) else None
    # Contiguous, as the op promises, also if the values are a transpose.
    to = q.new_empty(0) if values is None else q.new_zeros(values.shape, dtype=_exact(q))
    # SDPA's kernel returns no gradients of the scores.
    flash = values is None and _has_flash(q, v) and not g_lse.any()
    with torch.autocast(q.device.type, enabled=False):
        for some, alone in _sequences(call) if lse.numel() else ():
            of_rows = [_with_dense_rows(x[some].to(lse.dtype)) for x in (g, q, out, lse, g_lse)]
            k1, v1 = (_with_dense_rows(x[some].to(lse.dtype)) for x in (k, v))
            bias_gradient = None if values is None else _BiasGradient(q[some], k, alone)
            for piece in _pieces(q[some], k[some], alone, written=not flash):
                queries, keys, mask, _ = piece
                g1, q1, out1, lse1, g_lse1 = (x[queries].flip(2) for x in of_rows)
                given = g1, q1, k1[keys], v1[keys], out1, lse1, mask, call.scale
                if flash and q1.shape[:2].numel() > 1:
                    to_q, to_k, to_v = cpu_flash_gradients(*given)
                else:
                    to_q, to_k, to_v, to_scores = _gradients(*given, g_lse1)
                    if bias_gradient is not None:
                        bias_gradient.add(to_scores, piece)
                dq[some][queries] = to_q.flip(2)
                dk[some][keys].add_(to_k)
                dv[some][keys].add_(to_v)
            if bias_gradient is not None and values is not None:
                batched = not isinstance(bias, DistanceTable) and len(values) > 1
                to[some if batched else slice(None)] += bias_gradient.result()
    dq, dk, dv = (x.to(q.dtype) for x in (dq, dk, dv))
    return dq, dk, dv, to if values is None else to.to(values.dtype)


def _sequences(call: Call) -> Iterator[tuple[slice, Call]]:
    """Split a call where sequences see different keys; in each part, `start` is an int."""
    if call.starts is None and call.first is None:
        yield slice(None), call
        return
    count = max(len(x) for x in (call.starts, call.first, call.padding) if x is not None)
    starts = [call.start] if call.starts is None else call.starts.tolist()

    def of(x: Any, b: int) -> Any:
        return x if x is None or len(x) == 1 else x[b : b + 1]

    for b in range(count):
        bias = call.bias
        if isinstance(bias, (Slopes, RunningSum)) and count > 1:
            bias = bias._replace(values=of(bias.values, b))
        alone = call._replace(bias=bias, starts=None, start=starts[min(b, len(starts) - 1)])
        places = {name: of(getattr(call, name), b) for name in ("first", "last", "padding")}
        alone = alone._replace(**places)
        yield slice(None) if count == 1 else slice(b, b + 1), alone


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
    may_see_nothing = call.first is not None or call.padding is not None
    if isinstance(call.bias, DistanceTable):
        may_see_nothing = may_see_nothing or call.bias.values.amin().item() == float("-inf")
    result, (q1, k1, v1) = None, (_with_dense_rows(x.to(work)) for x in (q, k, v))
    for queries, keys, mask, _ in _pieces(q, k, call, written=not flash):
        attend = cpu_flash_attention if flash else _attend
        some, sums = attend(_reverse(q1[queries]), k1[keys], v1[keys], mask, call.scale)
        if may_see_nothing and mask is not None:
            sums = sums.masked_fill(mask.amax(-1) == float("-inf"), float("-inf"))
        some, sums = _reverse(some), _reverse(sums)
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


def _reverse(x: Tensor) -> Tensor:
    """The queries of ``x`` in reversed order; one query needs no copy."""
    return x if x.shape[2] == 1 else x.flip(2)


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


def _gradients(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    g_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""The gradients of a piece to q, k, v and the scores.

    .. math:: P = e^{S - lse}, \quad dV = P^T dO, \quad dP = dO\,V^T, \quad
              dS = P \odot (dP - \text{rowsum}(O \odot dO) + d\,lse)
    """
    shift = (g * out).sum(-1) - g_lse
    shared = q.shape[1] // k.shape[1]
    q, g = _fold(q * scale, shared), _fold(g, shared)
    # A product with a transposed matrix that lies in memory as such is up to twice as fast.
    scores = _unfold(q @ k.mT.contiguous(), shared)
    if mask is not None:
        scores += mask
    weights = scores.sub_(lse[..., None]).exp_()
    ds = _unfold(g @ v.mT.contiguous(), shared).sub_(shift[..., None]).mul_(weights)
    folded = _fold(ds, shared)
    to_q = _unfold(folded @ k, shared).mul_(scale)
    return to_q, folded.mT @ q, _fold(weights, shared).mT @ g, ds


def _exact(x: Tensor) -> torch.dtype:
    """A dtype for long sums."""
    return torch.float64 if x.is_cpu else torch.promote_types(x.dtype, torch.float32)


class _BiasGradient:
    """The gradient of the bias's numbers, summed over pieces."""

    def __init__(self, q: Tensor, k: Tensor, call: Call) -> None:
        self.call = call
        self.distance = _distances(call, q.shape[2], k.shape[2], q.device)
        width = len(self.distance)
        if isinstance(call.bias, RunningSum):
            width = call.bias.values.shape[2]
        self.sums = q.new_zeros((*q.shape[:2], width), dtype=_exact(q))

    def add(self, ds: Tensor, piece: Piece) -> None:
        """Add the gradient of a piece's scores: by place for running sums, else by distance."""
        _, heads, rows = piece.queries
        if isinstance(self.call.bias, RunningSum):
            # The sums of a query's scores would be the gradient of its log-sum-exp, but for the
            # rounding of the output; gradients of gates, which add all of these, would drift.
            start = self.call.start
            self.sums[:, heads, piece.keys[2]].sub_(ds.sum(2))
            self.sums[:, heads, start + rows.start : start + rows.stop].add_(ds.sum(3).flip(2))
            return
        *some, n, m = ds.shape
        width = n + m - 1
        # Each row starts one place after that above, so that diagonals become columns.
        spread = ds.new_zeros((*some, n, width))
        spread.as_strided(ds.shape, (*spread.stride()[:2], width + 1, 1)).copy_(ds)
        self.sums[:, heads, piece.at : piece.at + width].add_(spread.sum(2))

    def result(self) -> Tensor:
        """The gradient, of the shape of the values."""
        bias, sums = self.call.bias, self.sums
        assert isinstance(bias, NUMBERS)
        if isinstance(bias, DistanceTable):
            columns = (self.distance + bias.zero).clamp(0, bias.values.shape[1] - 1)
            to = torch.zeros_like(bias.values, dtype=sums.dtype)
            return to.index_add_(1, columns, sums.sum(0))
        if isinstance(bias, Slopes):
            sums = -(sums * self.distance.abs()).sum(-1)
        return sums.sum_to_size(bias.values.shape)


def _distances(call: Call, queries: int, keys: int, device: torch.device) -> Tensor:
    """The distances of all queries and keys, each once, falling."""
    seen = min(keys, call.start + queries) if call.causal else keys
    return torch.arange(call.start + queries - 1, call.start - seen, -1, device=device)


def is_dense(q: Tensor, k: Tensor) -> bool:
    """Whether there are too few scores to prune."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    few_keys = not q.is_cpu or batch * heads * keys <= DENSE_KEYS
    return few_keys and heads * queries * keys <= DENSE_SCORES


def _pieces(q: Tensor, k: Tensor, call: Call, *, written: bool) -> Iterator[Piece]:
    """Cut the work; ``written`` says whether the caller writes all scores of a piece down."""
    batch, heads, queries, _ = q.shape
    shared = heads // k.shape[1]
    pruned = call.prunes and not is_dense(q, k)
    size = min(CHUNK, max(ROWS, queries // 512 * 64), queries)
    bias = _Bias(q, k, call)
    ranges = _key_ranges(q, k, call._replace(prune=pruned), size)
    for n, each in enumerate(ranges):
        some = slice(n * size, min((n + 1) * size, queries))
        group = heads
        if len(each) > 1:
            group = 1
        elif written or bias.is_written:
            scores = batch * shared * size * (each[0].stop - each[0].start)
            group = shared * min(heads // shared, max(1, SCORES // scores))
        for h in range(0, heads, group):
            which = slice(h, min(h + group, heads))
            some_keys = each[h] if len(each) > 1 else each[0]
            kv = slice(h // shared, (which.stop - 1) // shared + 1)
            mask, at = bias.piece(which, some, some_keys)
            yield Piece((slice(None), which, some), (slice(None), kv, some_keys), mask, at)


def _key_ranges(q: Tensor, k: Tensor, call: Call, size: int) -> list[list[slice]]:
    """The keys that each chunk of ``size`` queries needs: one range for all heads, or for each.

    The tensors are read once, because each read waits for the device. Queries that see no key get
    one, which the mask hides.
    """
    queries, keys = q.shape[2], k.shape[2]
    if not call.prune and call.first is None and call.window is None:
        stops = [call.start + min(n + size, queries) for n in range(0, queries, size)]
        return [[slice(0, min(stop, keys) if call.causal else keys)] for stop in stops]
    low, high = needed_keys(q, k, call)
    # A key that a causal line of distances has, also where padding sees none.
    most = min(keys, call.start + queries) - 1 if call.causal else keys - 1
    lows = torch.stack([x.amin((0, 2)) for x in low.split(size, -1)]).clamp(0, most)
    highs = torch.stack([x.amax((0, 2)) for x in high.split(size, -1)]).clamp(max=most)
    ends = torch.stack(torch.broadcast_tensors(lows, highs)).tolist()
    ranges = []
    for chunk in zip(*ends, strict=True):
        each = [slice(a, max(a, b) + 1) for a, b in zip(*chunk, strict=True)]
        whole = slice(min(x.start for x in each), max(x.stop for x in each))
        kept = sum(x.stop - x.start for x in each)
        # Heads together run faster than one by one, where these would read almost as many keys.
        ranges.append([whole] if kept > 0.7 * len(each) * (whole.stop - whole.start) else each)
    return ranges


class _Bias:
    """The bias of all queries and keys, of which pieces are taken."""

    def __init__(self, q: Tensor, k: Tensor, call: Call) -> None:
        self.call, self.queries = call, q.shape[2]
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.line = self._line(k.shape[2], q.device)
        self.sums: Tensor | None = None
        if isinstance(call.bias, RunningSum):
            sums = call.bias.values
            self.sums = sums.to(torch.promote_types(sums.dtype, self.wide))
        self.seen = None
        if call.first is not None:
            self.seen = call.spans(self.queries, k.shape[2], q.device)
        self.padding = None if call.padding is None else call.padding == 0
        # Whether a piece of it takes memory.
        self.is_written = self.sums is not None or self.seen is not None or self.padding is not None

    def _line(self, keys: int, device: torch.device) -> Tensor | None:
        """The bias at each distance, ``[1 or B, 1 or H, W]``; minus infinity for hidden keys."""
        call, bias, queries = self.call, self.call.bias, self.queries
        # One query sees all keys of a causal line.
        causal = call.causal and call.start + 1 < min(keys, call.start + queries)
        hides = causal or call.first is not None or call.window is not None
        if not isinstance(bias, (Slopes, DistanceTable)) and not hides:
            return None
        distance = _distances(call, queries, keys, device)
        if isinstance(bias, Slopes):
            line = -bias.values[..., None] * distance.abs()
        elif isinstance(bias, DistanceTable):
            columns = (distance + bias.zero).clamp(0, bias.values.shape[1] - 1)
            line = bias.values[:, columns][None]
        else:
            line = torch.zeros_like(distance, dtype=self.wide)[None, None]
        line = line.to(self.wide)
        if causal:
            line = line.masked_fill(distance < 0, float("-inf"))
        if call.window is not None:
            left, right = call.window
            line = line.masked_fill((distance > left) | (-distance > right), float("-inf"))
        return line

    def piece(self, heads: slice, rows: slice, keys: slice) -> tuple[Tensor | None, int]:
        """The mask of some queries and keys, and where its first distance is in the line."""
        n, m = rows.stop - rows.start, keys.stop - keys.start
        at = self.queries - rows.stop + keys.start
        mask = None
        if self.line is not None:
            line, count = self.line, heads.stop - heads.start
            line = line if line.shape[1] in (1, count) else line[:, heads]
            strides = *line.stride()[:2], 1, 1
            offset = line.storage_offset() + at
            mask = line.as_strided((*line.shape[:2], n, m), strides, offset)
        if self.sums is not None:
            mask = self._sums_piece(mask, heads, rows, keys)
        if self.seen is not None and mask is not None:
            index = torch.arange(keys.start, keys.stop, device=mask.device)
            ends = self.seen.first, self.seen.last
            first, last = (x[:, rows].flip(-1)[:, None, :, None] for x in ends)
            mask = mask.masked_fill((index < first) | (index > last), float("-inf"))
        if self.padding is not None:
            if mask is None:
                mask = self.padding.new_zeros((1, 1, n, m), dtype=self.wide)
            mask = mask.masked_fill(self.padding[:, None, None, keys], float("-inf"))
        return mask, at

    def _sums_piece(self, hidden: Tensor | None, heads: slice, rows: slice, keys: slice) -> Tensor:
        assert self.sums is not None
        first = self.call.start + rows.start
        at_queries = self.sums[:, heads, first : self.call.start + rows.stop]
        at_keys = self.sums[:, heads, None, keys]
        mask = at_queries.new_empty((*at_queries.shape, at_keys.shape[-1]), dtype=self.wide)
        # Rounded once, after the difference.
        torch.sub(_reverse(at_queries)[..., None], at_keys, out=mask)
        if hidden is not None:
            # Keys up to the first query's own are seen by all, if no window hides some.
            later = max(0, first + 1 - keys.start) if self.call.window is None else 0
            mask[..., later:].add_(hidden[..., later:])
        return mask
