"""What the ranks of test_distributed.py run. Each case is a claim, held against one process."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

# torch.compile imports it: now once, not in every rank.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

import posenc
import posenc.interop.distributed
from posenc import attention, axes, functional, positions, scaling
from posenc.functional.biased import attend_last
from support.processes import each

R, BATCH, HEADS, LENGTH = Replicate(), Shard(0), Shard(1), Shard(2)


def equal_to_one_process(function, tensors, placements, mesh):
    """``function`` of DTensors is that of plain tensors, and so are the gradients: to the bit."""
    plain = [x.clone().requires_grad_() for x in tensors]
    spread = [activation(x, mesh, p) for x, p in zip(tensors, placements, strict=True)]
    wanted = _tuple(function(*plain))
    with CommDebugMode() as communication:
        got = _tuple(function(*spread))
    assert not communication.get_total_counts(), communication.get_comm_counts()
    generator = torch.Generator().manual_seed(1)
    for a, b, x in zip(wanted, got, spread, strict=False):
        assert b.placements == x.placements, f"{x.placements} became {b.placements}"
        assert torch.equal(b.full_tensor(), a)
    seeds = [torch.randn(y.shape, generator=generator) for y in wanted]
    wanted_back = torch.autograd.grad(wanted, plain, seeds)
    spread_seeds = [
        distribute_tensor(s, mesh, y.placements) for s, y in zip(seeds, got, strict=True)
    ]
    with CommDebugMode() as communication:
        got_back = torch.autograd.grad(got, spread, spread_seeds)
    assert not communication.get_total_counts(), communication.get_comm_counts()
    for a, b in zip(wanted_back, got_back, strict=True):
        assert torch.equal(b.full_tensor(), a)


def activation(x, mesh, placements):
    """``x`` spread over processes, and not a leaf: torch 2.11 gathers an uneven leaf's gradient."""
    return distribute_tensor(x, mesh, placements).requires_grad_().clone()


def _tuple(y):
    return y if isinstance(y, tuple) else (y,)


