"""What the ranks of test_ring.py run. Each case is a claim, held against attention by a matrix."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# torch.autograd.grad imports it when first called: now once, not in every rank.
import torch.fx.experimental.symbolic_shapes
from torch.testing import assert_close

from posenc import FIRE, positions
from posenc.attention import DistanceTable, RowBias, RunningSum, Slopes
from posenc.interop import ring
from posenc.interop.ring import ring_attention, sharded_cumsum
from support.attention import written_down
from support.processes import each

LENGTH, HEADS, KV_HEADS, WIDTH = 24, 4, 2, 8


def attention(q, k, v, kind, values, *, causal=True, ids=None, zero=0):
    """Attention from the definition; a run of equal ids is a document."""
    own = torch.arange(q.shape[2]).expand(len(q), -1)
    if ids is not None:
        ids = torch.atleast_2d(ids).expand(len(q), -1)
        runs = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0)).cumsum(-1)
        ids = runs.masked_fill(ids < 0, -1)
    how = {"own": own, "scale": q.shape[3] ** -0.5, "causal": causal, "documents": ids}
    return written_down(q, k, v, values, kind, zero=zero, **how)[0]


def given(kind, *, batch=2, dtype=torch.float64, length=LENGTH, steep=0.3):
    """The tensors of the whole sequence, and the numbers of a bias."""
    g = torch.Generator().manual_seed(7)
    q = torch.randn(batch, HEADS, length, WIDTH, generator=g, dtype=torch.float64)
    k = torch.randn(batch, KV_HEADS, length, WIDTH, generator=g, dtype=torch.float64)
    v = torch.randn(batch, KV_HEADS, length, 5, generator=g, dtype=torch.float64)
    values = {
        "none": None,
        "slopes": steep * torch.arange(1, HEADS + 1, dtype=torch.float64),
        "table": torch.randn(HEADS, 15, generator=g, dtype=torch.float64),
        "sums": -torch.rand(batch, HEADS, length, generator=g, dtype=torch.float64) * 2 * steep,
    }[kind]
    return [x.to(dtype) for x in (q, k, v)], values


def compare(kind, *, zigzag, causal=True, ids=None, dtype=torch.float64, tolerance=1e-12, **how):
    """Output and all gradients are those of one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors, values = given(kind, dtype=dtype, **how)
    length = tensors[0].shape[2]
    mine = positions.context_parallel(length, rank, world, zigzag=zigzag)
    whole = [x.double().clone().requires_grad_() for x in tensors]
    numbers = [] if values is None else [values.clone().requires_grad_()]
    zero = 5
    (summed,) = [numbers[0].cumsum(-1)] if kind == "sums" else numbers or [None]
    wanted = attention(*whole, kind, summed, causal=causal, ids=ids, zero=zero)
    seed = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted_back = torch.autograd.grad(wanted, [*whole, *numbers], seed.double())

    local = [x[:, :, mine].clone().requires_grad_() for x in tensors]
    held = []
    if kind == "sums":
        held = [values[..., mine].clone().requires_grad_()]
        bias = RunningSum(sharded_cumsum(held[0], zigzag=zigzag))
    elif values is not None:
        held = [values.clone().requires_grad_()]
        bias = Slopes(held[0]) if kind == "slopes" else DistanceTable(held[0], zero)
    else:
        bias = None
    part = None if ids is None else ids[..., mine]
    got = ring_attention(*local, bias, zigzag=zigzag, causal=causal, document_ids=part)
    assert got.dtype == dtype
    close = partial(assert_close, rtol=tolerance, atol=tolerance)
    close(got.double(), wanted[:, :, mine].detach())
    got_back = torch.autograd.grad(got, [*local, *held], seed[:, :, mine])
    for a, b in zip(got_back[:3], wanted_back[:3], strict=True):
        close(a.double(), b[:, :, mine])
    for a, b in zip(got_back[3:], wanted_back[3:], strict=True):
        if kind == "sums":
            b = b[..., mine]
        else:
            # Every rank has the part of its own queries.
            dist.all_reduce(a)
        close(a.double(), b)


@contextmanager
def counted():
    """Numbers of all tensors that this rank sends."""
    sent, batch = [], dist.batch_isend_irecv

    def count(operations):
        sent.extend(x.tensor.numel() for x in operations if x.op is dist.isend)
        return batch(operations)

    dist.batch_isend_irecv = count
    try:
        yield sent
    finally:
        dist.batch_isend_irecv = batch


def everywhere() -> dict:
    cases = {}
    for kind in ("none", "slopes", "table", "sums"):
        for zigzag in (False, True):
            for causal in (True, False):
                name = f"{kind} {'zigzag' if zigzag else 'contiguous'} {causal}"
                cases[name] = partial(compare, kind, zigzag=zigzag, causal=causal)
    return cases


