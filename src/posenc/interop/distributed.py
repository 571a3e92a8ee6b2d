"""DTensor: importing this file registers sharding rules for the rotation with PyTorch.

Afterwards rotations, sums and attention take DTensors that are sharded along the batch, the heads
or the sequence, over meshes of any number of dimensions, and return DTensors with the same
placements. A rotation communicates nothing: each process rotates its own shard by the positions
that its tokens have in the whole sequence. Attention sends keys and values from rank to rank.
Tensors that are sharded along their channels are gathered, and biases that are not a number for
each distance, such as `RowBias`, are refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from posenc._contract import checks, sharding
from posenc.functional import biased
from posenc.interop import ring
from posenc.ops.attention.biases import (
    BY_ROWS,
    Bias,
    check_bias,
    described,
    refuse_sharded,
)
from posenc.ops.attention.biases.kind import axes_of
from posenc.ops.rotation import rotation

# To import it is all there is to do.
__all__: list[str] = []
__dir__ = __all__.copy

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


def _rules(x: Any, cos: Any, sin: Any, positions: Any, start: int) -> list[Any]:
    """Keep the placements of ``x``, or replicate where a shard cannot be rotated by itself."""
    spec: Placements = [None] * 5
    rules = {}
    for placement in (Replicate(), *x.placements):
        tables = None
        if isinstance(placement, Shard):
            tables = _tables(placement.dim, x, cos, positions, start)
        if tables is None:
            placement = Replicate()
            tables = [placement, placement, None if positions is None else placement]
        rules[placement] = ([placement], [placement, *tables, *spec])
    return list(rules.values())


@register_sharding(rotation.rotate_op.overload)
def _(x: Any, cos: Any, sin: Any, positions: Any, start: int, *spec: Any) -> list[Any]:
    return _rules(x, cos, sin, positions, start)


@register_sharding(rotation.rotate_in_place_op.overload)
def _(x: Any, cos: Any, sin: Any, positions: Any, start: int, *spec: Any) -> list[Any]:
    return [([], inputs) for _, inputs in _rules(x, cos, sin, positions, start)]


def _attend(
    who: str,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    *,
    query_offset: int | Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    backend: str | None = None,
    padding: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of the local queries, with the bias of their heads and their positions.

    Keys and values are sharded as ``q`` along batch and heads. Along the sequence they go from rank
    to rank, see `posenc.interop.ring`; where that is impossible they are gathered, and their
    gradients summed over the ranks. With ``padding``, that of `attend_last`, queries are gathered
    too.
    """
    _check_sharded(who, q, k, v, bias)
    kept = [Shard(0), Shard(1)] if padding is not None else [Shard(0), Shard(1), Shard(2)]
    placements = [p if p in kept else Replicate() for p in q.placements]
    q = q.redistribute(placements=placements)
    batch, heads, tokens = (_local_range(q, dim) for dim in range(3))
    gathered = backend or any(x is not None for x in (query_offset, window, padding))
    ring_dim = None if gathered else _ring_dimension(q, k, v)
    ranks = math.prod(q.device_mesh.size(i) for i, p in enumerate(placements) if p == Shard(1))
    sharded = [Shard(0)] if k.shape[1] % ranks else [Shard(0), Shard(1)]
    of_keys = [
        p if p in sharded or i == ring_dim else Replicate() for i, p in enumerate(placements)
    ]
    # Along mesh dimensions where queries are sharded and keys are not, gradients are partial sums.
    gradients = [p if p == b else Partial() for p, b in zip(placements, of_keys, strict=True)]
    group, keys = q.shape[1] // k.shape[1], k.shape[2]
    k, v = (x.redistribute(placements=of_keys).to_local(grad_placements=gradients) for x in (k, v))
    if k.shape[1] * group != len(heads):
        k, v = (x[:, [head // group for head in heads]] for x in (k, v))
    mine = tokens if ring_dim is not None else range(keys)
    bias = _local_bias(bias, q, batch, heads, mine)
    options = {name: _local_option(batch, mine, name, x) for name, x in options.items()}
    local = q.to_local()
    if ring_dim is not None:
        group_of_ranks = q.device_mesh.get_group(ring_dim)
        y, lse = ring.attend(who, local, k, v, bias, group=group_of_ranks, **options)
    elif padding is not None:
        padding = padding.full_tensor() if isinstance(padding, DTensor) else padding
        padding = padding[batch.start : batch.stop] if len(padding) > 1 else padding
        y, lse = biased.attend_last(local, k, v, bias, padding=padding, **options)
    else:
        first = keys - q.shape[2] if query_offset is None else query_offset
        start = _local_option(batch, mine, "query_offset", first) + tokens.start
        options |= {"query_offset": start, "window": window, "backend": backend}
        y, lse = biased.attend(who, local, k, v, bias, **options)
    results = []
    for x, shape in ((y, (*q.shape[:3], v.shape[3])), (lse, q.shape[:3])):
        whole = torch.empty(shape, device="meta")
        how: Any = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
        results.append(DTensor.from_local(x, q.device_mesh, placements, **how))
    return results[0], results[1]


def _check_sharded(who: str, q: Any, k: Any, v: Any, bias: Bias | None) -> None:
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            hint = f"Pass distribute_tensor({name}, q.device_mesh, placements)."
            checks.fail(
                who, f"{name} must be a DTensor, as q is", type(x).__name__, hint, TypeError
            )
    if isinstance(bias, BY_ROWS):
        refuse_sharded(who, described(bias))
    check_bias(who, bias, q.shape[1], k.shape[2])


def _ring_dimension(q: DTensor, k: DTensor, v: DTensor) -> int | None:
    """The mesh dimension along which all three are sharded by the sequence, evenly."""
    dims = [i for i, p in enumerate(q.placements) if p == Shard(2)]
    if len(dims) != 1 or torch.compiler.is_compiling() or q.shape[2] != k.shape[2]:
        return None
    (dim,) = dims
    even = q.shape[2] % q.device_mesh.size(dim) == 0
    return dim if even and k.placements[dim] == v.placements[dim] == Shard(2) else None


def _local_bias(bias: Any, q: DTensor, batch: range, heads: range, keys: range) -> Any:
    """The numbers for this rank's sequences, heads and keys; their gradients are summed."""
    if bias is None:
        return None
    values, mesh = bias.values, q.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    if not isinstance(values, DTensor):
        values = DTensor.from_local(values, mesh, everywhere, run_check=False)
    partial_sums = [Partial() if isinstance(p, Shard) else Replicate() for p in q.placements]
    values = values.redistribute(placements=everywhere).to_local(grad_placements=partial_sums)
    kind: Any = type(bias)
    parts = {"1|B": batch, "H": heads, "K+": keys}
    # Without sequences, the last of its axes.
    for dim, axis in enumerate(axes_of(kind)["values"][-values.dim() :]):
        if axis in parts and not (axis == "1|B" and values.shape[dim] == 1):
            values = values.narrow(dim, parts[axis].start, len(parts[axis]))
    return bias._replace(values=values)


def _local_range(x: DTensor, dim: int) -> range:
    """The global indices along ``dim`` that this rank has."""
    indices = range(x.shape[dim])
    coordinate = x.device_mesh.get_coordinate()
    assert coordinate is not None
    for placement, ranks, rank in zip(x.placements, x.device_mesh.shape, coordinate, strict=True):
        if placement == Shard(dim):
            step = -(-len(indices) // ranks)
            indices = indices[rank * step : (rank + 1) * step]
    return indices


def _local_option(batch: range, keys: range, name: str, value: Any) -> Any:
    """The part of an option for this rank's sequences and keys."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == (1 if name == "query_offset" else 2) and value.shape[0] > 1:
        value = value[batch.start : batch.stop]
    return value[..., keys.start : keys.stop] if name == "document_ids" else value


sharding.registered = sharding.Sharding(DTensor, _replicate, DTensor.to_local, _attend)  # type: ignore[arg-type]
