"""Tables of numbers that modules read, shared by all that describe the same ones.

They are derived data, not state. Frameworks refill, broadcast, cast and shard the buffers of a
module (transformers' ``from_pretrained`` fills them with uninitialised memory), so tables are no
buffers: one weakly held cache for the process has them, keyed by everything that decides their
numbers.
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

# A table without a fixed length stops growing here: 128 MiB of cos and sin at 128 channels.
# Positions past it are computed at each call.
GROWTH_LIMIT = 2**17

Numbers = tuple[Tensor, ...]


class Description(Hashable, Protocol):
    """All that decides the numbers of a table besides its length: frozen, compared by value."""

    def __call__(self, rows: int, device: torch.device, dtype: torch.dtype) -> Numbers:
        """The first ``rows`` rows of every table, rounded once to ``dtype``."""
        ...


D = TypeVar("D", bound=Description)


class _Table:
    """The numbers of one description on one device, replaced as a whole when they grow."""

    __slots__ = ("__weakref__", "numbers")

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers


# Held by the modules that read them, and freed with the last of these.
_process: WeakValueDictionary[tuple[Any, ...], _Table] = WeakValueDictionary()


class SharedTables(Generic[D]):
    """What one module holds of the process's tables.

    Args:
        description: What the tables are made of.
        length: Their rows; None for tables that grow with what is asked.
        dtype: The dtype of the numbers that :meth:`shown` gives.
        device: Where the module is; torch's default device if None.
    """

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

        None means that the caller computes its rows itself: how many are needed cannot be known
        without waiting for a device, the table would be too large to keep, or the call is traced
        or captured, which builds no table, and there is none of a fixed length yet.

        Args:
            x: The tensor to encode.
            dtype: The dtype to read. A traced call that finds none of it is given the table of
                the constructor's dtype, if that is as wide.
            rows: Rows that have to exist, where the length is not fixed.
        """
        grows = self.length is None
        if grows and (rows is None or not may_keep(x) or rows > GROWTH_LIMIT):
            return None
        if type(x) not in PLAIN_TYPES and not is_read_by(x):
            return None
        device = x.device
        table = self._held.get((device, dtype))
        if table is not None:
            # One read: another thread may put longer tables in their place meanwhile.
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
        """The tables on the module's device, for users to see; None if none was needed yet."""
        table = self._held.get((self.device, self.dtype))
        if table is None and self.length is None:
            return None
        return self._build(self.device, self.dtype, None) if table is None else table.numbers

    def follow(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move to the device that ``fn``, the argument of `Module._apply`, moves tensors to."""
        try:
            there = fn(torch.empty(0, device=self.device)).device
        except RuntimeError:
            # Tensors on the meta device can neither be moved nor shared; tables are built anew.
            there = fn(torch.empty(0, device="cpu")).device
        if there != self.device:
            self.device, self._held = there, {}
            self._prepare()

    def _prepare(self) -> None:
        # A compiler and a CUDA graph read what is there, and build nothing.
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
        # A table born in inference mode could not serve a training step later.
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
    """A read-only attribute: one of the tables that a module's constructor describes."""

    def table(module: TableModule) -> Tensor | None:
        shown = None if module._tables is None else module._tables.shown()
        return None if shown is None else shown[index]

    return property(table, doc=f"{doc} It is shared: do not write to it.")
