"""Attention over a sequence that is sharded over ranks, with plain tensors.

The sequence is cut into chunks of one size, and a rank holds one, or two in zig-zag order. A
:class:`Route`, the same on every rank, says which keys travel to which rank. Attention to one block
of keys after another is put together by their log-sum-exps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from posenc._contract import checks, qk_checks, sharding
from posenc.functional import biased
from posenc.numerics.slopes import window_length
from posenc.ops.attention.biases import (
    BY_ROWS,
    KINDS,
    NUMBERS,
    Bias,
    DistanceTable,
    RunningSum,
    Slopes,
    check_bias,
    described,
    numbers_of,
)
from posenc.ops.attention.call import Call
from posenc.ops.attention.places import check_places
from posenc.ops.attention.pruning import longest_key, score_gap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ring_attention", "sharded_cumsum"]
__dir__ = __all__.copy

# Sequences, heads of k, and rows of a tensor.
Index: TypeAlias = tuple[slice, list[int], slice]
# The first and the last token of the document at each chunk's first, or last, token.
Ends: TypeAlias = list[tuple[int, int]]
# The shapes of queries that all ranks of a group are known to have had in one call.
_agreed: WeakKeyDictionary[Any, set[tuple[int, ...]]] = WeakKeyDictionary()
_MOST_SHAPES = 64


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None = None,
    *,
    group: ProcessGroup | None = None,
    zigzag: bool = False,
    causal: bool,
    scale: float | None = None,
    document_ids: Tensor | None = None,
    prune: bool = True,
) -> Tensor:
    r"""As :func:`posenc.attention.biased_attention`, with a part of the sequence on each rank.

    Every rank calls it with its own part, and gets the output of its own queries: that of one
    process with the whole sequence, within rounding. Keys and values go from rank to rank while
    others are computed on, and only to ranks whose queries see them: earlier ones if ``causal``,
    those of the same document, and with ``prune`` those near enough to count, head by head. No rank
    holds the keys of more than three ranks at a time.

    The backward pass sends keys again and their gradients back, so every rank must run it. Slopes
    and tables get the gradient of this rank's queries, as all other parameters of a model do:
    sum it over the ranks with the rest.

    The ranks compare the shape of ``q`` when it first comes to the group, and not again. In each
    call, two small collectives serve ``prune`` with slopes or running sums, and one serves
    ``document_ids``; the process waits for the device to read their results.

    Args:
        q: ``(B, H, n, D)``: the queries of this rank's ``n`` tokens, as many on every rank.
        k: ``(B, Hk, n, D)`` with ``H`` a multiple of ``Hk``.
        v: ``(B, Hk, n, Dv)``.
        bias: :class:`Slopes` or :class:`DistanceTable`, the same on every rank; or
            :class:`RunningSum` of this rank's tokens, counted from the beginning of the whole
            sequence: :func:`sharded_cumsum` counts so.
        group: The ranks that share the sequence, in its order; all ranks if None.
        zigzag: Whether the tokens are those of
            ``posenc.positions.context_parallel(..., zigzag=True)``, which gives all ranks the same
            work if ``causal``.
        causal: Whether a query sees only keys up to its own.
        scale: Of the scores, :math:`1/\sqrt{D}` if None.
        document_ids: Ids ``(n,)`` or ``(B, n)`` of this rank's tokens. A run of equal ids in the
            whole sequence is a document, and a query sees only its own. Negative ids are padding,
            whose output is zero.
        prune: Whether to leave out far keys of :class:`Slopes` and :class:`RunningSum`, where their
            weights together are provably below the rounding of the output.

    Returns:
        ``(B, H, n, Dv)`` in the dtype of ``q``.

    Examples:
        >>> import torch.distributed as dist
        >>> from posenc.attention import Slopes
        >>> from posenc.functional import alibi_slopes
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()  # of 512 tokens on each rank
        >>> ring_attention(q, k, v, Slopes(alibi_slopes(8)), causal=True).shape
        torch.Size([1, 8, 512, 64])
        >>> dist.destroy_process_group()

    References:
        Liu et al., *Ring Attention with Blockwise Transformers*, 2023.
    """
    how: Any = {"group": group, "zigzag": zigzag, "causal": causal, "scale": scale}
    return attend("ring_attention", q, k, v, bias, document_ids=document_ids, prune=prune, **how)[0]


def sharded_cumsum(x: Tensor, *, group: ProcessGroup | None = None, zigzag: bool = False) -> Tensor:
    r"""The running sum of a whole sequence, at this rank's tokens.

    .. math:: c_t = \sum_{u \le t} x_u

    It is summed in float64. Only the sums of the ranks' chunks travel, in either pass.

    Args:
        x: ``(..., n)``: one number for each of this rank's tokens, as many on every rank.
        group: The ranks that share the sequence, in its order; all ranks if None.
        zigzag: Whether the tokens are those of
            ``posenc.positions.context_parallel(..., zigzag=True)``.

    Returns:
        float64 of the shape of ``x``, as :class:`posenc.attention.RunningSum` takes it.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> sharded_cumsum(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 3., 6.], dtype=torch.float64)
        >>> dist.destroy_process_group()
    """
    who = "sharded_cumsum"
    checks.float_tensor(who, "x", x)
    ranks = check_ranks(who, group)
    # One rank has the whole sequence in order.
    zigzag = checks.boolean(who, "zigzag", zigzag) and ranks.world > 1
    if x.dim() == 0 or (zigzag and x.shape[-1] % 2):
        rule = "x must have a last axis of tokens, an even number if zigzag"
        checks.fail(who, rule, f"shape {tuple(x.shape)}", "Pad the sequence.")
    sums: Tensor = _Cumsum.apply(x.double(), ranks, zigzag)
    return sums


def attend(
    who: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    *,
    group: Any = None,
    zigzag: bool = False,
    causal: bool = True,
    scale: float | None = None,
    document_ids: Tensor | None = None,
    prune: bool = True,
) -> tuple[Tensor, Tensor]:
    """Check the arguments of :func:`ring_attention`, and compute output and log-sum-exp."""
    if any(sharding.is_sharded(x) for x in (q, k, v)):
        hint = "Pass DTensors to posenc.attention.biased_attention."
        checks.fail(who, "q, k and v must be plain tensors", "a DTensor", hint, TypeError)
    qk_checks.check_qkv(who, q, k, v)
    tokens = q.shape[2]
    if k.shape[2] != tokens:
        rule = f"k must have the {tokens} tokens of q"
        checks.fail(who, rule, k.shape[2], "Pass q, k and v of this rank's tokens.")
    if isinstance(bias, BY_ROWS):
        rule = "bias must be Slopes, DistanceTable, RunningSum or None"
        hint = "Gather the keys, and use biased_attention with query_offset."
        checks.fail(who, rule, described(bias), hint, TypeError)
    check_bias(who, bias, q.shape[1], tokens)
    checks.boolean(who, "zigzag", zigzag)
    checks.boolean(who, "prune", prune)
    scale = qk_checks.check_scale(who, scale, q)
    given = tokens, tokens, causal, None, document_ids, None, q.device, q.shape[0]
    ids = check_places(who, bias, *given).ids
    ranks = check_ranks(who, group)
    # One rank has the whole sequence in order.
    zigzag = zigzag and ranks.world > 1
    if zigzag and tokens % 2:
        rule = "q must have an even number of tokens if zigzag, half from either end"
        checks.fail(who, rule, tokens, "Pad the sequence to a multiple of twice the ranks.")
    _check_equal(who, ranks, q)
    if not q.shape[0] or not tokens:
        return biased.attend(who, q, k, v, bias, causal=causal)
    route = Route(ranks.world, tokens // 2 if zigzag else tokens, zigzag, causal, k.shape[1])
    fields, values, zero = numbers_of(bias, q), None, 0
    kind = KINDS[type(fields)]
    if isinstance(fields, NUMBERS):
        values, zero = fields.values, getattr(fields, "zero", 0)
        values = {"slopes": values[..., None], "table": values[None]}.get(kind, values)
        if prune and kind != "table":
            with torch.no_grad():
                extents = _find_extents(route, ranks, q, k, kind, values, scale)
                route = route._replace(extents=extents)
    if ids is not None:
        ids = ranks.gather(torch.atleast_2d(ids), zigzag=zigzag)
        route = _with_documents(route, ids)
    job = Job(who, route, ranks, kind, zero, scale, prune, ids)
    # One head of k, and those of q that share it, are one index.
    grouped = [x if x is None else x.unflatten(1, (k.shape[1], -1)) for x in (q, k, v, values)]
    out, lse = RingAttention.apply(*grouped, job)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _check_equal(who: str, ranks: Ranks, q: Tensor) -> None:
    """Refuse ranks with other shapes: they would wait for each other's messages.

    A shape is compared when it first comes, because that waits for all ranks and for the device.
    """
    agreed, shape = _agreed.setdefault(ranks.group, set()), tuple(q.shape)
    if shape in agreed:
        return
    mine = torch.tensor(shape, device=q.device)[:, None]
    shapes = ranks.gather(mine, zigzag=False)
    if bool((shapes != mine).any()):
        rule, hint = "q must have one shape", "Pad the sequence to a multiple of the ranks."
        checks.fail(who, f"{rule} on every rank", list(map(tuple, shapes.T.tolist())), hint)
    if len(agreed) >= _MOST_SHAPES:
        # In the same call on every rank, because all have had the same shapes.
        agreed.clear()
    agreed.add(shape)


def _find_extents(
    route: Route, ranks: Ranks, q: Tensor, k: Tensor, kind: str, values: Tensor, scale: float
) -> Tensor:
    """The ``extents`` of a route, from the longest key of all ranks."""
    longest = torch.nan_to_num(longest_key(q, k), nan=math.inf)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=ranks.group)
    gap = score_gap(q, k, k, scale, longest).double()
    total, values = q.shape[2] * ranks.world, values.double()
    chunks, kv_heads = (-1, route.size), (k.shape[1], -1)
    if kind == "slopes":
        gaps = gap.unflatten(2, chunks).amax(-1)
        windows = window_length(values, gaps, total, q.dtype, causal=route.causal).amax(0)
        of_keys = windows.unflatten(0, kv_heads).amax(1).long()
        windows = ranks.gather(of_keys, zigzag=route.zigzag).T.cpu()
        chunk = torch.arange(len(windows))
        between = ((chunk[:, None] - chunk).abs() - 1) * route.size
        return (windows[:, None] - 1 - between[..., None]).clamp(0, route.size)
    # Each key that is left out has at most this share of the weight: eps / 8 in all.
    spare = math.log(8 * total / torch.finfo(q.dtype).eps)
    most = (gap + values + spare).unflatten(2, chunks).amax(-1)
    least = values.unflatten(2, chunks).amin(-1).expand_as(most)
    both = ranks.gather(torch.stack((most, least)), zigzag=route.zigzag).permute(0, 3, 1, 2)
    # A comparison with NaN is false, so a head without a bound keeps every key.
    needed = ~(both[1] > both[0][:, None])
    extents: Tensor = route.size * needed.unflatten(3, kv_heads).any(4).any(2).cpu()
    return extents


def _with_documents(route: Route, ids: Tensor) -> Route:
    """The route for documents; ``ids`` are those of the whole sequence, ``[1 or B, L]``."""
    ends = biased.hide_padding(ids)
    edges = []
    for at in (0, route.size - 1):
        first, last = (x[:, at :: route.size].tolist() for x in ends if x is not None)
        edges.append([list(zip(*pair, strict=True)) for pair in zip(first, last, strict=True)])
    return route._replace(begins=edges[0], ends=edges[1])


class Block(NamedTuple):
    """Queries of a chunk, and keys of another that all of them see; or one chunk to itself."""

    queries: int
    keys: int
    rows: slice
    columns: slice
    heads: list[int]  # heads of k


class Parcel(NamedTuple):
    """Keys of a chunk that a rank needs, and what for."""

    keys: int
    sequence: slice
    heads: list[int]
    columns: slice
    blocks: list[Block]


class Route(NamedTuple):
    """Which keys travel to which rank, in whole numbers; it is the same on every rank.

    ``extents``, ``[C, C, Hk]``, say how many keys at the near end of a chunk, and as many queries
    of another, each head of k needs; None stands for all. ``begins`` and ``ends`` have an entry for
    each sequence, or one for all of them.
    """

    ranks: int
    size: int
    zigzag: bool
    causal: bool
    kv_heads: int
    extents: Tensor | None = None
    begins: list[Ends] | None = None
    ends: list[Ends] | None = None

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks that a rank holds, in order."""
        return (rank, 2 * self.ranks - 1 - rank) if self.zigzag else (rank,)

    def parcels(self, receiver: int, sender: int) -> list[Parcel]:
        """The keys of one rank that another needs."""
        parcels = []
        # Where each sequence has its own documents, each has its own blocks.
        sequences = 1 if self.begins is None else len(self.begins)
        for keys in self.chunks(sender):
            for n in range(sequences):
                blocks = list(self._blocks(receiver, keys, n))
                if not blocks:
                    continue
                sequence = slice(None) if sequences == 1 else slice(n, n + 1)
                heads = sorted({head for block in blocks for head in block.heads})
                first = min(block.columns.start for block in blocks)
                last = max(block.columns.stop for block in blocks)
                parcels.append(Parcel(keys, sequence, heads, slice(first, last), blocks))
        return parcels

    def _blocks(self, receiver: int, keys: int, sequence: int) -> Iterator[Block]:
        for queries in self.chunks(receiver):
            if queries == keys:
                every = slice(0, self.size)
                yield Block(queries, keys, every, every, list(range(self.kv_heads)))
            elif queries > keys or not self.causal:
                extents = [self.size] * self.kv_heads
                if self.extents is not None:
                    extents = self.extents[queries, keys].tolist()
                rows, columns = self._rectangle(queries, keys, max(extents), sequence)
                if rows.start < rows.stop and columns.start < columns.stop:
                    heads = [head for head, extent in enumerate(extents) if extent]
                    yield Block(queries, keys, rows, columns, heads)

    def _rectangle(
        self, queries: int, keys: int, extent: int, sequence: int
    ) -> tuple[slice, slice]:
        """The near ends of two chunks, as far as they are in one document."""
        size, row0, column0 = self.size, queries * self.size, keys * self.size
        earlier = keys < queries
        first, last = 0, 2**62
        if self.begins is not None and self.ends is not None:
            # A document that is in both chunks is at the near end of either.
            first, last = (self.begins if earlier else self.ends)[sequence][queries]
        head, tail = (0, extent), (size - extent, size)
        row, column = (head, tail) if earlier else (tail, head)
        rows = slice(max(row[0], first - row0), min(row[1], last + 1 - row0))
        columns = slice(max(column[0], first - column0), min(column[1], last + 1 - column0))
        return rows, columns


