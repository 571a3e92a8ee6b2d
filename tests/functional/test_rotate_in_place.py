"""Rotation in place: what is written, what is refused, and what overlaps."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.autograd.forward_ad import dual_level
from torch.utils.flop_counter import FlopCounterMode

import oracles
from oracles import tables
from posenc.functional import qk_norm_rope, rotate, rotate_, rotate_qk, rotate_qk_


def test_one_graph_writes_into_views_of_every_length():
    cos, sin = tables(40, 4)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    def rotation(x):
        q, k, _ = x.unflatten(-1, (3, 2, 8)).transpose(1, 3).unbind(2)
        return rotate_qk_(q, k, cos, sin)

    compiled = torch.compile(rotation, backend=count, fullgraph=True, dynamic=True)
    for length in (11, 13, 30):
        x = torch.randn(3, length, 48)
        y = x.clone()
        for a, b in zip(compiled(x), rotation(y), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(x, y)
    assert len(graphs) == 1
    with pytest.raises(Exception, match="must not share memory with itself"):
        compiled(torch.randn(1, 5, 48).expand(3, 5, 48))


def test_meta_tensors_share_no_memory():
    cos, sin = (t.to("meta") for t in tables(9, 4))
    q, k = torch.empty(2, 4, 9, 8, device="meta"), torch.empty(2, 2, 9, 8, device="meta")
    assert rotate_qk_(q, k, cos, sin)[0] is q


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "gradient"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
def test_queries_and_keys_are_rotated_in_place_in_a_packed_tensor(interleaved, recorded):
    """Slices of one packed projection: each is written, and what lies between is not."""
    packed = torch.randn(2, 5, 8, 8)
    cos, sin = oracles.tables(9, 4)
    source = packed.clone().requires_grad_() if recorded else packed.clone()
    whole = source * 1.0
    q, k = whole[:, :, :4].transpose(1, 2), whole[:, :, 4:6].transpose(1, 2)
    wanted = rotate_qk(
        q.detach().clone(), k.detach().clone(), cos, sin, offset=3, interleaved=interleaved
    )
    assert rotate_qk_(q, k, cos, sin, offset=3, interleaved=interleaved)[1] is k
    for got, expected in zip((q, k), wanted, strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(whole[:, :, 6:], packed[:, :, 6:])
    if recorded:
        whole.sum().backward()
        still = torch.ones(2, 5, 2, 8)
        assert torch.equal(source.grad[:, :, 6:], still)
        assert not torch.equal(source.grad[:, :, :6], torch.ones(2, 5, 6, 8))


def test_one_tensor_is_not_rotated_twice_in_place():
    x, before = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2)
    cos, sin = oracles.tables(1, 1)
    compiled = torch.compile(rotate_qk_, backend="aot_eager")
    for call, mode in (
        (rotate_qk_, nullcontext()),
        (rotate_qk_, FlopCounterMode(display=False)),
        (compiled, nullcontext()),
    ):
        with mode, pytest.raises(ValueError, match="q and k must not share memory"):
            call(x, x, cos, sin)
    q, k = torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2)
    with pytest.raises(ValueError, match="must stay below the rows of cos"):
        rotate_qk_(q, k, cos, sin, position_ids=torch.tensor([0, 0, 4]))
    assert torch.equal(x, before)
    assert torch.equal(q, torch.ones(1, 1, 3, 2))


@pytest.mark.parametrize(
    ("parts", "meets"),
    [
        pytest.param(lambda x: (x[:, :, :4], x[:, :, 4:6]), False, id="side-by-side"),
        pytest.param(lambda x: (x[:, :, 4:6], x[:, :, :4]), False, id="the-other-way"),
        pytest.param(lambda x: (x[:, :, ::2], x[:, :, 1::2]), False, id="heads-in-turn"),
        pytest.param(lambda x: (x[:, :, :4], x[:, :, 3:6]), True, id="one-head-shared"),
        pytest.param(lambda x: (x[:, :, :4], x[:, :, :4]), True, id="views-of-one"),
        pytest.param(lambda x: (x[..., :4], x[..., 4:]), False, id="channels"),
    ],
)
def test_only_tensors_that_share_no_element_are_written_in_place(parts, meets):
    whole = torch.randn(2, 5, 6, 8)
    before = whole.clone()
    q, k = (part.transpose(1, 2) for part in parts(whole))
    cos, sin = tables(9, 2)
    if not meets:
        wanted = rotate_qk(q.clone(), k.clone(), cos, sin)
        got = rotate_qk_(q, k, cos, sin)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        return
    with pytest.raises(ValueError, match="must not share memory"):
        rotate_qk_(q, k, cos, sin)
    assert torch.equal(whole, before)


def test_a_leaf_is_refused_before_anything_is_written():
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4, requires_grad=True)
    before = q.clone()
    for each in (k, k.view(1, 2, 3, 4)):
        for mode in (nullcontext(), FlopCounterMode(display=False), dual_level()):
            with mode, pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
                rotate_qk_(q, each, *tables(9, 2))
            assert torch.equal(q, before)
    with torch.inference_mode():
        made = torch.randn(1, 2, 3, 4)
    cos, sin = tables(9, 2)
    with torch.no_grad(), pytest.raises(ValueError, match="an inference tensor must not"):
        rotate_qk_(q, made, cos, sin)
    with pytest.raises(ValueError, match="an inference tensor must not"):
        rotate_qk_(q, made, cos.requires_grad_(), sin)
    assert torch.equal(q, before)
    with pytest.raises(ValueError, match="must not share memory with itself"):
        rotate_(torch.arange(8.0).expand(1, 1, 6, 8), *tables(9, 2))


def test_tensors_of_two_dtypes_in_one_memory_are_told_apart():
    memory = torch.randn(64)
    halves = memory.view(torch.bfloat16)
    q = memory[:32].view(1, 1, 4, 8)
    with pytest.raises(ValueError, match="must not share memory"):
        rotate_qk_(q, halves[32:64].view(1, 1, 4, 8), *tables(9, 4))
    rotate_qk_(q, halves[64:96].view(1, 1, 4, 8), *tables(9, 4))


def test_one_memory_under_two_storages_is_seen():
    memory = np.random.default_rng(0).standard_normal(48).astype("f4").reshape(1, 1, 4, 12)
    q, k = (torch.from_numpy(memory[..., at : at + 8]) for at in (0, 4))
    before = memory.copy()
    with pytest.raises(ValueError, match="must not share memory"):
        rotate_qk_(q, k, *tables(9, 4))
    assert (memory == before).all()


def test_one_tensor_is_rotated_as_queries_and_keys_are():
    x, (cos, sin) = torch.randn(2, 3, 5, 8), tables(9, 4)
    assert torch.equal(rotate(x, cos, sin, offset=2), rotate_qk(x, x, cos, sin, offset=2)[0])
    y = x.clone()
    assert rotate_(y, cos, sin, offset=2) is y
    assert torch.equal(y, rotate(x, cos, sin, offset=2))


@pytest.mark.parametrize("seq_dim", [1, -3])
def test_tokens_may_come_before_heads(seq_dim):
    """As flash-attn has them: no transpose of the caller's, and memory in the caller's order."""
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
    where = {"position_ids": torch.tensor([3, 1, 4, 1, 5]), "interleaved": False}
    tables_ = tables(9, 4)
    wanted = rotate_qk(q.transpose(1, 2), k.transpose(1, 2), *tables_, **where)
    found = rotate_qk(q, k, *tables_, seq_dim=seq_dim, **where)
    for got, expected in zip(found, wanted, strict=True):
        assert torch.equal(got, expected.transpose(1, 2))
        assert got.is_contiguous()
    assert torch.equal(rotate(q, *tables_, seq_dim=seq_dim, **where), found[0])
    weights = torch.rand(8), torch.rand(16)
    normed = qk_norm_rope(q, k, *weights, *tables_, seq_dim=seq_dim, **where)
    swapped = qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), *weights, *tables_, **where)
    assert all(torch.equal(a, b.transpose(1, 2)) for a, b in zip(normed, swapped, strict=True))
    rotate_qk_(q, k, *tables_, seq_dim=seq_dim, **where)
    assert torch.equal(q, found[0])
    assert torch.equal(k, found[1])
    with pytest.raises(ValueError, match="seq_dim must be -2"):
        rotate(q, *tables_, seq_dim=0)
    with pytest.raises(ValueError, match=r"x must have shape \(B, L, H, D\)"):
        rotate(q[0], *tables_, seq_dim=1)


@pytest.mark.parametrize("heads", [(5, 2), (4, 5), (5, 5)])
def test_as_many_tokens_as_heads_with_strided_channels(heads):
    """A copy of such a tensor must not take tokens for heads."""
    q, k = (torch.randn(2, 5, n, 8) for n in heads)
    strided = [x.mT.contiguous().mT for x in (q, k)]
    weights, tables_ = (torch.rand(8), torch.rand(8)), tables(9, 4)
    for function, how in ((rotate_qk, ()), (qk_norm_rope, weights)):
        wanted = function(q, k, *how, *tables_, seq_dim=1)
        assert all(map(torch.equal, function(*strided, *how, *tables_, seq_dim=1), wanted))
    wanted = rotate_qk(q, k, *tables_, seq_dim=1, interleaved=False)
    assert torch.equal(rotate(strided[0], *tables_, seq_dim=1, interleaved=False), wanted[0])
    rotate_qk_(*strided, *tables_, seq_dim=1, interleaved=False)
    assert all(map(torch.equal, strided, wanted))


@pytest.mark.parametrize(
    ("interleaved", "batch"), [(False, ()), (True, (2,))], ids=["half", "interleaved-of-each"]
)
def test_tables_with_both_numbers_of_a_pair_are_accepted(interleaved, batch):
    x, (cos, sin) = torch.randn(2, 3, 5, 8), tables(9, 4)
    cos, sin = (t.expand(*batch, 9, 4) for t in (cos, sin))
    twice = [
        t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin)
    ]
    wanted = rotate(x, cos, sin, interleaved=interleaved)
    assert torch.equal(rotate(x, *twice, interleaved=interleaved), wanted)
    y = x.clone()
    assert torch.equal(rotate_(y, *twice, interleaved=interleaved), wanted)
    compiled = torch.compile(rotate, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, *twice, interleaved=interleaved), wanted)
    with pytest.raises(ValueError, match="both numbers of a pair must be the same in cos"):
        rotate(x, *twice, interleaved=not interleaved)
