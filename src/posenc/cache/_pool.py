"""Pages that sequences take, share and give back: Python ints, no memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from posenc._contract import checks


class OutOfPages(RuntimeError):
    """A call needs more pages than are free; it has changed nothing."""

    __module__ = "posenc.cache"


@dataclass(frozen=True)
class Sequence:
    """The pages of a sequence, in order, and how many tokens it has."""

    pages: list[int]
    length: int


class Pool:
    """How many sequences have each page, and which pages are free."""

    def __init__(self, pages: int) -> None:
        self._owners = [0] * pages
        # A dict is a stack that can also lose any of its entries.
        self._free = dict.fromkeys(reversed(range(pages)))

    def __len__(self) -> int:
        return len(self._free)

    def shared(self, pages: list[int]) -> list[int]:
        """Those of ``pages`` that several sequences have."""
        return [page for page in pages if self._owners[page] > 1]

    def pick(self, who: str, count: int) -> list[int]:
        """The next free pages, which stay free until :meth:`swap`."""
        if count > len(self._free):
            rule, got = f"{count} more pages must be free", f"{len(self._free)} free pages"
            way_out = "Free, truncate or evict a sequence, or make the cache with more pages."
            checks.fail(who, rule, got, way_out, OutOfPages)
        return list(islice(reversed(self._free), count))

    def swap(self, old: list[int], new: list[int]) -> None:
        """A sequence takes the pages ``new``, and gives back ``old``."""
        for page in new:
            self._free.pop(page, None)
            self._owners[page] += 1
        for page in old:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free[page] = None
