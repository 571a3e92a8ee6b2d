"""Attention to one block of keys after another, put together by their log-sum-exps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posenc.attention.biased import attend, attend_block
from posenc.attention.biases import DistanceTable, RunningSum, Slopes
from posenc.interop.ring.exchange import Held, Messages, Ranks, send_gradients, travel
from posenc.interop.ring.plan import Block, Piece, Plan


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

    def keys(self, piece: Piece, k: Tensor, v: Tensor, values: Tensor | None) -> list[Tensor]:
        """A piece of this rank's keys and values, and of their running sums."""
        at = self.homes(piece)
        tensors = [k, v] if self.kind != "sums" or values is None else [k, v, values]
        return [part(x, *a) for x, a in zip(tensors, at, strict=False)]

    def homes(self, piece: Piece) -> list[Any]:
        """Where a piece is in k, v and sums: sequences, heads and rows."""
        rows = self.rows(piece.keys, piece.columns)
        of_keys = piece.sequence, piece.heads, rows
        return [of_keys, of_keys, (piece.sequence, self.query_heads(piece.heads), rows)]

    def parts(self, piece: Piece, block: Block) -> tuple[Any, Any, list[Any]]:
        """Where a block is in q, in slopes or table, and in the k, v and sums of the piece."""
        heads = self.query_heads(block.heads)
        of_queries = piece.sequence, heads, self.rows(block.queries, block.rows)
        within = [piece.heads.index(head) for head in block.heads]
        first = piece.columns.start
        columns = slice(block.columns.start - first, block.columns.stop - first)
        of_keys = slice(None), within, columns
        of_sums = slice(None), self.query_heads(within), columns
        return of_queries, (piece.sequence, heads, slice(None)), [of_keys, of_keys, of_sums]

    def attend(self, block: Block, sequence: slice, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Attention of a block's queries to its keys.

        ``inputs`` are q, k, v, and then the slopes ``[1 or B, H, 1]``, the table ``[1, H, R]``, or
        the sums of the queries and those of the keys.
        """
        q, k, v, *values = inputs
        own = block.queries == block.keys
        bias: Slopes | DistanceTable | RunningSum | None = None
        if self.kind == "slopes":
            bias = Slopes(values[0][..., 0])
        elif self.kind == "table":
            bias = DistanceTable(values[0][0], self.zero)
        elif self.kind == "sums":
            bias = RunningSum(values[0] if own else torch.cat((values[1], values[0]), -1))
        size = self.plan.size
        if own:
            ids = self.ids
            if ids is not None:
                ids = ids[:, block.queries * size : (block.queries + 1) * size]
                ids = ids if len(ids) == 1 else ids[sequence]
            how: Any = {"scale": self.scale, "prune": self.prune, "document_ids": ids}
            return attend(self.who, q, k, v, bias, causal=self.plan.causal, **how)
        distance = (block.queries - block.keys) * size + block.rows.start - block.columns.start
        start = k.shape[2] if self.kind == "sums" else distance
        return attend_block(q, k, v, bias, start=start, scale=self.scale)


def part(x: Tensor, sequence: slice, heads: list[int], rows: slice) -> Tensor:
    """Some sequences, heads and rows of ``x``, ``[1 or B, heads, rows, ...]``."""
    return x[_index(x, sequence, heads, rows)]


def _index(x: Tensor, sequence: slice, heads: list[int], rows: slice) -> Any:
    every = slice(None)
    one = len(x) == 1
    return every if one else sequence, every if len(heads) == x.shape[1] else heads, rows


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
        for _, held in travel(job.plan, job.ranks, lambda piece: job.keys(piece, k, v, values)):
            for piece, keys in held:
                for block in piece.blocks:
                    inputs, at = _inputs(job, piece, block, keys, q, values)
                    _merge(out, lse, *job.attend(block, piece.sequence, inputs), at)
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
        row = _Rows(g, lse, g_lse - (g * out.to(lse.dtype)).sum(-1))
        to_q, *to_own = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        to_values = None
        if values is not None and (ctx.needs_input_grad[3] or job.kind == "sums"):
            to_values = torch.zeros_like(values)
            to_own += [to_values] if job.kind == "sums" else []

        def cut(piece: Piece) -> list[Tensor]:
            return job.keys(piece, k, v, values)

        def collect(found: Held) -> None:
            for piece, grads in found:
                for x, grad, at in zip(to_own, grads, job.homes(piece), strict=False):
                    x[_index(x, *at)] += grad

        coming = Messages([], [], [], [])
        for step, held in travel(job.plan, job.ranks, cut):
            made = []
            for piece, keys in held:
                to = _Gradients(to_q, [_wide_zeros(x) for x in keys], to_values)
                for block in piece.blocks:
                    _add_gradients(job, piece, block, keys, q, values, row, to)
                made.append((piece, to.keys))
            collect(coming.wait())
            if step:
                narrow = [
                    [x.to(y.dtype) for x, y in zip(a[1], b[1], strict=True)]
                    for a, b in zip(made, held, strict=True)
                ]
                coming = send_gradients(job.plan, job.ranks, step, narrow, cut)
            else:
                collect(made)
        collect(coming.wait())
        to_k, to_v = to_own[:2]
        return to_q.to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype), to_values, None


class _Rows(NamedTuple):
    """For each query: the output's gradient, the log-sum-exp, and what its gradient begins with."""

    g: Tensor
    lse: Tensor
    g_lse: Tensor


class _Gradients(NamedTuple):
    """Sums of the gradients: to q, to the keys, values and sums of a piece, and to the bias."""

    q: Tensor
    keys: list[Tensor]
    values: Tensor | None


def _inputs(
    job: Job, piece: Piece, block: Block, keys: list[Tensor], q: Tensor, values: Tensor | None
) -> tuple[list[Tensor], Any]:
    """The inputs of :meth:`Job.attend`, and where the queries are."""
    of_queries, of_values, of_keys = job.parts(piece, block)
    k, v, *sums = (part(x, *at) for x, at in zip(keys, of_keys, strict=False))
    inputs = [part(q, *of_queries), k, v]
    if values is not None:
        inputs += [part(values, *(of_queries if sums else of_values)), *sums]
    return inputs, of_queries


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, at: Any) -> None:
    """Put attention to some keys together with attention to others."""
    here, old = _index(out, *at), lse[_index(lse, *at)]
    both = torch.logaddexp(old, more_lse)
    # A query that sees no key yet must not subtract infinities.
    top = both.masked_fill(both == float("-inf"), 0.0)
    kept = out[here] * (old - top).exp()[..., None]
    out[here] = kept + more.to(out.dtype) * (more_lse - top).exp()[..., None]
    lse[_index(lse, *at)] = both


