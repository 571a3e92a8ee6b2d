"""Pages that sequences take, share and give back: Python ints, no memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import islice
from typing import NamedTuple

from posenc._contract import checks


class OutOfPages(RuntimeError):
    """A call needs more pages than are free; it has changed nothing."""

    __module__ = "posenc.cache"


class Sequence(NamedTuple):
    """The pages of a sequence, in order, and how many tokens it has; neither is ever changed."""

    pages: list[int]
    length: int


class Pool:
    """Which sequence has which pages.

    ``sequences`` says it all. How many sequences have each page, and which pages are free, follows
    from it and is kept only to save time.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.sequences: dict[Hashable, Sequence] = {}
        self._counts: tuple[list[int], dict[int, None]] | None = None

    def put(
        self,
        name: Hashable,
        sequence: Sequence | None,
        *,
        added: Iterable[int] = (),
        removed: Iterable[int] = (),
    ) -> None:
        """Replace a sequence, or forget it if None; say which pages it gets and gives back.

        Only one line changes ``sequences``. The counts are put aside while they differ from it, so
        that after an interrupt, wherever it comes, they are counted anew.
        """
        (owners, free), self._counts = self._counted(), None
        if sequence is None:
            del self.sequences[name]
        else:
            self.sequences[name] = sequence
        for page in added:
            free.pop(page, None)
            owners[page] += 1
        for page in removed:
            owners[page] -= 1
            if owners[page] == 0:
                free[page] = None
        self._counts = owners, free

    def free(self) -> int:
        """How many pages no sequence has."""
        return len(self._counted()[1])

    def shared(self, pages: list[int]) -> list[int]:
        """Those of ``pages`` that several sequences have."""
        owners, _ = self._counted()
        return [page for page in pages if owners[page] > 1]

    def pick(self, who: str, count: int) -> list[int]:
        """The next free pages, which stay free until :meth:`put`."""
        _, free = self._counted()
        if count > len(free):
            rule, got = f"{count} more pages must be free", f"{len(free)} free pages"
            hint = "Free, truncate or evict a sequence, or make the cache with more pages."
            checks.fail(who, rule, got, hint, OutOfPages)
        return list(islice(reversed(free), count))

    def _counted(self) -> tuple[list[int], dict[int, None]]:
        """How many sequences have each page, and the free pages, the next one last."""
        if self._counts is None:
            owners = [0] * self.pages
            for sequence in self.sequences.values():
                for page in sequence.pages:
                    owners[page] += 1
            # A dict is a stack that can also lose any of its entries.
            unused = (page for page in reversed(range(self.pages)) if owners[page] == 0)
            self._counts = owners, dict.fromkeys(unused)
        return self._counts
