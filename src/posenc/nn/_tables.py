"""Tables that modules share: one cache for the process, whose key is all that decides a table.

They are no buffers, because frameworks broadcast, cast and shard buffers, and
``from_pretrained`` of transformers fills them with uninitialised memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from posenc._contract.tracing import (
    PLAIN_TYPES,
    fix_sizes,
    in_capture,
    is_plain,
    is_read_by,
    keep_alive_for_cuda_graph,
    may_keep,
)
from posenc.nn._module import ReadOnlyArguments

# Rows that a growing table has at most: 128 MiB of cos and sin at 128 channels.
GROWTH_LIMIT = 2**17

Numbers = tuple[Tensor, ...]


class Description(Hashable, Protocol):
    """All that decides the numbers of tables, besides their length; frozen."""

    def __call__(self, rows: int, device: torch.device, dtype: torch.dtype) -> Numbers:
        """The first ``rows`` rows, rounded once to ``dtype``."""
        ...


D = TypeVar("D", bound=Description)


class _Table:
    """The tables of one description on one device, which longer ones replace."""

    __slots__ = ("__weakref__", "numbers")

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers


# Modules hold the tables, which are freed with the last module.
_process: WeakValueDictionary[tuple[Any, ...], _Table] = WeakValueDictionary()


class SharedTables(Generic[D]):
    """The tables of one module: of ``length`` rows, or growing as longer sequences come."""

    def __init__(
        self,
        description: D,
        length: int | None,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.description = description
        self.length = length
        self.dtype = dtype
        self.device = torch.get_default_device() if device is None else device
        self._held: dict[tuple[torch.device, torch.dtype], _Table] = {}
        self._prepare()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedTables[D]:
        copied: SharedTables[D] = SharedTables.__new__(SharedTables)
        copied.__dict__.update(self.__dict__, _held=dict(self._held))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle holds no numbers, and no device that the reader may not have.
        return SharedTables, (self.description, self.length, self.dtype)

    def read(self, x: Tensor, dtype: torch.dtype, rows: int | None = None) -> Numbers | None:
        """The tables on the device of ``x``, of at least ``rows`` rows, built if need be.

        None if the caller must compute its rows: a growing table has an unknown or too large
        number of them, or a traced or captured call, which builds no table, finds none. Such a
        call also reads a table of the constructor's dtype, if that is as wide as ``dtype``.
        """
        grows = self.length is None
        if grows and (rows is None or not may_keep(x) or rows > GROWTH_LIMIT):
            return None
        if type(x) not in PLAIN_TYPES and not is_read_by(x):
            return None
        device = x.device
        table = self._held.get((device, dtype))
        if table is not None:
            # Read this once: another thread may replace it by longer tables.
            numbers = table.numbers
            if not grows or numbers[0].shape[0] >= rows:  # type: ignore[operator]
                if x.is_cuda:
                    keep_alive_for_cuda_graph(table, numbers)
                return numbers
        if not may_keep(x) or in_capture(x):
            table = self._held.get((device, self.dtype))
            narrower = torch.promote_types(dtype, self.dtype) != self.dtype
            if table is None or grows or narrower:
                return None
            keep_alive_for_cuda_graph(table, table.numbers)
            return table.numbers
        if grows or self.device.type == "meta":
            self.device = device
        return self._build(device, dtype, rows)

    def shown(self) -> Numbers | None:
        """The tables on the module's device; None before a growing table is needed."""
        table = self._held.get((self.device, self.dtype))
        if table is None and self.length is None:
            return None
        return self._build(self.device, self.dtype, None) if table is None else table.numbers

    def follow(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow ``fn``, the argument of `Module._apply`, to the device it moves tensors to."""
        try:
            there = fn(torch.empty(0, device=self.device)).device
        except RuntimeError:
            # Meta tensors can neither be moved nor shared.
            there = fn(torch.empty(0, device="cpu")).device
        if there != self.device:
            self.device, self._held = there, {}
            self._prepare()

    def _prepare(self) -> None:
        # torch.compile and CUDA graphs build no tables, so those of fixed length exist already.
        if self.length is not None and self.device.type != "meta" and is_plain():
            self._build(self.device, self.dtype, None)

    def _build(self, device: torch.device, dtype: torch.dtype, rows: int | None) -> Numbers:
        key = (self.description, device, dtype, self.length)
        table = _process.get(key)
        if table is not None and (rows is None or table.numbers[0].shape[0] >= rows):
            self._held[device, dtype] = table
            return table.numbers
        needed = self.length
        if needed is None:
            assert rows is not None
            before = 0 if table is None else table.numbers[0].shape[0]
            needed = max(rows, min(2 * before, GROWTH_LIMIT))
        # Autograd could not save a table that was made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            numbers = tuple(map(fix_sizes, self.description(needed, device, dtype)))
        if not is_plain():
            return numbers
        if table is None:
            table = _process[key] = _Table(numbers)
        table.numbers = numbers
        self._held[device, dtype] = table
        return numbers


class TableModule(ReadOnlyArguments):
    """A module that reads shared tables, wherever it is moved."""

    _tables: Any

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self._tables is not None:
            self._tables.follow(fn)
        return self


def shown_table(index: int, doc: str) -> Any:
    """A read-only attribute of a module: one of its tables."""

    def table(module: TableModule) -> Tensor | None:
        shown = None if module._tables is None else module._tables.shown()
        return None if shown is None else shown[index]

    return property(table, doc=f"{doc} It is shared: do not write to it.")
