"""DTensor: importing this file registers sharding rules for the rotation with PyTorch.

Afterwards every function and module of this library takes DTensors that are sharded along the
batch, the heads or the sequence, over meshes of any number of dimensions, and returns DTensors
with the same placements. A rotation communicates nothing: each process rotates its own shard by the
positions that its tokens have in the whole sequence. Attention gathers keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from posenc._contract import checks, sharding
from posenc.kernels import ops

Placements = list[Placement | None]


def _replicate(table: Tensor, x: Tensor) -> DTensor:
    assert isinstance(x, DTensor)
    everywhere = [Replicate()] * x.device_mesh.ndim
    return DTensor.from_local(table, x.device_mesh, everywhere, run_check=False)


def _tables(dim: int, x: Any, cos: Any, positions: Any, start: int) -> Placements | None:
    """Placements of cos, sin and positions for ``x`` sharded along ``dim``; None if impossible."""
    ids = None if positions is None else Replicate()
    if dim == 0:
        table = Shard(0) if len(cos.shape) == 3 else Replicate()
        return [table, table, ids if ids is None or positions.shape[0] == 1 else Shard(0)]
    if dim == 1:
        return [Replicate(), Replicate(), ids]
    if dim == 2 and ids is not None:
        for_each_token = positions.shape[1] == x.shape[2]
        return [Replicate(), Replicate(), Shard(1)] if for_each_token else None
    # Without positions, a shard has its rows only if the table has one for each token.
    if dim != 2 or start != 0 or cos.shape[-2] != x.shape[2]:
        return None
    rows = Shard(len(cos.shape) - 2)
    return [rows, rows, None]


def _rules(xs: tuple[Any, ...], cos: Any, sin: Any, positions: Any, start: int) -> list[Any]:
    """Keep the placements of ``xs``, or replicate where a shard cannot be rotated by itself."""
    spec: Placements = [None] * 5
    found = {}
    for placement in (Replicate(), *xs[0].placements):
        tables = None
        if isinstance(placement, Shard):
            tables = _tables(placement.dim, xs[0], cos, positions, start)
        if tables is None:
            placement = Replicate()
            tables = [placement, placement, None if positions is None else placement]
        rotated: Placements = [placement] * len(xs)
        found[placement] = (rotated, [*rotated, *tables, *spec])
    return list(found.values())


@register_sharding(ops.rotate)
def _(x: Any, cos: Any, sin: Any, positions: Any, start: int, *spec: Any) -> list[Any]:
    return _rules((x,), cos, sin, positions, start)


@register_sharding(ops.rotate_qk)
def _(q: Any, k: Any, cos: Any, sin: Any, positions: Any, start: int, *spec: Any) -> list[Any]:
    return _rules((q, k), cos, sin, positions, start)


@register_sharding(ops.rotate_)
def _(x: Any, cos: Any, sin: Any, positions: Any, start: int, *spec: Any) -> list[Any]:
    return [([], inputs) for _, inputs in _rules((x,), cos, sin, positions, start)]


def _attend(
    attend: Callable[..., Tensor],
    q: Any,
    k: Any,
    v: Any,
    slopes: Tensor,
    *,
    query_offset: int | Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attention of the local queries, with the slopes of their heads and their positions.

    Keys and values are sharded as ``q`` along batch and heads, and gathered along the sequence;
    their gradients are then summed over the ranks.
    """
    if isinstance(slopes, DTensor) or (torch.is_grad_enabled() and slopes.requires_grad):
        rule = "slopes must be a plain tensor without a gradient where q is a DTensor"
        way_out = "Use the slopes of posenc.ALiBi, or train slopes in one process."
        checks.fail("alibi_attention", rule, checks.describe(slopes), way_out)
    placements = [p if p in (Shard(0), Shard(1), Shard(2)) else Replicate() for p in q.placements]
    q = q.redistribute(placements=placements)
    batch, heads, tokens = (_local_range(q, dim) for dim in range(3))
    ranks = math.prod(q.device_mesh.size(i) for i, p in enumerate(placements) if p == Shard(1))
    sharded = [Shard(0)] if k.shape[1] % ranks else [Shard(0), Shard(1)]
    of_keys = [p if p in sharded else Replicate() for p in placements]
    # Along mesh dimensions where queries are sharded and keys are not, gradients are partial sums.
    gradients = [p if p == b else Partial() for p, b in zip(placements, of_keys, strict=True)]
    group = q.shape[1] // k.shape[1]
    k, v = (x.redistribute(placements=of_keys).to_local(grad_placements=gradients) for x in (k, v))
    if k.shape[1] * group != len(heads):
        k, v = (x[:, [head // group for head in heads]] for x in (k, v))
    if tokens:
        first = v.shape[2] - q.shape[2] if query_offset is None else query_offset
        local = partial(_local_option, batch, heads)
        options = {name: local(name, value) for name, value in options.items()}
        start = local("query_offset", first) + tokens[0]
        y = attend(q.to_local(), k, v, local("slopes", slopes), query_offset=start, **options)
    else:
        # A rank without queries must still take part in the sum of the gradients.
        y = q.to_local()[..., :1] * (k.sum() + v.sum())
        y = y.expand(-1, -1, -1, v.shape[3])
    shape = torch.Size((*q.shape[:3], v.shape[3]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        y, q.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _local_range(x: DTensor, dim: int) -> range:
    """The global indices along ``dim`` that this rank has."""
    found = range(x.shape[dim])
    coordinate = x.device_mesh.get_coordinate()
    assert coordinate is not None
    for placement, ranks, rank in zip(x.placements, x.device_mesh.shape, coordinate, strict=True):
        if placement == Shard(dim):
            step = -(-len(found) // ranks)
            found = found[rank * step : (rank + 1) * step]
    return found


def _local_option(batch: range, heads: range, name: str, value: Any) -> Any:
    """The part of an option for this rank's sequences and heads."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == (1 if name == "query_offset" else 2) and value.shape[0] > 1:
        value = value[batch.start : batch.stop]
    if name in ("slopes", "score_bound") and value.dim() and value.shape[-1] > 1:
        value = value[..., heads.start : heads.stop]
    return value


sharding.registered = sharding.Sharding(DTensor, _replicate, DTensor.to_local, _attend)  # type: ignore[arg-type]
