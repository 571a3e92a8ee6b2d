"""How much memory a call holds at its worst."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most bytes of tensors made by ``call`` that were alive at one time.

    Counted from the tensors themselves, so it is the same on a busy machine; what an operation
    needs inside itself and gives back before it returns is not seen.

    Examples:
        >>> x = torch.zeros(1000)
        >>> peak_bytes(lambda: (x + 1) * 2)
        8000
    """
    watch = _Watch()
    with watch:
        call()
    return watch.peak


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def _gone(self, size: int) -> None:
        self.alive -= size

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # Views and in-place results share a storage that is counted already, or is the caller's.
        given = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage not in self._seen and storage.data_ptr() not in given:
                    self._seen.add(storage)
                    size = storage.nbytes()
                    self.alive += size
                    weakref.finalize(storage, self._gone, size).atexit = False
        self.peak = max(self.peak, self.alive)
        return out
