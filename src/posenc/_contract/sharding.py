"""Tensors that are spread over processes (DTensor), as far as every room has to know them.

`posenc.interop.distributed` says here what a DTensor is, so that importing posenc does not import
`torch.distributed.tensor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Held = TypeVar("Held", Tensor, "Tensor | None")


class Sharding(NamedTuple):
    """What there is to know of a class of tensors that are spread over processes.

    Attributes:
        kind: The class.
        replicate: Makes one of a tensor that every process has the whole of, beside another.
        local: The part that this process has.
        attend: Runs an attention, given first, on what each process has of the queries.
    """

    kind: type[Tensor]
    replicate: Callable[[Tensor, Tensor], Tensor]
    local: Callable[[Tensor], Tensor]
    attend: Callable[..., Tensor]


known: Sharding | None = None


def is_sharded(x: object) -> bool:
    """Whether ``x`` is spread over processes: its shape is that of the whole."""
    if known is not None:
        return isinstance(x, known.kind)
    if type(x).__name__ == "DTensor":
        raise TypeError(
            "posenc: DTensors need their sharding rules, got one before these were loaded.\n"
            "  Run `import posenc.interop.distributed` first."
        )
    return False


def local(x: Tensor) -> Tensor:
    """The part of ``x`` that this process has: all of it, unless it is spread over several."""
    if not is_sharded(x):
        return x
    assert known is not None
    return known.local(x)


def replicate_like(x: Tensor, table: Held) -> Held:
    """``table``, which every process has the whole of, in a form that meets ``x`` in an op."""
    if table is None or not is_sharded(x) or is_sharded(table):
        return table
    assert known is not None
    return known.replicate(table, x)


def attend_shards(attend: Callable[..., Tensor], *tensors: Tensor, **options: Any) -> Tensor:
    """``attend`` for what each process has of the queries, the first of ``tensors``."""
    assert known is not None
    return known.attend(attend, *tensors, **options)