# The keys and the values of parcels, and their running sums, or the gradients of these.
Held: TypeAlias = list[tuple[Parcel, list[Tensor]]]


class Ranks(NamedTuple):
    """A process group, this rank in it, and how many there are."""

    group: Any
    rank: int
    world: int

    def at(self, step: int) -> int:
        """The rank that is ``step`` places after this one."""
        return (self.rank + step) % self.world

    def gather(self, x: Tensor, *, zigzag: bool) -> Tensor:
        """``x`` of every rank, put together along the last axis in the order of the sequence."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(parts, x, group=self.group)
        if zigzag:
            front, back = zip(*(part.chunk(2, -1) for part in parts), strict=True)
            parts = [*front, *reversed(back)]
        return torch.cat(parts, -1)


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


class Job(NamedTuple):
    """The arguments of an attention over a sharded sequence, in addition to its tensors.

    These are ``[B, Hk, G, rows, ...]``, with ``G`` heads of q for each of k: q; k and v, with ``G``
    one; and slopes with one row, a table, or sums. ``own`` below are those that travel.
    """

    who: str
    route: Route
    ranks: Ranks
    kind: str
    zero: int
    scale: float
    prune: bool
    ids: Tensor | None  # of the whole sequence, [1 or B, L]

    def own(self, k: Any, v: Any, values: Any) -> list[Any]:
        """Those that travel: keys, values, and running sums, or the gradients of these."""
        return [k, v, values] if self.kind == "sums" else [k, v]

    def travel(self, own: Sequence[Tensor]) -> Iterator[tuple[int, Held]]:
        """Step by step, the parcels that this rank needs, its own first.

        In step ``s`` they are those of the rank ``s`` before it; meanwhile those of step ``s + 1``
        are on their way.
        """
        ranks, parcels = self.ranks, self.route.parcels
        held = self._cut(own, ranks.rank)
        for step in range(1, ranks.world):
            expected = parcels(ranks.rank, ranks.at(-step))
            wait = self._exchange(own, step, self._cut(own, ranks.at(step)), expected)
            yield step - 1, held
            held = wait()
        yield ranks.world - 1, held

    def send_gradients(
        self, own: Sequence[Tensor], step: int, computed: Held
    ) -> Callable[[], Held]:
        """Give the gradients of a step's parcels to their owner, and take those of its own.

        They travel in the dtypes of ``own``.
        """
        if step == 0:
            return lambda: computed
        dtypes = [x.dtype for x in own]
        sent = [(parcel, [*map(Tensor.to, xs, dtypes)]) for parcel, xs in computed]
        expected = self.route.parcels(self.ranks.at(step), self.ranks.rank)
        return self._exchange(own, -step, sent, expected)

    def _exchange(
        self, own: Sequence[Tensor], step: int, sent: Held, expected: list[Parcel]
    ) -> Callable[[], Held]:
        """Begin to send to the rank at ``step``, and to receive from the one at minus ``step``.

        The function that is returned waits for the ``expected`` parcels.
        """
        group = self.ranks.group
        to, source = (dist.get_global_rank(group, self.ranks.at(n)) for n in (step, -step))
        coming = [(parcel, [_new_part(x, parcel) for x in own]) for parcel in expected]
        outgoing = [x.contiguous() for _, xs in sent for x in xs]
        operations = [dist.P2POp(dist.isend, x, to, group) for x in outgoing]
        for _, xs in coming:
            operations += [dist.P2POp(dist.irecv, x, source, group) for x in xs]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> Held:
            for work in works:
                work.wait()
            # Until now they had to stay alive.
            outgoing.clear()
            return coming

        return wait

    def _cut(self, own: Sequence[Tensor], receiver: int) -> Held:
        """The parcels of this rank that another needs, with their tensors."""
        parcels = self.route.parcels(receiver, self.ranks.rank)
        return [(parcel, [x[_at(x, self.home(parcel))] for x in own]) for parcel in parcels]

    def _rows(self, chunk: int, rows: slice) -> slice:
        """Rows of a chunk, among those that this rank holds."""
        begin = self.route.chunks(self.ranks.rank).index(chunk) * self.route.size
        return slice(begin + rows.start, begin + rows.stop)

    def home(self, parcel: Parcel) -> Index:
        """Where a parcel is in this rank's tensors that travel."""
        return parcel.sequence, parcel.heads, self._rows(parcel.keys, parcel.columns)

    def places(self, parcel: Parcel, block: Block) -> list[Index]:
        """Where a block is in q, in this rank's slopes, table or sums, and in what its parcel has.

        The sums of a parcel are those of this rank if a chunk attends to itself.
        """
        of_queries = parcel.sequence, block.heads, self._rows(block.queries, block.rows)
        of_bias = of_queries if self.kind == "sums" else (parcel.sequence, block.heads, slice(None))
        within = [parcel.heads.index(head) for head in block.heads]
        first = parcel.columns.start
        columns = slice(block.columns.start - first, block.columns.stop - first)
        of_keys = slice(None), within, columns
        sums_differ = self.kind == "sums" and block.queries != block.keys
        return [of_queries, of_bias, *[of_keys] * (3 if sums_differ else 2)]

    def attend(self, block: Block, sequence: slice, inputs: list[Any]) -> tuple[Tensor, Tensor]:
        """Attention of a block's queries to its keys; ``inputs`` are what is at its places."""
        flat: list[Any] = [x if x is None else x.flatten(1, 2) for x in inputs]
        q, values, k, v, *sums_of_keys = flat
        bias: Slopes | DistanceTable | RunningSum | None = None
        if self.kind == "slopes":
            bias = Slopes(values[..., 0])
        elif self.kind == "table":
            bias = DistanceTable(values[0], self.zero)
        elif self.kind == "sums":
            bias = RunningSum(torch.cat((*sums_of_keys, values), -1))
        size = self.route.size
        if block.queries == block.keys:
            ids = self.ids
            if ids is not None:
                ids = ids[:, block.queries * size : (block.queries + 1) * size]
                ids = ids if len(ids) == 1 else ids[sequence]
            how: Any = {"scale": self.scale, "prune": self.prune, "document_ids": ids}
            results = biased.attend(self.who, q, k, v, bias, causal=self.route.causal, **how)
        else:
            distance = (block.queries - block.keys) * size + block.rows.start - block.columns.start
            start = k.shape[2] if self.kind == "sums" else distance
            # Where all keys are earlier, a causal mask hides none: kernels have less to compute.
            how = {"scale": self.scale, "causal": start >= k.shape[2]}
            call = Call.of(numbers_of(bias, q), start=start, **how)
            results = biased.run(self.who, q, k, v, bias, call)
        out, lse = (x.unflatten(1, inputs[0].shape[1:3]) for x in results)
        return out, lse

    def add_gradients(
        self,
        parcel: Parcel,
        block: Block,
        tensors: Sequence[Any],
        to: Sequence[Any],
        rows: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Compute a block again, and add its gradients to ``to``, where that is not None.

        ``rows`` are the gradient of the output, the log-sum-exp, and what its gradient begins with.
        """
        places = self.places(parcel, block)
        inputs: list[Any] = [x if x is None else x.detach() for x in _parts(tensors, places)]
        wanted = [each for each in zip(inputs, to, places, strict=False) if each[1] is not None]
        leaves = [x.requires_grad_() for x, _, _ in wanted]
        with torch.enable_grad():
            out, lse = self.attend(block, parcel.sequence, inputs)
        g, whole, g_lse = (x[_at(x, places[0])] for x in rows)
        # If this block has the weight w in the whole, its log-sum-exp moves the output by w times
        # the difference of the block's output from the whole.
        weight = (lse.detach() - whole.masked_fill(whole == float("-inf"), float("inf"))).exp()
        to_out = (g * weight[..., None]).to(out.dtype)
        to_lse = weight * ((g * out.detach().to(g.dtype)).sum(-1) + g_lse)
        grads = torch.autograd.grad((out, lse), leaves, (to_out, to_lse))
        for grad, (_, home, place) in zip(grads, wanted, strict=True):
            home[_at(home, place)] += grad


def _at(x: Tensor, place: Index) -> Any:
    """The index of a place in ``x``, ``[1 or B, Hk, G, rows, ...]``."""
    sequence, heads, rows = place
    every = slice(None)
    some = every if len(heads) == x.shape[1] else heads
    return every if len(x) == 1 else sequence, some, every, rows


def _parts(tensors: Iterable[Any], places: list[Index]) -> list[Any]:
    """What is at these places of as many of the tensors."""
    pairs = zip(tensors, places, strict=False)
    return [None if x is None else x[_at(x, place)] for x, place in pairs]


def _new_part(x: Tensor, parcel: Parcel) -> Tensor:
    """Memory for a parcel of another rank, whose tensor has the shape of ``x``."""
    sequences, rows = len(x[parcel.sequence]) if len(x) > 1 else 1, parcel.columns
    sizes = len(parcel.heads), x.shape[2], rows.stop - rows.start, *x.shape[4:]
    return x.new_empty((sequences, *sizes))


class RingAttention(torch.autograd.Function):
    """The output and the log-sum-exp of this rank's queries.

    Nothing that came from other ranks is kept for the backward pass: it comes again, and its
    gradients go back.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, values: Tensor | None, job: Job
    ) -> tuple[Tensor, Tensor]:
        """The tensors are those of a :class:`Job`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:4], v.shape[4]), dtype=wide)
        lse = q.new_full(q.shape[:4], float("-inf"), dtype=wide)
        for _, held in job.travel(job.own(k, v, values)):
            for parcel, keys in held:
                for block in parcel.blocks:
                    places = job.places(parcel, block)
                    inputs = _parts((q, values, *keys), places)
                    _merge(out, lse, *job.attend(block, parcel.sequence, inputs), places[0])
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
        to_q, to_k, to_v = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        learned = ctx.needs_input_grad[3] or job.kind == "sums"
        to_values = torch.zeros_like(values) if learned else None
        own, to_own = job.own(k, v, values), job.own(to_k, to_v, to_values)

        def collect(arrived: Held) -> None:
            for parcel, grads in arrived:
                for x, grad in zip(to_own, grads, strict=True):
                    x[_at(x, job.home(parcel))] += grad

        # Nothing is on its way yet.
        wait: Callable[[], Held] = list
        for step, held in job.travel(own):
            computed = []
            for parcel, keys in held:
                pairs = zip(keys, to_own, strict=True)
                to_keys = [torch.zeros_like(x, dtype=to.dtype) for x, to in pairs]
                tensors, to = (q, values, *keys), (to_q, to_values, *to_keys)
                for block in parcel.blocks:
                    job.add_gradients(parcel, block, tensors, to, rows)
                computed.append((parcel, to_keys))
            collect(wait())
            wait = job.send_gradients(own, step, computed)
        collect(wait())
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


class _Cumsum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, zigzag: bool) -> Tensor:
        ctx.given = ranks, zigzag
        return _sum(x, ranks, zigzag, backwards=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return _sum(g, *ctx.given, backwards=True), None, None


def _sum(x: Tensor, ranks: Ranks, zigzag: bool, *, backwards: bool) -> Tensor:
    """The sums up to each token, or from each token on."""
    chunks = x.unflatten(-1, (2 if zigzag else 1, -1))
    totals = ranks.gather(chunks.sum(-1), zigzag=zigzag)
    mine = [ranks.rank, 2 * ranks.world - 1 - ranks.rank][: chunks.shape[-2]]
    if backwards:
        chunks, totals = chunks.flip(-1), totals.flip(-1)
        mine = [totals.shape[-1] - 1 - chunk for chunk in mine]
    before = torch.nn.functional.pad(totals.cumsum(-1)[..., :-1], (1, 0))[..., mine]
    sums = chunks.cumsum(-1) + before[..., None]
    return torch.flatten(sums.flip(-1) if backwards else sums, -2)
