"""Tables that a module works out, keeps, and never lets a cast round."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posenc._contract.tracing import (
    PLAIN_TYPES,
    in_capture,
    is_plain,
    may_keep,
    outlive_capture,
)
from posenc.numerics.frequencies import Spectrum

# A cache that grows by itself stops here: 128 MiB of cos and sin at 128 channels. Positions past
# it are worked out at each call; a larger capacity that was asked for is still honoured.
GROWTH_LIMIT = 2**17
_WRITING = threading.Lock()


class DerivedBuffers(nn.Module):
    """A module whose buffers are worked out, not learned: never saved, never cast.

    They follow the module across devices and through deepcopy and pickling. A cast (`.half()`,
    `.to(torch.bfloat16)`) leaves them as they are, and coming off the meta device rebuilds them.
    """

    _derived: tuple[str, ...] = ()
    _registered = True

    def _derive(self, *names: str, registered: bool = True) -> None:
        """Declare the buffers of these names, empty for now.

        Those whose size depends on what was called are not registered: averaging of weights and
        distributed training go through the buffers of two copies side by side.
        """
        self._derived, self._registered = names, registered
        for name in names:
            if registered:
                self.register_buffer(name, None, persistent=False)
            else:
                setattr(self, name, None)

    def _held(self) -> dict[str, Any]:
        """Where the derived buffers are, by name."""
        return self._buffers if self._registered else self.__dict__

    def _rebuild(self, device: torch.device) -> None:
        """Work every derived buffer out again on ``device``."""
        raise NotImplementedError

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        # Of what was made on the meta device, loading by assignment brings the saved tensors alone.
        if local_metadata.get("assign_to_params_buffers"):
            held = [self._held()[name] for name in self._derived]
            if any(table is not None and table.is_meta for table in held):
                loaded = (t.device for t in state_dict.values() if isinstance(t, Tensor))
                self._move(next(loaded, torch.get_default_device()))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # What a shallow copy works out is its own.
        self._buffers = dict(self._buffers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        held = {name: self._held()[name] for name in self._derived}
        self._held().update(dict.fromkeys(held))
        try:
            super()._apply(fn, recurse)
        finally:
            self._held().update(held)
        for table in held.values():
            if table is None:
                continue
            # Only the device is followed: `fn` may round, or hand out memory nobody has written.
            device = fn(torch.empty(0, device=table.device)).device
            if device != table.device:
                self._move(device)
                break
        return self

    def _move(self, device: torch.device) -> None:
        held = {name: self._held()[name] for name in self._derived}
        if device.type == "mps" or any(table is None or table.is_meta for table in held.values()):
            self._rebuild(device)
        else:
            self._held().update(
                {name: table.to(device) for name, table in held.items() if table is not None}
            )


class TableModule(DerivedBuffers):
    """A module with a row of numbers for each position, built once and reused.

    With ``max_seq_len`` the tables have that many rows; without, they grow with what is asked.

    Args:
        names: Buffers that hold the tables, ``[T, ...]`` each.
        registered: Whether torch sees them as buffers.
    """

    max_seq_len: int | None

    def __init__(self, *names: str, registered: bool = True) -> None:
        super().__init__()
        self._derive(*names, registered=registered)
        # Which rates the tables hold; None while there are none.
        self._spectrum: Spectrum | None = None

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
    ) -> tuple[Tensor, ...]:
        # A table born in inference mode could not serve a training step later.
        with torch.inference_mode(False), torch.no_grad():
            tables = self._tabulate(torch.arange(rows, device=device), spectrum, dtype)
        # A thread that finds the same spectrum before and after reading the tables has read
        # tables that belong together, as long as one thread writes at a time.
        with _WRITING:
            self._spectrum = None
            self._held().update(zip(self._derived, tables, strict=True))
            self._spectrum = spectrum
        return tables

    def _rebuild(self, device: torch.device) -> None:
        held = self._held()[self._derived[0]]
        assert held is not None
        assert self._spectrum is not None
        self._build(self._spectrum, held.shape[0], device, held.dtype)

    def _kept(self, x: Tensor, spectrum: Spectrum, rows: int | None) -> tuple[Tensor, ...] | None:
        """The tables, if they hold ``rows`` rows that serve ``x`` or can be made to.

        None means that the caller works its rows out itself: the table would be too large to
        keep, how many rows it needs cannot be known without waiting, or the call is traced and
        a graph that read a growing table would be tied to the size it had.

        Args:
            x: The tensor to encode; decides device and precision.
            spectrum: The rates wanted.
            rows: Rows that have to exist; a module with ``max_seq_len`` has that many.
        """
        if self.max_seq_len is not None:
            rows = self.max_seq_len
        elif rows is None or not may_keep(x):
            return None
        tables = self._covering(x, spectrum, rows)
        if tables is not None and self.max_seq_len is not None and tables[0].shape[0] > rows:
            return tuple([table[:rows] for table in tables])
        if tables is None and may_keep(x) and not in_capture(x):
            held = self._held()[self._derived[0]]
            if self.max_seq_len is None:
                if rows > GROWTH_LIMIT:
                    return None
                if held is not None and spectrum == self._spectrum:
                    length = held.shape[0]
                    longer = min(2 * length, GROWTH_LIMIT) if length < rows else length
                    rows = max(rows, longer)
            tables = self._build(spectrum, rows, x.device, self._table_dtype(x))
        return tables

    def _covering(self, x: Tensor, spectrum: Spectrum, rows: int) -> tuple[Tensor, ...] | None:
        found, tables_now = self._spectrum, self._held()
        held_now = [tables_now[name] for name in self._derived]
        if found is not self._spectrum or not (spectrum is found or spectrum == found):
            return None
        tables: list[Tensor] = []
        device = x.device
        # A copy made in inference mode cannot be saved for a gradient.
        recorded = torch.is_grad_enabled() and is_plain()
        for held in held_now:
            if held is None or held.device != device:
                return None
            # One made under a mode, or spread over processes, has no numbers for plain ones.
            if type(held) not in PLAIN_TYPES and type(x) in PLAIN_TYPES:
                return None
            # float64 comes first: what a device would take instead costs more to ask.
            if held.dtype is not torch.float64 and held.dtype is not self._table_dtype(x):
                return None
            if held.shape[0] < rows or (tables and held.shape != tables[0].shape):
                return None
            if recorded and held.is_inference():
                return None
            tables.append(held)
        if self.max_seq_len is None:
            # A graph would go on reading these when longer ones have taken their place.
            outlive_capture(*tables)
        return tuple(tables)
