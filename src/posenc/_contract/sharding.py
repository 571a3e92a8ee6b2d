"""Calls into DTensor without importing it: `posenc.interop.distributed` registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import Tensor

Held = TypeVar("Held", Tensor, "Tensor | None")


class Sharding(NamedTuple):
    """The class DTensor, and the functions that other modules need from it."""

    kind: type[Tensor]
    replicate: Callable[[Tensor, Tensor], Tensor]  # a plain tensor, on the mesh of a DTensor
    local: Callable[[Tensor], Tensor]  # the local tensor of this process
    attend: Callable[..., tuple[Tensor, Tensor]]  # attention and its log-sum-exp


registered: Sharding | None = None


def is_sharded(x: object) -> bool:
    """Whether ``x`` is a DTensor, whose shape is global."""
    if registered is not None:
        return isinstance(x, registered.kind)
    if type(x).__name__ == "DTensor":
        raise TypeError(
            "posenc: sharding rules must be loaded before a DTensor is used, got a DTensor.\n"
            "  Run `import posenc.interop.distributed` first."
        )
    return False


def local(x: Tensor) -> Tensor:
    """The local tensor of a DTensor; any other tensor is returned unchanged."""
    if not is_sharded(x):
        return x
    assert registered is not None
    return registered.local(x)


def replicate_like(x: Tensor, table: Held) -> Held:
    """``table``, replicated on the mesh of ``x`` if ``x`` is a DTensor."""
    if table is None or not is_sharded(x) or is_sharded(table):
        return table
    assert registered is not None
    return registered.replicate(table, x)
