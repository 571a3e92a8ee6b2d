"""Which keys travel to which rank: whole numbers alone, and the same on every rank.

The sequence is cut into chunks of one size, and a rank holds one, or two in zig-zag order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

Ends = list[tuple[int, int]]


class Block(NamedTuple):
    """Queries of a chunk, and keys of another that all of them see; or one chunk to itself."""

    queries: int
    keys: int
    rows: slice
    columns: slice
    heads: list[int]  # heads of k


class Piece(NamedTuple):
    """Keys of a chunk that a rank needs, and what for."""

    keys: int
    sequence: slice
    heads: list[int]
    columns: slice
    blocks: list[Block]


class Reach(NamedTuple):
    """How far the queries of each chunk see.

    Attributes:
        window: For slopes, the distance from which keys do not count, for each chunk of queries and
            head of k.
        most: For sums, ``[C, B, H]``: a chunk whose ``least``, its smallest sum, is above this
            does not count. On the CPU.
        least: ``[C, B, H]``.
    """

    window: list[list[int]] | None = None
    most: Tensor | None = None
    least: Tensor | None = None

    def extents(self, queries: int, keys: int, size: int, kv_heads: int) -> list[int]:
        """How many keys at the near end of a chunk, and as many queries, each head of k needs."""
        if self.window is not None:
            away = (abs(queries - keys) - 1) * size
            return [min(max(window - 1 - away, 0), size) for window in self.window[queries]]
        if self.most is None or self.least is None:
            return [size] * kv_heads
        # A comparison with NaN is false, so a head without a bound keeps every key.
        needed = ~(self.least[keys] > self.most[queries])
        of_keys = needed.unflatten(1, (kv_heads, -1)).any(2).any(0)
        return [size * head for head in of_keys.tolist()]


class Plan(NamedTuple):
    """What every rank knows of the whole.

    ``begins`` and ``ends`` have one entry for each sequence, or for all of them: the first and the
    last token of the document at each chunk's first and last token.
    """

    ranks: int
    size: int
    zigzag: bool
    causal: bool
    kv_heads: int
    reach: Reach
    begins: list[Ends] | None = None
    ends: list[Ends] | None = None

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks that a rank holds, in order."""
        return (rank, 2 * self.ranks - 1 - rank) if self.zigzag else (rank,)

    def pieces(self, receiver: int, sender: int) -> list[Piece]:
        """The keys of one rank that another needs."""
        found = []
        # Where each sequence has its own documents, each has its own blocks.
        sequences = 1 if self.begins is None else len(self.begins)
        for keys in self.chunks(sender):
            for n in range(sequences):
                blocks = list(self._blocks(receiver, keys, n))
                if not blocks:
                    continue
                sequence = slice(None) if sequences == 1 else slice(n, n + 1)
                heads = sorted({head for block in blocks for head in block.heads})
                first = min(block.columns.start for block in blocks)
                last = max(block.columns.stop for block in blocks)
                found.append(Piece(keys, sequence, heads, slice(first, last), blocks))
        return found

    def _blocks(self, receiver: int, keys: int, sequence: int) -> Iterator[Block]:
        for queries in self.chunks(receiver):
            if queries == keys:
                every = slice(0, self.size)
                yield Block(queries, keys, every, every, list(range(self.kv_heads)))
            elif queries > keys or not self.causal:
                extents = self.reach.extents(queries, keys, self.size, self.kv_heads)
                rows, columns = self._rectangle(queries, keys, max(extents), sequence)
                if rows.start < rows.stop and columns.start < columns.stop:
                    heads = [head for head, extent in enumerate(extents) if extent]
                    yield Block(queries, keys, rows, columns, heads)

    def _rectangle(
        self, queries: int, keys: int, extent: int, sequence: int
    ) -> tuple[slice, slice]:
        """The near ends of two chunks, as far as they are in one document."""
        size, row0, column0 = self.size, queries * self.size, keys * self.size
        earlier = keys < queries
        first, last = 0, 2**62
        if self.begins is not None and self.ends is not None:
            # A document that is in both chunks is at the near end of either.
            first, last = (self.begins if earlier else self.ends)[sequence][queries]
        head, tail = (0, extent), (size - extent, size)
        row, column = (head, tail) if earlier else (tail, head)
        rows = slice(max(row[0], first - row0), min(row[1], last + 1 - row0))
        columns = slice(max(column[0], first - column0), min(column[1], last + 1 - column0))
        return rows, columns
