"""Tables that modules share: one cache for the process, whose key is all that decides a table.

They are no buffers, because frameworks broadcast, cast and shard buffers, and
``from_pretrained`` of transformers fills them with uninitialised memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from posenc._contract.tracing import (
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


class _Table:
    """The tables of one key, which longer ones replace."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers


# Modules hold the tables, which are freed with the last module.
_process: WeakValueDictionary[tuple[Any, ...], _Table] = WeakValueDictionary()


class SharedTables:
    """The tables of one module: ``compute(positions, dtype, *parameters)`` for all positions.

    They have ``length`` rows, or grow as longer sequences come if it is None. The parameters are
    hashable, and with ``compute`` decide every number.
    """

    def __init__(
        self,
        compute: Callable[..., Numbers],
        parameters: tuple[Any, ...],
        length: int | None,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.compute, self.parameters = compute, parameters
        self.length, self.dtype = length, dtype
        self.device = torch.get_default_device() if device is None else device
        self._held: dict[tuple[torch.device, torch.dtype], _Table] = {}
        # torch.compile and CUDA graphs build no tables, so those of fixed length exist already.
        if length is not None and self.device.type != "meta" and is_plain():
            self._build(self.device, dtype, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedTables:
        # A module that is moved gets others.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle holds no numbers, and no device that the reader may not have.
        return SharedTables, (self.compute, self.parameters, self.length, self.dtype)

    def held(self, device: torch.device, dtype: torch.dtype) -> Numbers | None:
        """The tables that exist already, however long they are."""
        table = self._held.get((device, dtype))
        return None if table is None else table.numbers

    def read(self, x: Tensor, dtype: torch.dtype, rows: int | None = None) -> Numbers | None:
        """The tables on the device of ``x``, of at least ``rows`` rows, built if need be.

        None if the caller must compute its rows: a growing table has an unknown or too large
        number of them, or a traced or captured call, which builds no table, finds none. Such a
        call also reads a table of the constructor's dtype, if that is as wide as ``dtype``.
        """
        grows = self.length is None
        # In this order: in a traced call, the last comparison would put a bound on the length.
        if grows and (rows is None or not may_keep(x) or rows > GROWTH_LIMIT):
            return None
        if not grows and not is_read_by(x):
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
        held = self.held(self.device, self.dtype)
        if held is None and self.length is not None:
            return self._build(self.device, self.dtype, None)
        return held

    def moved(self, fn: Callable[[Tensor], Tensor]) -> SharedTables:
        """The tables on the device that ``fn``, the argument of `Module._apply`, moves to."""
        try:
            there = fn(torch.empty(0, device=self.device)).device
        except RuntimeError:
            # Meta tensors can neither be moved nor shared.
            there = fn(torch.empty(0, device="cpu")).device
        if there == self.device:
            return self
        return SharedTables(self.compute, self.parameters, self.length, self.dtype, there)

    def at(self, positions: Tensor, dtype: torch.dtype = torch.float64) -> Numbers:
        """The rows of these positions, computed for one call."""
        return self.compute(positions, dtype, *self.parameters)

    def _build(self, device: torch.device, dtype: torch.dtype, rows: int | None) -> Numbers:
        key = (self.compute, self.parameters, device, dtype, self.length)
        table = _process.get(key)
        numbers = None if table is None else table.numbers
        if numbers is None or (rows is not None and numbers[0].shape[0] < rows):
            needed = self.length
            if needed is None:
                assert rows is not None
                before = 0 if numbers is None else numbers[0].shape[0]
                needed = max(rows, min(2 * before, GROWTH_LIMIT))
            # Autograd could not save a table that was made in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                exact = self.at(torch.arange(needed, device=device), dtype)
                numbers = tuple(map(fix_sizes, exact))
            if not is_plain():
                return numbers
            if table is None:
                table = _process[key] = _Table(numbers)
            table.numbers = numbers
        assert table is not None
        self._held[device, dtype] = table
        return numbers


class TableModule(ReadOnlyArguments):
    """A module that reads shared tables, wherever it is moved."""

    _tables: Any

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self._tables is not None:
            self._tables = self._tables.moved(fn)
        return self


def shown_table(index: int, doc: str) -> Any:
    """A read-only attribute of a module: one of its tables."""

    def table(module: TableModule) -> Tensor | None:
        shown = None if module._tables is None else module._tables.shown()
        return None if shown is None else shown[index]

    return property(table, doc=f"{doc} It is shared: do not write to it.")
