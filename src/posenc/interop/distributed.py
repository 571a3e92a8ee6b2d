"""DTensor: importing this file teaches PyTorch how the rotation is sharded.

Afterwards every function and module of this library takes DTensors that are sharded along the
batch, the heads or the sequence, over meshes of any number of dimensions, and returns DTensors
with the same placements. Nothing is communicated: each process rotates its own shard by the
positions that its tokens have in the whole sequence.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from posenc._contract import sharding
from posenc.kernels import ops

Placements = list[Placement | None]


def _replicate(table: Tensor, x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    everywhere = [Replicate()] * x.device_mesh.ndim
    return DTensor.from_local(table, x.device_mesh, everywhere, run_check=False)


def _local(x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    return x.to_local()


def _tables(dim: int, x: Any, cos: Any, positions: Any, start: int) -> Placements | None:
    """Placements of cos, sin and positions beside ``x`` sharded along ``dim``, if there are any."""
    whole: Placement = Replicate()
    ids = None if positions is None else whole
    if dim == 0:
        table = Shard(0) if len(cos.shape) == 3 else whole
        if ids is not None and positions.shape[0] > 1:
            ids = Shard(0)
        return [table, table, ids]
    if dim == 1:
        return [whole, whole, ids]
    if dim == 2 and positions is not None:
        return [whole, whole, Shard(1)] if positions.shape[1] == x.shape[2] else None
    # A shard knows its rows only where there is one for each token, and no others.
    if dim != 2 or start != 0 or cos.shape[-2] != x.shape[2]:
        return None
    rows = Shard(len(cos.shape) - 2)
    return [rows, rows, None]


def _rules(xs: tuple[Any, ...], cos: Any, sin: Any, positions: Any, start: int) -> list[Any]:
    """What ``xs`` may be: as they are. Only what cannot be rotated in pieces is gathered first."""
    rest: Placements = [None] * 5
    found = {}
    for placement in (Replicate(), *xs[0].placements):
        dim = placement.dim if isinstance(placement, Shard) else None
        tables = None if dim is None else _tables(dim, xs[0], cos, positions, start)
        if tables is None:
            placement = Replicate()
            tables = [placement, placement, None if positions is None else placement]
        turned: Placements = [placement] * len(xs)
        found[placement] = (turned, [*turned, *tables, *rest])
    return list(found.values())


@register_sharding(ops.rotate)
def _(x: Any, cos: Any, sin: Any, positions: Any, start: int, *turn: Any) -> list[Any]:
    return _rules((x,), cos, sin, positions, start)


@register_sharding(ops.rotate_qk)
def _(q: Any, k: Any, cos: Any, sin: Any, positions: Any, start: int, *turn: Any) -> list[Any]:
    return _rules((q, k), cos, sin, positions, start)


@register_sharding(ops.rotate_)
def _(x: Any, cos: Any, sin: Any, positions: Any, start: int, *turn: Any) -> list[Any]:
    return [([], inputs) for _, inputs in _rules((x,), cos, sin, positions, start)]


sharding.known = sharding.Sharding(DTensor, _replicate, _local)