def documents() -> dict:
    one = torch.tensor([0] * 7 + [1] * 9 + [0] * 5 + [-1] * 3)
    each_its_own = torch.stack((one, torch.tensor([3] * 1 + [-1] * 2 + [4] * 21)))
    cases = {}
    for name, ids in (("shared", one), ("own", each_its_own)):
        for kind in ("slopes", "table", "sums"):
            for zigzag in (False, True):
                for causal in (True, False):
                    run = partial(compare, kind, zigzag=zigzag, causal=causal, ids=ids)
                    cases[f"documents {name} {kind} {zigzag} {causal}"] = run
    return cases


def narrow() -> dict:
    """Each block's output and gradient is rounded once to the dtype, and so is their sum."""
    cases = {}
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("slopes", "table", "sums"):
            tolerance = 16 * torch.finfo(dtype).eps
            run = partial(compare, kind, zigzag=True, dtype=dtype, tolerance=tolerance)
            cases[f"{kind} {dtype}"] = run
    return cases


def reached() -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()

    def numbers_sent(kind, steep, *, prune=True, zigzag=False, length=48 * 4, ids=None):
        (q, k, v), values = given(kind, length=length, steep=steep, batch=1)
        mine = positions.context_parallel(length, rank, world, zigzag=zigzag)
        bias = None
        if kind == "slopes":
            bias = Slopes(values)
        elif kind == "sums":
            bias = RunningSum(values.cumsum(-1)[..., mine])
        local = [x[:, :, mine] for x in (q, k, v)]
        part = None if ids is None else ids[mine]
        with counted() as sent:
            got = ring_attention(
                *local, bias, causal=True, prune=prune, zigzag=zigzag, document_ids=part
            )
        summed = values.cumsum(-1) if kind == "sums" else values
        wanted = attention(q, k, v, kind, summed, ids=ids)[:, :, mine]
        # The keys left out weigh at most eps / 8, here and in each rank's own chunk.
        assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        total = torch.tensor(sum(sent))
        dist.all_reduce(total)
        return int(total)

    def travelled():
        size = 48 * 4 // world
        chunk = KV_HEADS * size * (WIDTH + 5)
        # Each rank sends its keys to each later rank, and in zig-zag order half of them or all.
        assert numbers_sent("none", 0.0) == world * (world - 1) // 2 * chunk
        assert numbers_sent("none", 0.0, zigzag=True) * 2 == world * (world - 1) // 2 * chunk * 3
        assert numbers_sent("slopes", 8.0, prune=False) == world * (world - 1) // 2 * chunk
        # Slopes of 8 and more: no key counts that is 20 tokens away, and only near ends travel.
        near = numbers_sent("slopes", 8.0)
        assert 0 < near < (world - 1) * chunk * 20 // size
        assert near < numbers_sent("slopes", 2.0) < numbers_sent("slopes", 0.5)
        assert numbers_sent("slopes", 0.0) == world * (world - 1) // 2 * chunk
        # A running sum goes down by 4 a token on average: a chunk further on counts no more.
        assert numbers_sent("sums", 4.0) == (world - 1) * (chunk + HEADS * size)
        assert numbers_sent("sums", 4.0, zigzag=True) > 0

    def one_document_for_each_rank():
        ids = torch.arange(world).repeat_interleave(48 * 4 // world)
        assert numbers_sent("slopes", 0.0, ids=ids) == 0

    def a_nan_key_prunes_nothing():
        (q, k, v), values = given("slopes", steep=8.0)
        k[0, 0, 0] = float("nan")
        mine = positions.context_parallel(LENGTH, rank, world)
        got = ring_attention(*(x[:, :, mine] for x in (q, k, v)), Slopes(values), causal=True)
        assert got[0, : HEADS // KV_HEADS].isnan().all()
        assert not got[1].isnan().any()

    def twice_the_same_bits():
        (q, k, v), values = given("table", dtype=torch.float32)
        mine = positions.context_parallel(LENGTH, rank, world, zigzag=True)
        runs = []
        for _ in range(2):
            inputs = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
            inputs.append(values.clone().requires_grad_())
            got = ring_attention(*inputs[:3], DistanceTable(inputs[3], 5), causal=True, zigzag=True)
            runs.append([got, *torch.autograd.grad(got, inputs, torch.ones_like(got))])
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

    local = locals()
    names = "travelled one_document_for_each_rank a_nan_key_prunes_nothing twice_the_same_bits"
    return {name: local[name] for name in names.split()}


def refused() -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    (q, k, v), slopes = given("slopes")

    def uneven():
        # Shapes that the ranks have not agreed on before.
        tokens = 5 + 2 * rank
        cut = [x[:, :, :tokens] for x in (q, k, v)]
        got = r"q must have one shape on every rank, got \[\(2, 4, 5, 8\), \(2, 4, 7, 8\)"
        with pytest.raises(ValueError, match=got):
            ring_attention(*cut, causal=True)

    def odd_halves():
        with pytest.raises(ValueError, match="even number of tokens if zigzag"):
            ring_attention(*(x[:, :, :5] for x in (q, k, v)), causal=True, zigzag=True)

    def rows():
        with pytest.raises(TypeError, match="Gather the keys"):
            ring_attention(q, k, v, RowBias(lambda own, index: own), causal=True)
        fire = FIRE(HEADS, threshold=2.0).as_bias(6)
        with pytest.raises(TypeError, match="or None, got the bias of FIRE"):
            ring_attention(q, k, v, fire, causal=True)

    def a_cache():
        with pytest.raises(ValueError, match="k must have the 3 tokens of q"):
            ring_attention(q[:, :, :3], k, v, causal=True)

    def other_ranks():
        group = dist.new_group([0])
        if rank == 0:
            assert ring_attention(q, k, v, causal=True, group=group).shape == (2, HEADS, LENGTH, 5)
        else:
            with pytest.raises(ValueError, match=f"must be in group, got rank {rank}"):
                ring_attention(q, k, v, causal=True, group=group)

    local = locals()
    names = "uneven odd_halves rows a_cache other_ranks"
    return {name: local[name] for name in names.split()}


@contextmanager
def collectives():
    """The names of the collectives that this rank has joined."""
    joined, names = [], ("all_gather", "all_reduce")
    before = [getattr(dist, name) for name in names]

    def noting(name, function):
        def call(*arguments, **options):
            joined.append(name)
            return function(*arguments, **options)

        return call

    for name, function in zip(names, before, strict=True):
        setattr(dist, name, noting(name, function))
    try:
        yield joined
    finally:
        for name, function in zip(names, before, strict=True):
            setattr(dist, name, function)


def repeated(folder: Path) -> dict[str, str]:
    (q, k, v), slopes = given("slopes", length=8)
    both = ["all_reduce", "all_gather"]

    def joined(bias=None, *, tokens=8, group=None, **how):
        leaf = q[:, :, :tokens].clone().requires_grad_()
        with collectives() as found:
            kv = k[:, :, :tokens], v[:, :, :tokens]
            out = ring_attention(leaf, *kv, bias, causal=True, group=group, **how)
            out.sum().backward()
        return found

    def a_shape_is_compared_once():
        assert joined() == ["all_gather"]
        assert joined() == joined(Slopes(slopes), prune=False) == joined(zigzag=True) == []
        assert joined(tokens=6) == ["all_gather"]
        assert joined(tokens=6) == joined() == []

    def a_group_compares_its_own_shapes():
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        for group in groups:
            assert joined(group=group) == ["all_gather"]
            assert joined(group=group) == []

    def a_shape_that_was_refused_is_compared_again():
        for _ in range(2):
            with pytest.raises(ValueError, match="q must have one shape on every rank"):
                joined(tokens=1 + dist.get_rank())

    def pruning_and_documents_need_the_other_ranks():
        ids = torch.zeros(8, dtype=torch.int64)
        for _ in range(2):
            assert joined(Slopes(slopes)) == both
            assert joined(RunningSum(-slopes[:, None] * torch.arange(8))) == both
            assert joined(document_ids=ids) == ["all_gather"]

    def a_group_remembers_few_shapes():
        group = dist.new_group([0, 1])
        for tokens in range(1, 2 * ring._MOST_SHAPES):
            x = torch.zeros(1, 1, tokens, 1)
            ring_attention(x, x, x, causal=True, group=group)
            assert 0 < len(ring._agreed[group]) <= ring._MOST_SHAPES
        seen = len(ring._agreed)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert len(ring._agreed) < seen

    local = locals()
    names = (
        "a_shape_is_compared_once a_group_compares_its_own_shapes "
        "a_shape_that_was_refused_is_compared_again pruning_and_documents_need_the_other_ranks "
        "a_group_remembers_few_shapes"
    )
    return each({name: local[name] for name in names.split()})


def some(folder: Path) -> dict[str, str]:
    chosen = ("zigzag True", "contiguous False", "own table False", "own sums True", "bfloat16")
    cases = everywhere() | documents() | narrow()
    found = {name: case for name, case in cases.items() if any(c in name for c in chosen)}
    return each(found | reached() | refused())


def many(folder: Path) -> dict[str, str]:
    return each(everywhere() | documents() | narrow() | reached() | refused())
