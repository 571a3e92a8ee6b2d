"""Attention to one block of keys after another, put together by their log-sum-exps."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posenc.attention.biased import attend, attend_block
from posenc.attention.biases import DistanceTable, RunningSum, Slopes
from posenc.interop.ring.exchange import Held, Messages, Ranks, send_gradients, travel
from posenc.interop.ring.plan import Block, Piece, Plan

# Sequences, heads and rows of a tensor.
Index: TypeAlias = tuple[slice, list[int], slice]


class Job(NamedTuple):
    """The arguments of an attention over a sharded sequence, beside its tensors."""

    who: str
    plan: Plan
    ranks: Ranks
    kind: str
    zero: int
    scale: float
    prune: bool
    ids: Tensor | None  # of the whole sequence, [1 or B, L]
    group: int  # heads of q for each of k

    def rows(self, chunk: int, rows: slice) -> slice:
        """Rows of a chunk, among those that this rank holds."""
        begin = self.plan.chunks(self.ranks.rank).index(chunk) * self.plan.size
        return slice(begin + rows.start, begin + rows.stop)

    def query_heads(self, heads: list[int]) -> list[int]:
        """The heads of q that share these of k."""
        return [head * self.group + n for head in heads for n in range(self.group)]

    def homes(self, piece: Piece) -> list[Index]:
        """Where a piece is in this rank's k and v, and in its sums."""
        rows = self.rows(piece.keys, piece.columns)
        of_keys = piece.sequence, piece.heads, rows
        of_sums = piece.sequence, self.query_heads(piece.heads), rows
        return [of_keys, of_keys, of_sums] if self.kind == "sums" else [of_keys, of_keys]

    def cut(self, tensors: tuple[Any, ...], piece: Piece) -> list[Tensor]:
        """A piece of this rank's keys and values, and of their sums."""
        return _parts(tensors, self.homes(piece))

    def places(self, piece: Piece, block: Block) -> list[Index]:
        """Where a block is in q, in the k and v of its piece, and in slopes, table or sums.

        Sums are in two places, this rank's own and those of the piece, which are one if a chunk
        attends to itself.
        """
        heads = self.query_heads(block.heads)
        of_queries = piece.sequence, heads, self.rows(block.queries, block.rows)
        within = [piece.heads.index(head) for head in block.heads]
        first = piece.columns.start
        columns = slice(block.columns.start - first, block.columns.stop - first)
        of_keys = slice(None), within, columns
        of_bias = [(piece.sequence, heads, slice(None))]
        if self.kind == "sums":
            of_sums = slice(None), self.query_heads(within), columns
            of_bias = [of_queries] if block.queries == block.keys else [of_queries, of_sums]
        return [of_queries, of_keys, of_keys, *(of_bias if self.kind != "none" else [])]

    def attend(self, block: Block, sequence: slice, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Attention of a block's queries to its keys.

        ``inputs`` are q, k, v, and then the slopes ``[1 or B, H, 1]``, the table ``[1, H, R]``, or
        the sums of the queries and those of the keys.
        """
        q, k, v, *values = inputs
        bias: Slopes | DistanceTable | RunningSum | None = None
        if self.kind == "slopes":
            bias = Slopes(values[0][..., 0])
        elif self.kind == "table":
            bias = DistanceTable(values[0][0], self.zero)
        elif self.kind == "sums":
            bias = RunningSum(torch.cat(values[::-1], -1))
        size = self.plan.size
        if block.queries == block.keys:
            ids = self.ids
            if ids is not None:
                ids = ids[:, block.queries * size : (block.queries + 1) * size]
                ids = ids if len(ids) == 1 else ids[sequence]
            how: Any = {"scale": self.scale, "prune": self.prune, "document_ids": ids}
            return attend(self.who, q, k, v, bias, causal=self.plan.causal, **how)
        distance = (block.queries - block.keys) * size + block.rows.start - block.columns.start
        start = k.shape[2] if self.kind == "sums" else distance
        return attend_block(q, k, v, bias, start=start, scale=self.scale)


def _at(x: Tensor, place: Index) -> Any:
    """The index of a place in ``x``, ``[1 or B, heads, rows, ...]``."""
    sequence, heads, rows = place
    every = slice(None)
    return every if len(x) == 1 else sequence, every if len(heads) == x.shape[1] else heads, rows


def _parts(tensors: Iterable[Any], places: list[Index]) -> list[Tensor]:
    """What is at these places of as many of the tensors."""
    return [x[_at(x, place)] for x, place in zip(tensors, places, strict=False)]


class RingAttention(torch.autograd.Function):
    """The output and the log-sum-exp of this rank's queries.

    Nothing that came from other ranks is kept for the backward pass: it comes again, and its
    gradients go back.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, values: Tensor | None, job: Job
    ) -> tuple[Tensor, Tensor]:
        """``values`` are slopes ``[1 or B, H, 1]``, a table ``[1, H, R]``, or this rank's sums."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=wide)
        for _, held in travel(job.plan, job.ranks, partial(job.cut, (k, v, values))):
            for piece, keys in held:
                for block in piece.blocks:
                    places = job.places(piece, block)
                    inputs = _parts((q, *keys[:2], values, *keys[2:]), places)
                    _merge(out, lse, *job.attend(block, piece.sequence, inputs), places[0])
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, values, out, lse)
        ctx.job = job
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, g_lse: Tensor) -> tuple[Any, ...]:
        """The gradients; those to slopes and tables are this rank's part of the sum."""
        q, k, v, values, out, lse = ctx.saved_tensors
        job: Job = ctx.job
        g = g.to(lse.dtype)
        rows = g, lse, g_lse - (g * out.to(lse.dtype)).sum(-1)
        to_q, *to_own = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        to_values = torch.zeros_like(values) if ctx.needs_input_grad[3] else None
        if job.kind == "sums" and to_values is not None:
            to_own.append(to_values)

        def collect(found: Held) -> None:
            for piece, grads in found:
                for x, grad, place in zip(to_own, grads, job.homes(piece), strict=False):
                    x[_at(x, place)] += grad

        cut, coming = partial(job.cut, (k, v, values)), Messages()
        for step, held in travel(job.plan, job.ranks, cut):
            made = []
            for piece, keys in held:
                wide = [torch.promote_types(x.dtype, lse.dtype) for x in keys]
                to_keys = [torch.zeros_like(x, dtype=d) for x, d in zip(keys, wide, strict=True)]
                inputs = q, *keys[:2], values, *keys[2:]
                to = to_q, *to_keys[:2], to_values, *to_keys[2:]
                for block in piece.blocks:
                    _add_gradients(job, piece, block, inputs, to, rows)
                if step:
                    # Gradients travel in the dtype of the keys.
                    to_keys = [x.to(y.dtype) for x, y in zip(to_keys, keys, strict=True)]
                made.append((piece, to_keys))
            collect(coming.wait())
            if step:
                coming = send_gradients(job.plan, job.ranks, step, made, cut)
            else:
                collect(made)
        collect(coming.wait())
        to_k, to_v = to_own[:2]
        return to_q.to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype), to_values, None


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, place: Index) -> None:
    """Put attention to some keys together with attention to others."""
    here = _at(out, place)
    old = lse[here]
    both = torch.logaddexp(old, more_lse)
    # A query that sees no key yet must not subtract infinities.
    top = both.masked_fill(both == float("-inf"), 0.0)
    kept = out[here] * (old - top).exp()[..., None]
    out[here] = kept + more.to(out.dtype) * (more_lse - top).exp()[..., None]
    lse[here] = both