def biased_attention(mesh, ways):
    """The numbers of a bias are of the whole sequence, and so are their gradients."""
    g = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(4, heads, 24, 8, generator=g).double() for heads in (8, 4, 4))
    ids = torch.tensor([0] * 10 + [1] * 11 + [-1] * 3)
    slopes = attention.Slopes(torch.rand(4, 8, generator=g).double())
    sums = attention.RunningSum(-torch.rand(8, 24, generator=g).double().cumsum(-1))
    cases = [
        ((q, k, v), attention.Slopes(torch.rand(8, generator=g).double())),
        ((q, k, v), slopes),
        ((q, k, v), attention.DistanceTable(torch.randn(8, 9, generator=g).double(), 4)),
        ((q, k, v), sums),
        ((q, k, v), attention.RunningSum(-torch.rand(4, 8, 24, generator=g).double().cumsum(-1))),
        # One query, so that the ranks after the first have none; five tokens, of one head of keys.
        ((q[:, :, :1], k, v), slopes),
        ((q[:, :, :5], k[:, :1, :5], v[:, :1, :5]), slopes),
    ]
    run = attention.biased_attention_with_lse
    combinations = product(enumerate(cases), enumerate(ways), (False, True))
    for (n, (tensors, bias)), (turn, way), as_dtensor in combinations:
        # Two ranks take one by turns.
        if mesh.size() == 2 and as_dtensor == (n + turn) % 2:
            continue
        how = {"causal": n % 2 == 0, "window": 7 if n % 2 and as_dtensor else None}
        how["document_ids"] = ids[: tensors[1].shape[2]] if as_dtensor else None
        plain = [x.clone().requires_grad_() for x in (*tensors, bias.values)]
        wanted = run(*plain[:3], bias._replace(values=plain[3]), **how)
        of_keys = [R if p == HEADS and tensors[1].shape[1] == 1 else p for p in way]
        spread = [
            activation(x, mesh, p) for x, p in zip(tensors, (way, *[of_keys] * 2), strict=True)
        ]
        values = bias.values.clone().requires_grad_()
        if as_dtensor:
            values = activation(bias.values, mesh, [R] * mesh.ndim)
        with CommDebugMode() as communication:
            got = run(*spread, bias._replace(values=values), **how)
        # Ranks of a sequence that is cut may compare shapes, and gather keys; others say nothing.
        assert LENGTH in way or communication.get_total_counts() == 0
        for a, b in zip(wanted, got, strict=True):
            assert b.placements == tuple(way)
            assert_close(b.full_tensor(), a, rtol=1e-12, atol=1e-12)
        # A query that sees no key has no log-sum-exp to derive.
        seeds = [torch.ones_like(x) * x.detach().isfinite() for x in wanted]
        wanted_back = torch.autograd.grad(wanted, plain, seeds)
        seeds = [distribute_tensor(x, mesh, way) for x in seeds]
        got_back = torch.autograd.grad(got, [*spread, values], seeds)
        for a, b in zip(wanted_back, got_back, strict=True):
            b = b.full_tensor() if isinstance(b, DTensor) else b
            assert_close(b, a, rtol=1e-12, atol=1e-12)
    spread = [distribute_tensor(x, mesh, ways[-1]) for x in (q, k, v)]
    # What the layers of a patched model call.
    how = {"scale": 0.3, "causal": True, "prune": True}
    is_seen = (torch.arange(4 * 24).view(4, 24) % 7 != 3).byte()
    for padding in (None, is_seen, is_seen[:1]):
        of_ranks = padding
        if padding is is_seen:
            of_ranks = distribute_tensor(padding, mesh, [Shard(0), *[R] * (mesh.ndim - 1)])
        got = attend_last(*spread, sums, **how, padding=of_ranks)[0].full_tensor()
        wanted = attend_last(q, k, v, sums, **how, padding=padding)[0]
        assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match="k must be a DTensor, as q is, got Tensor"):
        run(spread[0], k, v, causal=True)
    with pytest.raises(TypeError, match="None where q is a DTensor, got a RowBias"):
        run(*spread, attention.RowBias(lambda own, index: own), causal=True)
    # These multiply queries by their parameters, or have a network.
    for module, name in (
        (posenc.CoPE(8, max_pos=3), "CoPE"),
        (posenc.RelativeKeys(8, max_distance=3), "RelativeKeys"),
        (posenc.FIRE(8, threshold=2.0), "the bias of FIRE"),
    ):
        who = type(module).__name__
        with pytest.raises(TypeError, match=rf"{who}: bias must .* DTensor, got {name}\.\n  Call"):
            module(*spread)


def queries_and_keys(length=8):
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, heads, length, 8, generator=g) for heads in (8, 4))
    return q, k


def ropes():
    """Every way to say where tokens are: a module, and what it is called with."""
    each_its_own = torch.tensor([[3 * b + t * (b + 1) for t in range(8)] for b in range(4)])
    yield "plain", posenc.RoPE(8, 64), {}
    yield "growing", posenc.RoPE(8, None), {}
    yield "half-partial", posenc.RoPE(8, 64, interleaved=False, rotary_dim=4), {}
    yield "last", posenc.RoPE(8, 64, rotary_dim=4, last=True, interleaved_out=False), {}
    yield "offset", posenc.RoPE(8, 64), {"offset": 5}
    yield "offsets", posenc.RoPE(8, None), {"offset": torch.tensor([0, 9, 4, 2])}
    yield "ids", posenc.RoPE(8, 64), {"position_ids": torch.arange(8).flip(0)}
    yield "ids-of-each", posenc.RoPE(8, None), {"position_ids": each_its_own}
    yield "dynamic", posenc.RoPE(8, None, scaling=scaling.DynamicNTK(2.0, original_length=4)), {}
    mrope = posenc.RoPE(8, None, axes=axes.Sections((2, 1, 1)))
    yield "coordinates", mrope, {"position_ids": positions.mrope([2, (1, 2, 2), 2])}


def on_a_line() -> dict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k = queries_and_keys()
    cases = {}
    for placement in (R, BATCH, HEADS, LENGTH):
        for name, rope, kw in ropes():
            cases[f"rope {name} {placement}"] = partial(
                equal_to_one_process, partial(rope, **kw), (q, k), ([placement],) * 2, mesh
            )
        cases |= other_functions(mesh, placement)
    return cases | special(mesh)


