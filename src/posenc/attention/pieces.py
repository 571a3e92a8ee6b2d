"""Cut attention into pieces: a few queries of some heads, the keys they need, and their bias.

The queries of a piece are in reversed order. The bias of query ``n - 1 - r`` and key ``c`` then
depends on ``r + c`` alone, so one line of numbers, seen with both strides one, is the whole matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from posenc.attention.biases import Call
from posenc.attention.pruning import needed_keys

# Queries of a piece, at least and at most: few skip more hidden keys, many multiply faster. At most
# SCORES scores are written down at once.
ROWS, CHUNK, SCORES = 128, 256, 2**21
# Up to DENSE_SCORES scores, and on a CPU up to DENSE_KEYS keys, nothing is pruned: finding the keys
# would cost more than it saves.
DENSE_SCORES, DENSE_KEYS = 2**22, 2**18

Index = tuple[slice, slice, slice]


class Piece(NamedTuple):
    """Queries and keys by their indices in q and k, and the mask ``[1 or B, 1 or h, n, m]``."""

    queries: Index
    keys: Index
    mask: Tensor | None
    at: int  # where its first distance is in the line


def sequences(call: Call) -> Iterator[tuple[slice, Call]]:
    """Split a call where sequences see different keys; in each part, `start` is an int."""
    given = [x for x in (call.starts, call.first) if x is not None]
    if not given:
        yield slice(None), call
        return
    count = max(len(x) for x in given)
    starts = [call.start] if call.starts is None else call.starts.tolist()

    def of(x: Tensor | None, b: int) -> Tensor | None:
        return x if x is None or len(x) == 1 else x[b : b + 1]

    for b in range(count):
        values = call.values if call.kind == "table" or count == 1 else of(call.values, b)
        alone = call._replace(values=values, starts=None, start=starts[min(b, len(starts) - 1)])
        alone = alone._replace(first=of(call.first, b), last=of(call.last, b))
        yield slice(None) if count == 1 else slice(b, b + 1), alone


def is_dense(q: Tensor, k: Tensor) -> bool:
    """Whether there are too few scores to prune."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    few_keys = not q.is_cpu or batch * heads * keys <= DENSE_KEYS
    return few_keys and heads * queries * keys <= DENSE_SCORES


def reverse(x: Tensor, axis: int) -> Tensor:
    """The queries of ``x`` in reversed order; one query needs no copy."""
    return x if x.shape[axis] == 1 else x.flip(axis)


def distances(call: Call, queries: int, keys: int, device: torch.device) -> Tensor:
    """The distances of all queries and keys, each once, falling."""
    seen = min(keys, call.start + queries) if call.causal else keys
    return torch.arange(call.start + queries - 1, call.start - seen, -1, device=device)


def line_of(call: Call, queries: int, keys: int, like: Tensor) -> Tensor | None:
    """The bias at each distance, ``[1 or B, 1 or H, W]``; minus infinity for hidden keys.

    It is on the device of ``like``, and has its dtype, or float32 if that is a half.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    # One query sees all keys of a causal line.
    causal = call.causal and call.start + 1 < min(keys, call.start + queries)
    hides = causal or call.first is not None or call.window is not None
    if call.kind not in ("slopes", "table") and not hides:
        return None
    distance = distances(call, queries, keys, like.device)
    if call.kind == "slopes" and call.values is not None:
        line = -call.values[..., None] * distance.abs()
    elif call.kind == "table" and call.values is not None:
        columns = (distance + call.zero).clamp(0, call.values.shape[1] - 1)
        line = call.values[:, columns][None]
    else:
        line = torch.zeros_like(distance, dtype=wide)[None, None]
    line = line.to(wide)
    if causal:
        line = line.masked_fill(distance < 0, float("-inf"))
    if call.window is not None:
        left, right = call.window
        line = line.masked_fill((distance > left) | (-distance > right), float("-inf"))
    return line


def pieces(q: Tensor, k: Tensor, call: Call, *, written: bool) -> Iterator[Piece]:
    """Cut the work; ``written`` says whether the caller writes all scores of a piece down."""
    batch, heads, queries, _ = q.shape
    shared = heads // k.shape[1]
    pruned = call.prune and call.kind in ("slopes", "sums") and not is_dense(q, k)
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
    _, low, high = needed_keys(q, k, call)
    # A key that a causal line of distances has, also where padding sees none.
    most = min(keys, call.start + queries) - 1 if call.causal else keys - 1
    lows = torch.stack([x.amin((0, 2)) for x in low.split(size, -1)]).clamp(0, most)
    highs = torch.stack([x.amax((0, 2)) for x in high.split(size, -1)]).clamp(max=most)
    ends = torch.stack(torch.broadcast_tensors(lows, highs)).tolist()
    found = []
    for chunk in zip(*ends, strict=True):
        each = [slice(a, max(a, b) + 1) for a, b in zip(*chunk, strict=True)]
        whole = slice(min(x.start for x in each), max(x.stop for x in each))
        kept = sum(x.stop - x.start for x in each)
        # Heads together run faster than one by one, where these would read almost as many keys.
        found.append([whole] if kept > 0.7 * len(each) * (whole.stop - whole.start) else each)
    return found


class _Bias:
    """The bias of all queries and keys, of which pieces are taken."""

    def __init__(self, q: Tensor, k: Tensor, call: Call) -> None:
        self.call, self.queries = call, q.shape[2]
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.line = line_of(call, self.queries, k.shape[2], q)
        self.sums: Tensor | None = None
        if call.kind == "sums" and call.values is not None:
            self.sums = call.values.to(torch.promote_types(call.values.dtype, self.wide))
        self.seen = None
        if call.first is not None:
            self.seen = call.spans(self.queries, k.shape[2], q.device)
        # Whether a piece of it takes memory.
        self.is_written = self.sums is not None or self.seen is not None

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
        return mask, at

    def _sums_piece(self, hidden: Tensor | None, heads: slice, rows: slice, keys: slice) -> Tensor:
        assert self.sums is not None
        first = self.call.start + rows.start
        own = self.sums[:, heads, first : self.call.start + rows.stop]
        at_keys = self.sums[:, heads, None, keys]
        mask = own.new_empty((*own.shape, at_keys.shape[-1]), dtype=self.wide)
        # Rounded once, after the difference.
        torch.sub(reverse(own, 2)[..., None], at_keys, out=mask)
        if hidden is not None:
            # Keys up to the first query's own are seen by all, if no window hides some.
            later = max(0, first + 1 - keys.start) if self.call.window is None else 0
            mask[..., later:].add_(hidden[..., later:])
        return mask
