"""The rotation and the norm in torch operations, which the kernels are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from posenc._contract.sharding import local, replicate_like
from posenc._contract.tracing import device_assert, in_transform, is_readable
from posenc.ops.rotation.spec import Norm, RowOutOfRange, Spec, TableRows, is_of_all_heads


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rows: TableRows, spec: Spec) -> Tensor:
    r"""Rotate ``2P`` channels of ``x`` pair by pair.

    .. math:: (a, b) \mapsto (a \cos\phi - b \sin\phi,\; a \sin\phi + b \cos\phi)

    ``x`` is ``[B, H, T, D]``; ``cos`` and ``sin`` are ``[R, P]`` or ``[B, R, P]``. Other channels
    are copied. The products are computed in float64 for float32, and in float32 for half
    precision, and rounded once: the error is barely more than half an ulp.
    """
    wide = wider_dtype(x)
    c, s = (take(table, rows, x.shape[2]).to(wide) for table in (cos, sin))
    if spec.transposed:
        s = -s
    before, rotated, after = x.tensor_split(
        (spec.first_channel, spec.first_channel + 2 * cos.shape[-1]), dim=-1
    )
    a, b = pairs(rotated.to(wide), spec.interleaved)
    y = join(a * c - b * s, a * s + b * c, spec.interleaved_out)
    return torch.cat((before, y.to(x.dtype), after), dim=-1)


def table_gradients(
    x: Tensor, g: Tensor, cos: Tensor, sin: Tensor, rows: TableRows, spec: Spec
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`rotate` with respect to its tables; ``g`` is the incoming gradient."""
    wide, span = wider_dtype(x), slice(spec.first_channel, spec.first_channel + 2 * cos.shape[-1])
    a, b = pairs(x[..., span].to(wide), spec.interleaved)
    ga, gb = pairs(g[..., span].to(wide), spec.interleaved_out)
    sign = -1 if spec.transposed else 1
    to_cos, to_sin = ((ga * a + gb * b).sum(1), sign * (gb * a - ga * b).sum(1))
    return _scatter(to_cos, cos, rows), _scatter(to_sin, sin, rows)


def norm_rotate(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rows: TableRows, spec: Spec, norm: Norm
) -> Tensor:
    """RMSNorm over each head of ``x``, or over all heads together, then :func:`rotate`."""
    unit, _, factor = _unit_scale_factor(x, weight, norm)
    return rotate(unit * factor, cos, sin, rows, spec).to(x.dtype)


def norm_rotate_backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: TableRows,
    spec: Spec,
    norm: Norm,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`norm_rotate` with respect to ``x`` and ``weight``."""
    unit, scale, factor = _unit_scale_factor(x, weight, norm)
    rotated = rotate(g.to(unit.dtype), cos, sin, rows, spec.transpose())
    all_heads = is_of_all_heads(weight, x)
    pull = (rotated * factor * unit).mean(dim=(1, 3) if all_heads else 3, keepdim=True)
    to_x = (rotated * factor - unit * pull) * scale
    to_weight = (rotated * unit).sum(dim=(0, 2) if all_heads else (0, 1, 2))
    return to_x.to(x.dtype), to_weight.reshape(weight.shape).to(weight.dtype)


def _unit_scale_factor(x: Tensor, weight: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.to(wider_dtype(x))
    all_heads = is_of_all_heads(weight, x)
    mean = wide.square().mean(dim=(1, 3) if all_heads else 3, keepdim=True)
    scale = torch.rsqrt(mean + norm.eps)
    factor = weight.to(wide.dtype) + norm.shift
    if all_heads:
        factor = factor.view(x.shape[1], 1, x.shape[3])
    return wide * scale, scale, factor


def take(table: Tensor, rows: TableRows, length: int) -> Tensor:
    """The rows of ``table`` for all tokens: ``[B or 1, 1, T, P]``, or ``[T, P]``."""
    count, start = table.shape[-2], rows.start
    if rows.positions is None:
        if start < 0 or start + length > count:
            raise RowOutOfRange(start if start < 0 else start + length - 1, count)
        chosen = table[..., start : start + length, :]
        return chosen if chosen.dim() == 2 else chosen.unsqueeze(1)
    index = rows.as_index(length, table.device)
    values = local(index)
    outside = (values < 0) | (values >= count)
    if is_readable(values):
        if outside.any():
            raise RowOutOfRange(int(values[outside][0]), count)
    elif in_transform(index):
        # Values cannot be read here; indexing raises for any past the end, but wraps negative rows.
        index = torch.where(index < 0, count, index)
    else:
        device_assert(~outside.any(), f"positions must be in [0, {count}).")
    if table.dim() == 2:
        return table[index].unsqueeze(1)
    batch = replicate_like(index, torch.arange(table.shape[0], device=table.device)[:, None])
    return table[batch, index].unsqueeze(1)


def _scatter(gradient: Tensor, table: Tensor, rows: TableRows) -> Tensor:
    """Add ``[B, T, P]`` to the rows that :func:`take` selects, in zeros like ``table``."""
    shared = table.dim() == 2
    if shared and (rows.positions is None or rows.positions.shape[0] == 1):
        gradient = gradient.sum(0, keepdim=True)
    gradient, length = gradient.to(table.dtype), gradient.shape[1]
    if rows.positions is None:
        after = table.shape[-2] - rows.start - length
        full = F.pad(gradient, (0, 0, rows.start, after))
        return full[0] if shared else full
    index = rows.as_index(length, table.device).expand(gradient.shape[:2])
    full = torch.zeros_like(table)
    if shared:
        return full.index_add(0, index.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
    batch = torch.arange(table.shape[0], device=table.device)[:, None]
    return full.index_put((batch.expand_as(index), index), gradient, accumulate=True)


def pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first channels of all pairs, and the second channels."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def join(a: Tensor, b: Tensor, interleaved: bool) -> Tensor:
    """Undo :func:`pairs`."""
    stacked = torch.stack((a, b), dim=-1 if interleaved else -2)
    # autograd.grad(is_grads_batched=True) cannot batch flatten(-2).
    return stacked.reshape(*a.shape[:-1], 2 * a.shape[-1])


def wider_dtype(x: Tensor) -> torch.dtype:
    """The dtype to compute in for ``x``: the next wider one that its device has."""
    if x.dtype in (torch.float16, torch.bfloat16) or x.device.type == "mps":
        return torch.float32
    return torch.float64


def add(x: Tensor, table: Tensor, gain: float = 1.0, factor: float | Tensor = 1.0) -> Tensor:
    """``gain * x + factor * table`` in the dtype of ``x``, rounded once.

    Half precision is summed in float32; with factors, float32 is summed in float64. If the table
    were rounded to half precision first, its error would remain where terms cancel.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if gain != 1.0 or isinstance(factor, Tensor) or factor != 1.0:
        wide = wider_dtype(x)
        if isinstance(factor, Tensor):
            factor = replicate_like(x, factor.to(wide))
        return (x.to(wide) * gain + replicate_like(x, table.to(wide)) * factor).to(x.dtype)
    # Even a cast to the same dtype takes as long as the sum of one token.
    table = replicate_like(x, table if table.dtype is wide else table.to(wide))
    return x + table if x.dtype is wide else (x.to(wide) + table).to(x.dtype)