def other_functions(mesh, placement) -> dict:
    x = queries_and_keys()[0]
    cos, sin = posenc.RoPE(8).tables(torch.arange(20))
    ids = torch.tensor([4, 7, 1, 0, 3, 3, 2, 19])
    weight = torch.linspace(0.5, 1.5, 8)
    rope = posenc.RoPE(8, 64)

    def rotate_in_place(x):
        x = x * 1.0
        with torch.no_grad():
            functional.rotate_(x, cos, sin, offset=3)
        return x

    called = {
        "rotate_ in place": rotate_in_place,
        "functional.rotate_qk": lambda x: functional.rotate_qk(x, x, cos, sin, offset=2)[0],
        "functional.rotate ids": lambda x: functional.rotate(x, cos, sin, position_ids=ids),
        "rotary_pos_embedding": lambda x: functional.rotary_pos_embedding(x, ids),
        "RotaryPosEmbedding": posenc.RotaryPosEmbedding(),
        "RoPE.rotate": lambda x: rope.rotate(x, 9),
        "RoPE.unrotate": lambda x: rope.unrotate(x, 9),
        "RoPE.shift": lambda x: rope.shift(x, -2),
        "RoPE.rerotate": lambda x: rope.rerotate(x, ids, torch.arange(8)),
        "qk_norm_rope": lambda x: functional.qk_norm_rope(x, x, weight, weight, cos, sin)[0],
        "qk_norm_rope ids": lambda x: functional.qk_norm_rope(
            x, x, weight, weight, cos, sin, position_ids=ids
        )[0],
    }
    return {
        f"{name} {placement}": partial(equal_to_one_process, f, (x,), ([placement],), mesh)
        for name, f in called.items()
    }


