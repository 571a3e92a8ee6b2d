"""Tables that modules share, in one cache for the process, keyed by all that determines them.

They are not buffers, because frameworks broadcast, cast and shard buffers, and
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
    keep_alive_for_cuda_graph,
    may_keep,
    mixes_with_plain,
)
from posenc.nn._module import ReadOnlyArguments

# The most rows of a growing table: 128 MiB of cos and sin at 128 channels.
GROWTH_LIMIT = 2**17

Tensors = tuple[Tensor, ...]


class _Table:
    """The tables of one key; longer tables replace them."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors


# Modules hold the tables, which are freed with the last module.
_cache: WeakValueDictionary[tuple[Any, ...], _Table] = WeakValueDictionary()


class SharedTables:
    """The tables of one module: ``compute(positions, dtype, *parameters)`` for all positions.

    They have ``length`` rows; if it is None, they grow with the longest sequence. ``compute`` and
    the ``parameters``, which are hashable, determine every number.
    """

    def __init__(
        self,
        compute: Callable[..., Tensors],
        parameters: tuple[Any, ...],
        length: int | None,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.compute, self.parameters = compute, parameters
        self.length, self.dtype = length, dtype
        self.device = torch.get_default_device() if device is None else device
        self._held: dict[tuple[torch.device, torch.dtype], _Table] = {}
        # Build tables of fixed length now, because torch.compile and CUDA graphs build none.
        if length is not None and self.device.type != "meta" and is_plain():
            self._build(self.device, dtype, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedTables:
        # A copy shares the tables until it is moved to another device.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle holds no tensors, and no device that the reader may not have.
        return SharedTables, (self.compute, self.parameters, self.length, self.dtype)

    @property
    def real_device(self) -> torch.device:
        """The device of the tables; torch's default if they were built on the meta device.

        A loader that builds there moves parameters and buffers; tables are neither.
        """
        return torch.get_default_device() if self.device.type == "meta" else self.device

    def existing(self, x: Tensor, has_ids: bool) -> Tensors | None:
        """The tables that exist for ``x``, of any length, or None."""
        if has_ids and x.is_cuda and self.length is None:
            # Whether a growing table has these rows is not known without waiting.
            return None
        # Half precision gets the same results from float32 tables, which are half as large.
        half = x.is_cuda and x.element_size() == 2
        table = self._held.get((x.device, torch.float32 if half else torch.float64))
        if table is None:
            return None
        tensors = table.tensors
        if x.is_cuda:
            keep_alive_for_cuda_graph(table, tensors)
        return tensors

    def read(self, x: Tensor, dtype: torch.dtype, rows: int | None = None) -> Tensors | None:
        """The tables on the device of ``x``, of at least ``rows`` rows, built if need be.

        None means that the caller must compute its rows: a growing table would need too many, or
        an unknown number; or a traced or captured call, which builds no table, found none. Such a
        call may read a table in the constructor's dtype, if that is as wide as ``dtype``.
        """
        grows = self.length is None
        # The comparison comes last, because it would guard the length in a traced call.
        if grows and (rows is None or not may_keep(x) or rows > GROWTH_LIMIT):
            return None
        if not grows and not mixes_with_plain(x):
            return None
        device = x.device
        table = self._held.get((device, dtype))
        if table is not None:
            # Read this once: another thread may replace it by longer tables.
            tensors = table.tensors
            if not grows or tensors[0].shape[0] >= rows:  # type: ignore[operator]
                if x.is_cuda:
                    keep_alive_for_cuda_graph(table, tensors)
                return tensors
        if not may_keep(x) or in_capture(x):
            table = self._held.get((device, self.dtype))
            narrower = torch.promote_types(dtype, self.dtype) != self.dtype
            if table is None or grows or narrower:
                return None
            keep_alive_for_cuda_graph(table, table.tensors)
            return table.tensors
        if grows or self.device.type == "meta":
            self.device = device
        return self._build(device, dtype, rows)

    def shown(self) -> Tensors | None:
        """The tables on the module's device; None before a growing table is needed."""
        table = self._held.get((self.device, self.dtype))
        if table is None and self.length is not None:
            return self._build(self.device, self.dtype, None)
        return None if table is None else table.tensors

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

    def at(self, positions: Tensor, dtype: torch.dtype = torch.float64) -> Tensors:
        """The rows of these positions, computed for one call."""
        return self.compute(positions, dtype, *self.parameters)

    def _build(self, device: torch.device, dtype: torch.dtype, rows: int | None) -> Tensors:
        key = (self.compute, self.parameters, device, dtype, self.length)
        table = _cache.get(key)
        tensors = None if table is None else table.tensors
        if tensors is None or (rows is not None and tensors[0].shape[0] < rows):
            needed = self.length
            if needed is None:
                assert rows is not None
                before = 0 if tensors is None else tensors[0].shape[0]
                needed = max(rows, min(2 * before, GROWTH_LIMIT))
            # Autograd could not save a table that was made in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                exact = self.at(torch.arange(needed, device=device), dtype)
                tensors = tuple(map(fix_sizes, exact))
            if not is_plain():
                return tensors
            if table is None:
                table = _cache[key] = _Table(tensors)
            table.tensors = tensors
        assert table is not None
        self._held[device, dtype] = table
        return tensors


class TableModule(ReadOnlyArguments):
    """A module with shared tables, which follow it to other devices."""

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
