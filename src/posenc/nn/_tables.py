"""Tables that a module works out, keeps, and never lets a cast round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from posenc._contract.tracing import is_plain
from posenc.numerics.frequencies import Spectrum

# A cache that grows by itself stops here: 128 MiB of cos and sin at 128 channels. Positions past
# it are worked out at each call; a larger capacity that was asked for is still honoured.
GROWTH_LIMIT = 2**17


class DerivedBuffers(nn.Module):
    """A module whose buffers are worked out, not learned: never saved, never cast.

    They follow the module across devices and through deepcopy and pickling. A cast (`.half()`,
    `.to(torch.bfloat16)`) leaves them as they are, and coming off the meta device rebuilds them.
    """

    def _rebuild(self, device: torch.device) -> None:
        """Work every buffer out again on ``device``."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        kept = {name: table for name, table in self._buffers.items() if table is not None}
        self._buffers.update(dict.fromkeys(kept))
        super()._apply(fn, recurse)
        self._buffers.update(kept)
        for table in kept.values():
            # Only the device is followed: `fn` may round, or hand out memory nobody has written.
            device = fn(torch.empty(0, device=table.device)).device
            if device != table.device:
                self._move(device)
                break
        return self

    def _move(self, device: torch.device) -> None:
        old = {name: table for name, table in self._buffers.items() if table is not None}
        if device.type == "mps" or any(table.is_meta for table in old.values()):
            self._rebuild(device)
        else:
            self._buffers.update({name: table.to(device) for name, table in old.items()})


class TableModule(DerivedBuffers):
    """A module with a row of numbers for each position, built once and reused.

    Args:
        names: Buffers that hold the tables, ``[T, ...]`` each.
        capacity: Rows to build at once; None lets the tables grow with what is asked for.
    """

    def __init__(self, *names: str, capacity: int | None) -> None:
        super().__init__()
        self._names = names
        self._capacity = capacity
        # Which rates the tables hold; None before the first one is built.
        self._spectrum: Spectrum | None = None
        for name in names:
            self.register_buffer(name, None, persistent=False)

    def _tabulate(
        self, positions: Tensor, spectrum: Spectrum, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Rows of every table at ``positions``, in the order of the names."""
        raise NotImplementedError

    def _table_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype a table must have to serve ``x``; float64 serves everything."""
        raise NotImplementedError

    def _build(
        self, spectrum: Spectrum, rows: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        # A table born in inference mode could not serve a training step later.
        with torch.inference_mode(False), torch.no_grad():
            tables = self._tabulate(torch.arange(rows, device=device), spectrum, dtype)
        for name, table in zip(self._names, tables, strict=True):
            self._buffers[name] = table
        self._spectrum = spectrum

    def _rebuild(self, device: torch.device) -> None:
        held = self._buffers[self._names[0]]
        assert held is not None
        assert self._spectrum is not None
        self._build(self._spectrum, held.shape[0], device, held.dtype)

    def _rows(
        self, x: Tensor, spectrum: Spectrum, at: Tensor | tuple[int, int], need: int | None
    ) -> tuple[Tensor, ...]:
        """Table rows for ``x``: of the kept tables where they serve, worked out where not.

        Args:
            x: The tensor to encode; decides device and precision.
            spectrum: The rates wanted.
            at: Positions as a tensor, or as ``(start, length)``.
            need: Rows that have to exist, None where that cannot be known without waiting.
        """
        rows = need if self._capacity is None else self._capacity
        dtype = self._table_dtype(x)
        if is_plain(x) and rows is not None and not self._covers(x, spectrum, rows):
            held = self._buffers[self._names[0]]
            if self._capacity is None and held is not None and spectrum == self._spectrum:
                rows = max(rows, min(2 * held.shape[0], GROWTH_LIMIT))
            if self._capacity is not None or rows <= GROWTH_LIMIT:
                self._build(spectrum, rows, x.device, dtype)
        # A graph that read a growing table would be tied to the size it had when traced.
        steady = is_plain(x) or self._capacity is not None
        if rows is not None and steady and self._covers(x, spectrum, rows):
            tables = [self._buffers[name] for name in self._names]
            if isinstance(at, Tensor):
                return tuple(table[at] for table in tables if table is not None)
            return tuple(table[at[0] : at[0] + at[1]] for table in tables if table is not None)
        if not isinstance(at, Tensor):
            at = torch.arange(at[0], at[0] + at[1], device=x.device)
        return self._tabulate(at, spectrum, dtype)

    def _covers(self, x: Tensor, spectrum: Spectrum, rows: int) -> bool:
        held = self._buffers[self._names[0]]
        return (
            held is not None
            and spectrum == self._spectrum
            and held.shape[0] >= rows
            and held.device == x.device
            and held.dtype in (torch.float64, self._table_dtype(x))
        )
