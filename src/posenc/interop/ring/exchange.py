"""Messages between the ranks of a group, a step ahead of the work on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from posenc._contract import checks
from posenc.interop.ring.plan import Piece, Plan

Cut = Callable[[Piece], list[Tensor]]
Held = list[tuple[Piece, list[Tensor]]]


class Ranks(NamedTuple):
    """A process group, this rank in it, and how many there are."""

    group: Any
    rank: int
    world: int

    def gather(self, x: Tensor, *, zigzag: bool) -> Tensor:
        """``x`` of every rank, put together along the last axis in the order of the sequence."""
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(found, x, group=self.group)
        if zigzag:
            front, back = zip(*(part.chunk(2, -1) for part in found), strict=True)
            found = [*front, *reversed(back)]
        return torch.cat(found, -1)


class Messages(NamedTuple):
    """Tensors on their way to one rank, and from another."""

    works: Sequence[Any] = ()
    sent: Sequence[Tensor] = ()  # alive until they have arrived
    pieces: Sequence[Piece] = ()  # what comes
    buffers: Sequence[list[Tensor]] = ()

    def wait(self) -> Held:
        """What has come."""
        for work in self.works:
            work.wait()
        return list(zip(self.pieces, self.buffers, strict=True))


def check_ranks(who: str, group: Any) -> Ranks:
    """The ranks of a group, of the default one if None; this rank must be among them."""
    if not (dist.is_available() and dist.is_initialized()):
        rule, hint = "torch.distributed must be initialised", "Call init_process_group first."
        checks.fail(who, rule, "no process group", hint, RuntimeError)
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        rule, hint = "this rank must be in group", "Call it only on the ranks of the group."
        checks.fail(who, rule, f"rank {dist.get_rank()}", hint)
    return Ranks(group, rank, dist.get_world_size(group))


def travel(plan: Plan, ranks: Ranks, cut: Cut) -> Iterator[tuple[int, Held]]:
    """Step by step, the pieces that this rank needs, its own first.

    In step ``s`` they are those of the rank ``s`` before it; meanwhile those of step ``s + 1`` are
    on their way. ``cut`` takes a piece from this rank's own tensors.
    """
    coming = _send_keys(plan, ranks, 1, cut)
    yield 0, [(piece, cut(piece)) for piece in plan.pieces(ranks.rank, ranks.rank)]
    for step in range(1, ranks.world):
        held = coming.wait()
        coming = _send_keys(plan, ranks, step + 1, cut)
        yield step, held


def send_gradients(plan: Plan, ranks: Ranks, step: int, made: Held, cut: Cut) -> Messages:
    """Give the gradients of a step's pieces to their owner, and take those of this rank's own."""
    to, come_from = (ranks.rank - step) % ranks.world, (ranks.rank + step) % ranks.world
    pieces = plan.pieces(come_from, ranks.rank)
    sent, like = [grads for _, grads in made], [cut(piece) for piece in pieces]
    return _start(ranks, to, sent, come_from, pieces, like)


def _send_keys(plan: Plan, ranks: Ranks, step: int, cut: Cut) -> Messages:
    if step >= ranks.world:
        return Messages()
    to, come_from = (ranks.rank + step) % ranks.world, (ranks.rank - step) % ranks.world
    pieces = plan.pieces(ranks.rank, come_from)
    # What comes has the shape of the same piece of this rank's own chunk.
    own = dict(zip(plan.chunks(come_from), plan.chunks(ranks.rank), strict=True))
    like = [cut(piece._replace(keys=own[piece.keys])) for piece in pieces]
    sent = [cut(piece) for piece in plan.pieces(to, ranks.rank)]
    return _start(ranks, to, sent, come_from, pieces, like)


def _start(
    ranks: Ranks,
    to: int,
    sent: list[list[Tensor]],
    come_from: int,
    pieces: list[Piece],
    like: list[list[Tensor]],
) -> Messages:
    """Begin to send ``sent``, and to receive tensors of the shapes of ``like``."""
    buffers = [[x.new_empty(x.shape) for x in xs] for xs in like]
    outgoing = [x.contiguous() for xs in sent for x in xs]
    to, come_from = (dist.get_global_rank(ranks.group, peer) for peer in (to, come_from))
    operations = [dist.P2POp(dist.isend, x, to, ranks.group) for x in outgoing]
    for xs in buffers:
        operations += [dist.P2POp(dist.irecv, x, come_from, ranks.group) for x in xs]
    works = dist.batch_isend_irecv(operations) if operations else []
    return Messages(works, outgoing, pieces, buffers)