def _add_gradients(
    job: Job,
    piece: Piece,
    block: Block,
    tensors: tuple[Any, ...],
    to: tuple[Any, ...],
    rows: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Compute a block again, and add its gradients to ``to``, where that is not None.

    ``rows`` are the gradient of the output, the log-sum-exp, and what its gradient begins with.
    """
    places = job.places(piece, block)
    inputs = [x.detach() for x in _parts(tensors, places)]
    wanted = [found for found in zip(inputs, to, places, strict=False) if found[1] is not None]
    leaves = [x.requires_grad_() for x, _, _ in wanted]
    with torch.enable_grad():
        out, lse = job.attend(block, piece.sequence, inputs)
    g, whole, g_lse = _parts(rows, [places[0]] * 3)
    # If this block has the weight w in the whole, its log-sum-exp moves the output by w times the
    # difference of the block's output from the whole.
    weight = (lse.detach() - whole.masked_fill(whole == float("-inf"), float("inf"))).exp()
    to_out = (g * weight[..., None]).to(out.dtype)
    to_lse = weight * ((g * out.detach().to(g.dtype)).sum(-1) + g_lse)
    grads = torch.autograd.grad((out, lse), leaves, (to_out, to_lse))
    for grad, (_, home, place) in zip(grads, wanted, strict=True):
        home[_at(home, place)] += grad
