"""DTensors, without importing them: `posenc.interop.distributed` sets ``known``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Held = TypeVar("Held", Tensor, "Tensor | None")


class Sharding(NamedTuple):
    """The class of tensors that are sharded over processes, and what is done with them.

    Attributes:
        kind: The class.
        replicate: Makes a replicated one of a plain tensor, on the mesh of another.
        local: The local tensor of this process.
        attend: Runs an attention, given first, on the local queries.
    """

    kind: type[Tensor]
    replicate: Callable[[Tensor, Tensor], Tensor]
    local: Callable[[Tensor], Tensor]
    attend: Callable[..., Tensor]


known: Sharding | None = None


def is_sharded(x: object) -> bool:
    """Whether ``x`` is a DTensor, whose shape is global."""
    if known is not None:
        return isinstance(x, known.kind)
    if type(x).__name__ == "DTensor":
        raise TypeError(
            "posenc: DTensors need their sharding rules, got one before these were loaded.\n"
            "  Run `import posenc.interop.distributed` first."
        )
    return False


def local(x: Tensor) -> Tensor:
    """The local tensor of ``x``, which is ``x`` unless it is sharded."""
    if not is_sharded(x):
        return x
    assert known is not None
    return known.local(x)


def replicate_like(x: Tensor, table: Held) -> Held:
    """``table``, replicated on the mesh of ``x`` if that is a DTensor."""
    if table is None or not is_sharded(x) or is_sharded(table):
        return table
    assert known is not None
    return known.replicate(table, x)


def attend_shards(attend: Callable[..., Tensor], *tensors: Tensor, **options: Any) -> Tensor:
    """Run ``attend`` on the local queries, the first of ``tensors``."""
    assert known is not None
    return known.attend(attend, *tensors, **options)
