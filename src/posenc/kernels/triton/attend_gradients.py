"""Attention with a bias: the launches of the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posenc.kernels.triton import attention_backward, attention_table
from posenc.kernels.triton.attend_arguments import (
    LOG2E,
    OPTIONS,
    RANGE,
    TO_KEYS,
    TO_QUERIES,
    TO_TABLE,
    arithmetic_of,
    as_dense,
    blocks_for,
    constants_of,
    inputs_of,
    kind_of_mask,
    places_of,
    prunes,
    strides_of,
    width_and_zero,
    widths_of,
)
from posenc.kernels.triton.launch import Launch, find_launch, signature


def backward(
    g: Tensor, g_lse: Tensor | None, saved: Any, call: Any, to_values: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and the bias's numbers; see `posenc.attention.op`."""
    q, k, v, out, lse, ranges = saved
    q, k, v, g = as_dense(q), as_dense(k), as_dense(v), as_dense(g)
    g_lse = None if g_lse is None else g_lse.float().contiguous()
    (batch, heads, _, _), keys = q.shape, k.shape[2]
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    delta = torch.empty_like(lse)
    inputs, present, steps = inputs_of(q, call)
    prune = prunes(q, k, call)
    rows_too = to_values and (call.kind == "slopes" or (call.kind == "table" and not call.causal))
    by_row = torch.empty_like(lse) if rows_too else lse
    by_key = lse.new_empty((batch, heads, keys)) if call.kind == "sums" else lse
    how = (*call[4:6], *call[7:10], prune, *kind_of_mask(call), rows_too)
    how = (*how, g_lse is None)
    pruned = q if ranges is None else ranges
    how = (*how, *signature((q, k, v, g, out, *present)))
    shared = _Shared(q, k, v, g, steps, prune, call)
    to_lse = lse if g_lse is None else g_lse
    tensors: tuple[Tensor, ...] = (q, k, v, g, out, lse, to_lse, *inputs, pruned, dq, delta, by_row)
    prepare = partial(shared.to_queries, out, dq, rows_too, g_lse is not None)
    find_launch(("to_queries", *how), prepare)(tensors, call.start)
    tensors = (q, k, v, g, lse, delta, *inputs, pruned, dk, dv, by_key)
    find_launch(("to_keys", *how), partial(shared.to_keys, dk, dv))(tensors, call.start)
    if not to_values:
        return dq, dk, dv, None
    if call.kind == "slopes":
        to = by_row.sum(2).neg_() if call.values.shape[0] > 1 else by_row.sum((0, 2)).neg_()[None]
    elif call.kind == "sums":
        to = _sum_gradient(by_key, g_lse, lse, call)
    else:
        read = (q, k, v, g, lse, delta, *inputs)
        to = _table_gradient(shared, read, g_lse, by_row, how)
    return dq, dk, dv, to.to(call.values.dtype)