def special(mesh) -> dict:
    world, rank = mesh.size(), mesh.get_local_rank()
    q, k = queries_and_keys()
    rope = posenc.RoPE(8, 64)

    def added():
        x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(3))
        for placement in (R, Shard(0), Shard(1)):
            for module in (posenc.SinusoidalPosEmbedding(), posenc.SinusoidalPE(64, 16)):
                for kw in ({}, {"offset": 7}, {"position_ids": torch.arange(8).flip(0)}):
                    f = partial(module, **kw)
                    equal_to_one_process(f, (x,), ([placement],), mesh)

    def scores():
        x = torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(3))
        for placement in (R, BATCH, HEADS, LENGTH, Shard(3)):
            equal_to_one_process(posenc.ALiBi(8).add_bias, (x,), ([placement],), mesh)

    def learned():
        x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(3))
        module = posenc.LearnedPosEmbedding(32, 16)
        nn.init.normal_(module.pos_emb.weight, generator=torch.Generator().manual_seed(4))
        module(x, 3).square().sum().backward()
        wanted, module.pos_emb.weight.grad = module.pos_emb.weight.grad, None
        for placement in (R, Shard(0), Shard(1)):
            y = module(distribute_tensor(x, mesh, [placement]), 3)
            assert torch.equal(y.full_tensor(), module(x, 3))
            y.square().sum().backward()
            got, module.pos_emb.weight.grad = module.pos_emb.weight.grad, None
            assert_close(got, wanted)

    def whole_modules():
        """Parameters and buffers that `distribute_module` made DTensors of."""
        x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(3))
        a, b = (distribute_tensor(t, mesh, [HEADS]) for t in queries_and_keys())
        for module, run in (
            (posenc.LearnedPosEmbedding(32, 16), lambda m: m(distribute_tensor(x, mesh, [R]), 3)),
            (
                posenc.MixedRoPE(8, num_kv_heads=4),
                lambda m: m(a, b, position_ids=positions.grid(2, 4))[0],
            ),
            (posenc.ALiBi(8), lambda m: m.attention(a, b, b)),
        ):
            # The same numbers on every rank, as a loaded checkpoint has them.
            for parameter in module.parameters():
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(4))
            wanted = run(module).full_tensor()
            assert torch.equal(run(distribute_module(module, mesh)).full_tensor(), wanted)
        assert torch.equal(module.get_bias(3), posenc.ALiBi(8).get_bias(3))

    def keys_on_every_rank():
        equal_to_one_process(rope, (q, k), ([HEADS], [R]), mesh)
        equal_to_one_process(rope, (q, k), ([LENGTH], [R]), mesh)

    def uneven():
        for length in (5, 7):
            tensors = queries_and_keys(length)
            equal_to_one_process(partial(rope, offset=3), tensors, ([LENGTH],) * 2, mesh)
            ids = torch.arange(length) * 2 + 1
            equal_to_one_process(partial(rope, position_ids=ids), tensors, ([LENGTH],) * 2, mesh)

    def sharded_ids():
        for module in (rope, posenc.RoPE(8, None)):
            for zigzag in (False, True):
                cut = partial(positions.context_parallel, 8, world_size=world, zigzag=zigzag)
                mine = cut(rank=rank)
                order = torch.cat([cut(rank=r) for r in range(world)])
                ids = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
                a, b = module(q, k)
                a, b = a[:, :, order], b[:, :, order]
                shards = [distribute_tensor(x[:, :, order], mesh, [LENGTH]) for x in (q, k)]
                with CommDebugMode() as communication:
                    c, d = module(*shards, position_ids=ids)
                assert communication.get_total_counts() == 0
                assert torch.equal(c.full_tensor(), a)
                assert torch.equal(d.full_tensor(), b)
                # The same with no DTensor at all: this rank's tokens, and where they are.
                e, f = module(q[:, :, mine], k[:, :, mine], position_ids=mine)
                assert torch.equal(e, c.to_local())
                assert torch.equal(f, d.to_local())

    def learned_tables():
        cos, sin = (t.float() for t in posenc.RoPE(8).tables(torch.arange(8)))
        plain = [t.clone().requires_grad_() for t in (cos, sin)]
        functional.rotate_qk(q, k, *plain)[0].square().sum().backward()
        for placement in (R, BATCH, HEADS, LENGTH):
            mine = [t.clone().requires_grad_() for t in (cos, sin)]
            shards = [distribute_tensor(x, mesh, [placement]) for x in (q, k)]
            functional.rotate_qk(*shards, *mine)[0].square().sum().backward()
            for a, b in zip(plain, mine, strict=True):
                assert_close(b.grad, a.grad)

    def out_of_range():
        shards = [distribute_tensor(x, mesh, [LENGTH]) for x in (q, k)]
        with pytest.raises(ValueError, match="below max_seq_len=64, got 67"):
            rope(*shards, offset=60)

    def fewer_tokens_than_ranks():
        one = queries_and_keys(1)
        for shards in ([LENGTH], [HEADS]):
            a, b = rope(*(distribute_tensor(x, mesh, shards) for x in one), offset=6)
            assert torch.equal(a.full_tensor(), rope(*one, 6)[0])
            assert torch.equal(b.full_tensor(), rope(*one, 6)[1])

    def compiled():
        f = torch.compile(partial(rope, offset=2), fullgraph=True, backend="aot_eager")
        wanted = rope(q, k, 2)
        # Each placement is compiled by itself, which takes seconds.
        for placement in (LENGTH, HEADS) if world > 2 else (LENGTH,):
            shards = [distribute_tensor(x, mesh, [placement]) for x in (q, k)]
            for a, b in zip(f(*shards), wanted, strict=True):
                assert a.placements == (placement,)
                assert torch.equal(a.full_tensor(), b)

    local = locals()
    names = (
        "added scores learned whole_modules keys_on_every_rank uneven sharded_ids "
        "learned_tables out_of_range fewer_tokens_than_ranks compiled"
    )
    ways = [BATCH], [HEADS], [LENGTH]
    cases = {name: local[name] for name in names.split()}
    return cases | {"biased_attention": partial(biased_attention, mesh, ways)}


def on_a_grid() -> dict:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    q, k = queries_and_keys()
    cases = {}
    for pair in product((R, BATCH, HEADS, LENGTH), repeat=2):
        for name, rope, kw in ropes():
            if name not in ("growing", "offset", "offsets", "ids-of-each"):
                continue
            f = partial(rope, **kw)
            cases[f"{name} {pair}"] = partial(equal_to_one_process, f, (q, k), (pair,) * 2, mesh)
    ways = [BATCH, LENGTH], [LENGTH, HEADS], [R, LENGTH], [LENGTH, LENGTH]
    return cases | {"biased_attention on a grid": partial(biased_attention, mesh, ways)}


def layouts(folder: Path) -> dict[str, str]:
    return each(on_a_line())


def more_layouts(folder: Path) -> dict[str, str]:
    return each(special(init_device_mesh("cpu", (4,))) | on_a_grid())
