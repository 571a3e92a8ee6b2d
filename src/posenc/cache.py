"""Pages for keys and values: which sequence has which pages, and where each token goes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate, islice
from operator import index
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.overlap import check_inference_mode
from posenc.ops import LARGEST, CacheTarget
from posenc.ops.cache.cache import store

__all__ = ["OutOfPages", "PagedCache"]
__dir__ = __all__.copy

Shift: TypeAlias = Callable[[Tensor, int], Tensor]


class OutOfPages(RuntimeError):
    """A call needs more pages than are free; it has changed nothing."""


class PagedCache:
    """Keys and values of many sequences, in pages that sequences take, share and give back.

    Token ``p`` of a sequence is row ``p % page_size`` of its page number ``p // page_size``; all
    layers use the same pages. Which sequence has which page is kept on the CPU, and nothing is read
    back from the device. A sequence is named by any hashable value. A call that raises an error, or
    that Ctrl-C interrupts, has changed nothing or is complete; :meth:`evict` may also have freed
    its sequence.

    Args:
        num_pages: Pages of each layer.
        page_size: Tokens of a page.
        num_kv_heads: Heads of keys and of values.
        head_dim: Channels of a key.
        layers: Layers of the model.
        v_head_dim: Channels of a value; as ``head_dim`` if None.
        dtype: That of the model, or float8_e4m3fn, float8_e5m2 or int8. None is torch's default.
        scales: Keep a scale for each row of a head, for 8-bit caches (``k_scale_cache`` and
            ``v_scale_cache`` of :func:`posenc.functional.rotate_and_cache`).
        cache_layout: ``"NHD"``, tokens before heads, or ``"HND"``.
        joined: Keep the value and the key of a token side by side in one tensor ``kv`` of
            ``v_head_dim + head_dim`` channels, as kernels for latent attention (DeepSeek) read
            them: the value is the latent, the key its rotary part.
        device: The device of the tensors.

    Attributes:
        k: Keys ``(layers, num_pages, page_size, heads, head_dim)``, or with ``"HND"``
            ``(layers, num_pages, heads, page_size, head_dim)``. ``k[layer]`` is a ``k_cache``.
        v: Values, as ``k``.
        k_scales: Scales of the keys, float32, as ``k`` without its last dimension; or None.
        v_scales: Scales of the values.
        kv: The tensor that ``k`` and ``v`` are views of, if ``joined``; or None.

    Examples:
        >>> cache = PagedCache(num_pages=8, page_size=4, num_kv_heads=2, head_dim=16)
        >>> cache.slot_mapping("a", cache.allocate("a", 6))
        tensor([0, 1, 2, 3, 4, 5])
        >>> cache.fork("a", "b")  # shares both pages
        >>> cache.slot_mapping("b", cache.allocate("b", 1))  # the second is copied first
        tensor([10])
        >>> cache.block_table(["a", "b"])
        (tensor([[0, 1],
                 [0, 2]], dtype=torch.int32), tensor([6, 7], dtype=torch.int32))

    References:
        Kwon et al., *Efficient Memory Management for Large Language Model Serving with
        PagedAttention*, 2023, sections 4.1 to 4.4.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        layers: int = 1,
        v_head_dim: int | None = None,
        dtype: torch.dtype | None = None,
        scales: bool = False,
        cache_layout: str = "NHD",
        joined: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        who = type(self).__name__
        self.num_pages = checks.integer(who, "num_pages", num_pages)
        self.page_size = checks.integer(who, "page_size", page_size)
        heads = checks.integer(who, "num_kv_heads", num_kv_heads)
        layers = checks.integer(who, "layers", layers)
        width = checks.integer(who, "head_dim", head_dim)
        self._v_width = checks.optional(checks.integer, who, "v_head_dim", v_head_dim) or width
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in checks.FLOAT_DTYPES and dtype not in LARGEST:
            rule = "dtype must be that of a model, float8_e4m3fn, float8_e5m2 or int8"
            checks.fail(who, rule, dtype, "Pass torch.bfloat16, for example.", TypeError)
        if checks.boolean(who, "scales", scales) and dtype not in LARGEST:
            hint = "Leave scales out: such rows are stored as they are."
            checks.fail(who, "scales need a dtype of 8 bits", dtype, hint)
        if cache_layout not in ("NHD", "HND"):
            hint = "NHD is (pages, page_size, heads, D), and HND is (pages, heads, page_size, D)."
            checks.fail(who, 'cache_layout must be "NHD" or "HND"', repr(cache_layout), hint)
        self.cache_layout = cache_layout
        rows = (self.page_size, heads) if cache_layout == "NHD" else (heads, self.page_size)

        # Zeros, because NaN would pass through a mask: its weight is zero, and 0 * NaN is NaN.
        def zeros(*width: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(layers, self.num_pages, *rows, *width, dtype=dtype, device=device)

        self.kv: Tensor | None = None
        if checks.boolean(who, "joined", joined):
            self.kv = zeros(self._v_width + width)
        else:
            self._k, self._v = zeros(width), zeros(self._v_width)
        self.k_scales = zeros(dtype=torch.float32) if scales else None
        self.v_scales = zeros(dtype=torch.float32) if scales else None
        self._pool = _Pool(self.num_pages)

    # Views of kv are made when they are read: pickle would store them apart from it.
    @property
    def k(self) -> Tensor:
        """The keys of all layers."""
        return self._k if self.kv is None else self.kv[..., self._v_width :]

    @property
    def v(self) -> Tensor:
        """The values of all layers."""
        return self._v if self.kv is None else self.kv[..., : self._v_width]

    @property
    def sequences(self) -> list[Hashable]:
        """The names of all sequences."""
        return list(self._pool.sequences)

    @property
    def free_pages(self) -> int:
        """How many pages no sequence has."""
        return self._pool.free()

    def reset(self) -> None:
        """Forget all sequences; every page is free then."""
        self._pool = _Pool(self.num_pages)

    def length(self, sequence: Hashable) -> int:
        """How many tokens ``sequence`` has."""
        return self._find("length", sequence).length

    def allocate(self, sequence: Hashable, tokens: int) -> range:
        """Make room for ``tokens`` more tokens at the end of a sequence, which may be a new one.

        If the last page has room but other sequences share it, it is copied first.

        Returns:
            The positions of the new tokens, for :meth:`slot_mapping`.
        """
        who = "PagedCache.allocate"
        count = checks.integer(who, "tokens", tokens, least=0)
        entry = self._pool.sequences.get(sequence, _Sequence([], 0))
        end = entry.length + count
        # Only a page with room is written to again.
        last = entry.pages[-1:] if count and entry.length % self.page_size else []
        old = self._pool.shared(last)
        kept = entry.pages[:-1] if old else entry.pages
        new = self._pool.pick(who, self._pages_of(end) - len(kept))
        self._copy(old, new[: len(old)])
        grown = _Sequence(kept + new if new else kept, end)
        self._pool.put(sequence, grown, added=new, removed=old)
        return range(entry.length, end)

    def free(self, sequence: Hashable) -> None:
        """Forget a sequence; pages that no other sequence has become free."""
        entry = self._find("free", sequence, "It was freed before, or never allocated.")
        self._pool.put(sequence, None, removed=entry.pages)

    def truncate(self, sequence: Hashable, tokens: int) -> None:
        """Keep the first ``tokens`` tokens of a sequence, as after rejected speculation."""
        entry = self._find("truncate", sequence)
        count = self._count("truncate", tokens, entry)
        end = self._pages_of(count)
        self._pool.put(sequence, _Sequence(entry.pages[:end], count), removed=entry.pages[end:])

    def fork(self, sequence: Hashable, child: Hashable, tokens: int | None = None) -> None:
        """Make ``child`` a sequence that shares the first ``tokens`` tokens, or all if None.

        No memory is copied until one of the two writes to a page that both have. Tokens that are
        shared must not be written again: that would change them in both.
        """
        entry = self._find("fork", sequence)
        count = entry.length if tokens is None else self._count("fork", tokens, entry)
        if child in self._pool.sequences:
            rule = "child must be a new sequence"
            checks.fail("PagedCache.fork", rule, repr(child), "Free it first, or name another.")
        pages = entry.pages[: self._pages_of(count)]
        self._pool.put(child, _Sequence(pages, count), added=pages)

    def evict(
        self,
        sequence: Hashable,
        *,
        drop: int,
        keep_first: int = 0,
        shift: Shift | None,
    ) -> None:
        """Drop tokens ``keep_first`` to ``keep_first + drop``; later ones move back by ``drop``.

        Values are not moved, and keys are rotated where they are, layer by layer. Each eviction
        rounds the keys once more. Pages that other sequences share are copied first. If an error or
        Ctrl-C comes when some keys are rotated and others are not yet, the sequence is freed: start
        it again from its tokens.

        Args:
            sequence: The sequence.
            drop: How many tokens to drop, a multiple of ``page_size``.
            keep_first: How many of the first tokens to keep: attention sinks.
            shift: ``rope.shift``, or any function of keys ``(1, heads, n, head_dim)`` and
                ``-drop``. Pass None for keys without positions: they stay as they are. Keys of an
                8-bit cache are float32 here, multiplied by their scales if the cache has them.

        Examples:
            >>> cache = PagedCache(num_pages=8, page_size=4, num_kv_heads=1, head_dim=1)
            >>> slots = cache.slot_mapping("a", cache.allocate("a", 11))
            >>> cache.k.view(-1)[slots] = torch.arange(11.0)
            >>> cache.evict("a", drop=4, keep_first=2, shift=lambda k, by: k + by)
            >>> cache.k.view(-1)[cache.slot_mapping("a", range(7))]
            tensor([0., 1., 2., 3., 4., 5., 6.])

        References:
            Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, 2023,
            section 3.2.
        """
        who = "PagedCache.evict"
        entry = self._find("evict", sequence)
        drop = checks.integer(who, "drop", drop)
        keep_first = checks.integer(who, "keep_first", keep_first, least=0)
        if drop % self.page_size:
            rule = f"drop must be a multiple of page_size={self.page_size}"
            checks.fail(
                who, rule, drop, f"Pass {self._pages_of(drop) * self.page_size}, for example."
            )
        end = entry.length - drop
        if keep_first > end:
            rule = f"keep_first + drop must be at most the length {entry.length}"
            checks.fail(who, rule, keep_first + drop, "Drop fewer tokens, or free the sequence.")
        first, sinks = divmod(keep_first, self.page_size)
        after = first + drop // self.page_size
        gone, tail = entry.pages[first:after], entry.pages[after:]
        if keep_first == end:
            shift = None  # no key is left to move
        # Sinks in a page that goes are copied to the page that takes its place.
        old = self._pool.shared(tail[: bool(sinks)] if shift is None else tail)
        new = self._pool.pick(who, len(old))
        self._copy(old, new)
        copies = dict(zip(old, new, strict=True))
        kept = entry.pages[:first] + [copies.get(page, page) for page in tail]
        if shift is None and not sinks:
            self._pool.put(sequence, _Sequence(kept, end), removed=gone)
            return
        check_inference_mode(who, self.k)
        slots = self._tensor(self._slots(kept, range(keep_first, end)), torch.int64).unsqueeze(0)
        for layer in range(len(self.k)):
            keys = self._keys(layer)
            moved = None if shift is None else self._shifted(who, keys, slots, -drop, shift)
            if layer == 0:
                # From here on rows are overwritten: no one has them until all are.
                self._pool.put(sequence, None, removed=entry.pages)
            if moved is not None:
                store(keys, moved, slots, ...)
        if sinks:
            self._copy(gone[:1], kept[first : first + 1], sinks)
        self._pool.put(sequence, _Sequence(kept, end), added=kept)

    def slot_mapping(self, sequence: Hashable | list[Hashable], positions: Any) -> Tensor:
        """The slots of tokens, for :func:`posenc.functional.rotate_and_cache`.

        Args:
            sequence: A sequence, or a list of several.
            positions: The positions of its tokens: a range, a list of ints, or an integer tensor
                ``(T,)``. For a list of sequences, a list with one of these for each.

        Returns:
            int64 ``(T,)`` with ``page index * page_size + place``, one sequence after the other.

        Examples:
            >>> cache = PagedCache(num_pages=8, page_size=4, num_kv_heads=2, head_dim=16)
            >>> new = {"a": cache.allocate("a", 5), "b": cache.allocate("b", 2)}
            >>> cache.slot_mapping(list(new), list(new.values()))
            tensor([0, 1, 2, 3, 4, 8, 9])
        """
        who = "PagedCache.slot_mapping"
        names: list[Hashable] = sequence if isinstance(sequence, list) else [sequence]
        places = positions if names is sequence else [positions]
        count = len(places) if isinstance(places, (list, tuple)) else 0
        if len(names) != count:
            rule = "positions must be a list with an entry for each sequence"
            checks.fail(who, rule, f"{count} for {len(names)}", "Pass one for each.")
        slots: list[int] = []
        for name, where in zip(names, places, strict=True):
            entry = self._find("slot_mapping", name)
            try:
                at = [index(p) for p in (where.tolist() if isinstance(where, Tensor) else where)]
            except TypeError:
                rule, got = "positions must be a range, ints or a tensor (T,)", repr(where)
                checks.fail(who, rule, got, "Pass range(3), or [3] for one token.", TypeError)
            if at and not 0 <= min(at) <= max(at) < entry.length:
                rule = f"positions of {name!r} must be in [0, {entry.length})"
                got = f"{min(at)} to {max(at)}"
                checks.fail(who, rule, got, "Allocate room for new tokens first.")
            slots += self._slots(entry.pages, at)
        return self._tensor(slots, torch.int64)

    def block_table(
        self, sequences: Iterable[Hashable], *, width: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Page indices and lengths, as ``block_table`` and ``cache_seqlens`` of FlashAttention.

        Args:
            sequences: N sequences.
            width: Columns of the table, for a CUDA graph. If None, the pages of the longest.

        Returns:
            int32 ``(N, width)``, zero after the last page of a sequence, and int32 ``(N,)``.
        """
        who = "PagedCache.block_table"
        rows = self._find_all("block_table", sequences)
        longest = max((len(entry.pages) for entry in rows), default=0)
        width = checks.optional(checks.integer, who, "width", width) or longest
        if width < longest:
            rule = f"width must be at least {longest}, the pages of the longest sequence"
            checks.fail(who, rule, width, "Pass the most pages of any.")
        padded = [page for entry in rows for page in entry.pages + [0] * (width - len(entry.pages))]
        lengths = self._tensor([entry.length for entry in rows], torch.int32)
        return self._tensor(padded, torch.int32).view(len(rows), width), lengths

    def flashinfer_tables(self, sequences: Iterable[Hashable]) -> tuple[Tensor, Tensor, Tensor]:
        """FlashInfer's ``paged_kv_indptr``, ``paged_kv_indices`` and ``paged_kv_last_page_len``.

        Returns:
            int32 ``(N + 1,)``, the pages of all sequences one after the other, and int32 ``(N,)``.

        Examples:
            >>> cache = PagedCache(num_pages=8, page_size=4, num_kv_heads=2, head_dim=16)
            >>> _ = cache.allocate("a", 5), cache.allocate("b", 4)
            >>> [table.tolist() for table in cache.flashinfer_tables(["a", "b"])]
            [[0, 2, 3], [0, 1, 2], [1, 4]]
        """
        rows = self._find_all("flashinfer_tables", sequences)
        indptr = [0, *accumulate(len(entry.pages) for entry in rows)]
        indices = [page for entry in rows for page in entry.pages]
        last = [entry.length - max(len(entry.pages) - 1, 0) * self.page_size for entry in rows]
        return (
            self._tensor(indptr, torch.int32),
            self._tensor(indices, torch.int32),
            self._tensor(last, torch.int32),
        )

    def flex_tables(self, sequences: Iterable[Hashable]) -> tuple[Tensor, Tensor]:
        """``page_table`` and ``physical_to_logical`` of FlexAttention's ``PagedAttention``.

        Returns:
            int64 ``(N, pages)``: the page index of each page of a sequence, and for each page
            index which page of the sequence it is; -1 where there is none.

        Examples:
            >>> cache = PagedCache(num_pages=3, page_size=4, num_kv_heads=2, head_dim=16)
            >>> _ = cache.allocate("a", 4), cache.allocate("b", 5)
            >>> [table.tolist() for table in cache.flex_tables(["b"])]
            [[[1, 2, -1]], [[-1, 0, 1]]]
        """
        rows = self._find_all("flex_tables", sequences)
        table = torch.full((2, len(rows), self.num_pages), -1, dtype=torch.int64)
        for (physical, logical), entry in zip(table.unbind(1), rows, strict=True):
            pages = torch.tensor(entry.pages, dtype=torch.int64)
            physical[: len(pages)] = pages
            logical[pages] = torch.arange(len(pages))
        page_table, physical_to_logical = table.to(self.k.device)
        return page_table, physical_to_logical

    def _find(
        self, method: str, sequence: Hashable, hint: str = "Allocate or fork it first."
    ) -> _Sequence:
        entry = self._pool.sequences.get(sequence)
        if entry is None:
            rule = "the sequence must be one of `sequences`"
            checks.fail(f"PagedCache.{method}", rule, repr(sequence), hint)
        return entry

    def _find_all(self, method: str, sequences: Iterable[Hashable]) -> list[_Sequence]:
        if isinstance(sequences, (str, bytes)):
            rule, hint = "sequences must be a list", f"Pass [{sequences!r}]."
            checks.fail(f"PagedCache.{method}", rule, repr(sequences), hint, TypeError)
        return [self._find(method, sequence) for sequence in sequences]

    def _count(self, method: str, tokens: Any, entry: _Sequence) -> int:
        count = checks.integer(f"PagedCache.{method}", "tokens", tokens, least=0)
        if count > entry.length:
            rule = f"tokens must be at most the length {entry.length}"
            checks.fail(f"PagedCache.{method}", rule, count, "Allocate adds tokens.")
        return count

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _slots(self, pages: list[int], positions: Iterable[int]) -> list[int]:
        page = self.page_size
        return [pages[p // page] * page + p % page for p in positions]

    def _tensor(self, numbers: list[int], dtype: torch.dtype) -> Tensor:
        if not numbers:
            return torch.empty(0, dtype=dtype, device=self.k.device)
        # Three times as fast as torch.tensor, which looks at the type of every number.
        buffer = array("i" if dtype == torch.int32 else "q", numbers)
        return torch.frombuffer(buffer, dtype=dtype).to(self.k.device)

    def _copy(self, old: list[int], new: list[int], tokens: int | None = None) -> None:
        """Copy the first ``tokens``, or all, of the pages ``old`` of all layers to ``new``."""
        if old:
            memory = [self.k, self.v] if self.kv is None else [self.kv]
            for x in (*memory, self.k_scales, self.v_scales):
                if x is not None:
                    rows = _bytes(x if self.cache_layout == "NHD" else x.transpose(2, 3))
                    rows[:, new, :tokens] = rows[:, old, :tokens]

    def _keys(self, layer: int) -> CacheTarget:
        """The keys of a layer and their scales, heads before tokens."""
        k, scales = self.k[layer], None if self.k_scales is None else self.k_scales[layer]
        if self.cache_layout == "NHD":
            k, scales = k.transpose(1, 2), None if scales is None else scales.transpose(1, 2)
        return CacheTarget(k, None, scales)

    @torch.no_grad()
    def _shifted(self, who: str, keys: CacheTarget, slots: Tensor, by: int, shift: Shift) -> Tensor:
        """``shift`` of the keys at ``slots``, ``(1, T)``."""
        k, _, scales = keys
        at = slots // self.page_size, slice(None), slots % self.page_size
        rows = _bytes(k)[at].transpose(1, 2)  # [1, H, T, D]
        if k.dtype in LARGEST:
            rows = rows.view(k.dtype).float()
        if scales is not None:
            rows = rows * scales[at].transpose(1, 2).unsqueeze(-1)
        moved = shift(rows, by)
        if moved.shape != rows.shape or moved.dtype != rows.dtype:
            rule, got = f"shift must return {checks.describe(rows)}", checks.describe(moved)
            checks.fail(who, rule, got, "Pass rope.shift, for example.")
        return moved


def _bytes(x: Tensor) -> Tensor:
    # Not every device can index float8.
    return x.view(torch.uint8) if x.dtype in LARGEST else x


class _Sequence(NamedTuple):
    """The pages of a sequence, in order, and how many tokens it has; neither is ever changed."""

    pages: list[int]
    length: int


class _Pool:
    """Which sequence has which pages.

    ``sequences`` says it all. How many sequences have each page, and which pages are free, follows
    from it and is kept only to save time.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.sequences: dict[Hashable, _Sequence] = {}
        self._counts: tuple[list[int], dict[int, None]] | None = None

    def put(
        self,
        name: Hashable,
        sequence: _Sequence | None,
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