def _add_gradients(
    job: Job,
    piece: Piece,
    block: Block,
    keys: list[Tensor],
    q: Tensor,
    values: Tensor | None,
    row: _Rows,
    to: _Gradients,
) -> None:
    """Compute a block again, and add its gradients."""
    of_queries, of_values, of_keys = job.parts(piece, block)
    homes: list[Any] = [(to.q, of_queries), (to.keys[0], of_keys[0]), (to.keys[1], of_keys[1])]
    if to.values is not None:
        homes.append((to.values, of_queries if job.kind == "sums" else of_values))
        # A chunk's own sums are those of its queries and of its keys.
        if job.kind == "sums" and block.queries != block.keys:
            homes.append((to.keys[2], of_keys[2]))
    inputs, _ = _inputs(job, piece, block, keys, q, values)
    wanted = [x.detach().requires_grad_() for x in inputs[: len(homes)]]
    with torch.enable_grad():
        out, lse = job.attend(block, piece.sequence, [*wanted, *inputs[len(homes) :]])
    g, whole, g_lse = (part(x, *of_queries) for x in row)
    # If this block has the weight w in the whole, its log-sum-exp moves the output by w times the
    # difference of the block's output from the whole.
    weight = (lse.detach() - whole.masked_fill(whole == float("-inf"), float("inf"))).exp()
    to_out = (g * weight[..., None]).to(out.dtype)
    to_lse = weight * ((g * out.detach().to(g.dtype)).sum(-1) + g_lse)
    grads = torch.autograd.grad((out, lse), wanted, (to_out, to_lse))
    for grad, (home, at) in zip(grads, homes, strict=True):
        home[_index(home, *at)] += grad


def _wide_zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