class _Shared:
    """What the launches of the backward pass have in common."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        steps: Any,
        prune: bool,
        call: Any,
    ) -> None:
        self.tensors, self.steps, self.prune, self.call = (q, k, v, g), steps, prune, call

    def _launch(
        self, kernel: Any, blocks: Any, strides: Any, owned: int, heads: int, others: Any
    ) -> Launch:
        (q, k, v, _), call = self.tensors, self.call
        m, n, warps, stages = blocks
        ranges = -(-q.shape[2] // RANGE)
        places = (*places_of(call), q.shape[2], k.shape[2], *width_and_zero(call), ranges)
        numbers = (call.scale * LOG2E, call.scale, *strides, *self.steps, *places)
        prune = RANGE if self.prune else 0
        constants = constants_of(q, k, v, call) | {"PRUNE": prune, **others}
        constants |= {**arithmetic_of(q), "BLOCK_M": m, "BLOCK_N": n, **widths_of(q, v)}
        grid = (owned * q.shape[0] * heads, 1, 1)
        options = {**OPTIONS, "num_warps": warps, "num_stages": stages}
        return Launch(kernel, grid, numbers, constants, **options)

    def to_queries(self, out: Tensor, dq: Tensor, rows_too: bool, lse_too: bool) -> Launch:
        q, k, v, g = self.tensors
        blocks = blocks_for(TO_QUERIES, q, v)
        strides = [step for x in (q, k, v, g, out, dq) for step in strides_of(x)]
        owned, others = (
            -(-q.shape[2] // blocks[0]),
            {"TO_ROWS": rows_too, "LSE_TOO": lse_too},
        )
        kernel = attention_backward.to_queries
        return self._launch(kernel, blocks, strides, owned, q.shape[1], others)

    def to_keys(self, dk: Tensor, dv: Tensor) -> Launch:
        q, k, v, g = self.tensors
        blocks = blocks_for(TO_KEYS, q, v)
        strides = [step for x in (q, k, v, g, dk, dv) for step in strides_of(x)]
        owned = -(-k.shape[2] // blocks[1])
        kernel = attention_backward.to_keys
        # Without pruning, the ranges of keys need not be documents.
        others = {"NARROW": self.call.first is not None and self.call.prune}
        return self._launch(kernel, blocks, strides, owned, k.shape[1], others)

    def to_table(self, nearest: int, diagonals: int, blocks: tuple[int, int, int]) -> Launch:
        (q, k, v, g), call = self.tensors, self.call
        block, warps, stages = blocks
        strides = [step for x in (q, k, v, g) for step in strides_of(x)]
        size = (q.shape[2], k.shape[2], *width_and_zero(call), nearest, q.shape[0])
        numbers = (call.scale * LOG2E, *strides, self.steps[1], *places_of(call), *size)
        constants = constants_of(q, k, v, call)
        del constants["KIND"]
        constants |= {"PRECISION": arithmetic_of(q)["PRECISION"], "BLOCK": block, **widths_of(q, v)}
        options = {**OPTIONS, "num_warps": warps, "num_stages": stages}
        grid = (diagonals, q.shape[1], 1)
        return Launch(attention_table.to_table, grid, numbers, constants, **options)


def _sum_gradient(by_key: Tensor, g_lse: Tensor | None, lse: Tensor, call: Any) -> Tensor:
    """A key's sum lowers its scores; a query's own raises all of its scores, and so the lse."""
    past, queries = call.values.shape[2] - by_key.shape[2], lse.shape[2]
    to = F.pad(by_key.neg_(), (0, past)) if past else by_key.neg_()
    if g_lse is not None:
        of_rows = g_lse.masked_fill(lse == float("-inf"), 0.0)
        if call.starts is None:
            to[:, :, call.start : call.start + queries] += of_rows
        else:
            own = call.starts[:, None] + torch.arange(queries, device=lse.device)
            own = own[:, None].expand_as(of_rows)
            to = to.scatter(2, own, to.gather(2, own) + of_rows)
    return to if call.values.shape[0] > 1 else to.sum(0, keepdim=True)


def _table_gradient(
    shared: _Shared,
    given: tuple[Tensor, ...],
    g_lse: Tensor | None,
    by_row: Tensor,
    how: Any,
) -> Tensor:
    """Sums along diagonals, folded to the table's columns."""
    (q, k, v, _), call = shared.tensors, shared.call
    lse, (width, zero) = given[4], width_and_zero(call)
    blocks = blocks_for(TO_TABLE, q, v)
    nearest = max(-zero, 0) if call.causal else -zero
    longest = max(k.shape[2], call.start + q.shape[2]) - 1
    if call.window is not None:
        # No other distance is seen.
        nearest, longest = max(nearest, -call.window[1]), min(longest, call.window[0])
    furthest = min(width - 2 - zero, longest)
    diagonals = max(0, -(-(furthest - nearest) // blocks[0]) + 1)
    sums = q.new_empty((q.shape[1], diagonals, 2, blocks[0]), dtype=torch.float32)
    tensors = (*given, sums)
    if diagonals:
        prepare = partial(shared.to_table, nearest, diagonals, blocks)
        find_launch(("to_table", longest, *how), prepare)(tensors, call.start)
    first_column = lse if call.causal else by_row.sum((0, 2))
    total = lse
    if g_lse is not None:
        total = g_lse.masked_fill(lse == float("-inf"), 0.0).sum((0, 2))
    to = lse.new_empty(call.values.shape)

    def prepare_fold() -> Launch:
        constants = {"BLOCK": blocks[0], "HAS_FIRST": not call.causal}
        constants |= {"HAS_TOTAL": g_lse is not None, "HAS_LAST": width - 1 - zero <= longest}
        numbers = (width, zero, nearest, furthest, diagonals)
        grid = (q.shape[1], 1, 1)
        return Launch(attention_table.fold_table, grid, numbers, constants, **OPTIONS)

    tensors = (sums, first_column, total, to)
    find_launch(("fold_table", longest, *how), prepare_fold)(tensors, 0)
    return to
