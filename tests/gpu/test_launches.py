"""Ops on a GPU launch their kernels themselves, once Python has compiled them."""

import threading

import pytest
import torch

import posenc
from oracles import tables
from posenc.functional import qk_norm_rope, rotate_and_cache
from posenc.kernels import Rows, Spec, native, reference
from posenc.kernels.cache import rotate_and_cache_op
from posenc.kernels.rotation import norm_rotate_qk_op, rotate_qk_in_place_op, rotate_qk_op

CUDA = "cuda"
pytestmark = pytest.mark.skipif(
    not native.launches_kernels, reason="the extension was not built, or finds no driver"
)
FORMS = {
    "offset": lambda batch, length: {"offset": 5},
    "ids": lambda batch, length: {"position_ids": torch.randint(0, 64, (batch, length)).to(CUDA)},
    "ids-of-all": lambda batch, length: {"position_ids": torch.randint(0, 64, (length,)).to(CUDA)},
    "ids-of-32-bits": lambda batch, length: {
        "position_ids": torch.randint(0, 64, (1, length)).int().to(CUDA)
    },
}


@pytest.fixture
def refuse_python(monkeypatch):
    """After this is called, the implementations in Python are not there."""

    def refuse():
        for op in (rotate_qk_op, rotate_qk_in_place_op, norm_rotate_qk_op, rotate_and_cache_op):
            monkeypatch.setattr(op, "run", None)

    return refuse


def halves(*shape):
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("seq_dim", [-2, 1])
@pytest.mark.parametrize("length", [1, 33])
def test_a_native_launch_is_the_one_of_python(form, interleaved, seq_dim, length, refuse_python):
    rope = posenc.RoPE(64, 64, interleaved=interleaved, seq_dim=seq_dim).to(CUDA)
    q, k = halves(2, length, 6, 64), halves(2, length, 2, 64)
    if seq_dim == -2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    where = FORMS[form](2, length)
    first = rope(q, k, **where)
    written = q.clone(), k.clone()
    rope.forward_(*written, **where)
    again = rope(q, k, **where)
    refuse_python()
    native_call = rope(q, k, **where)
    in_place = q.clone(), k.clone()
    rope.forward_(*in_place, **where)
    for results in (again, native_call, written, in_place):
        for got, wanted in zip(results, first, strict=True):
            assert torch.equal(got, wanted)
    for got, x in zip(native_call, (q, k), strict=True):
        assert got.stride() == torch.empty_like(x).stride()
        assert got.data_ptr() != x.data_ptr()
    assert in_place[0]._version == 1


def test_rows_of_a_native_launch_are_those_of_the_call(refuse_python):
    """The first row is an argument of the kernel, not part of it."""
    cos, sin = (table.float() for table in tables(64, 32, CUDA))
    q, k = halves(1, 4, 1, 64), halves(1, 2, 1, 64)
    for start in (0, 1, 40):
        got = posenc.functional.rotate_qk(q, k, cos, sin, offset=start)
        for y, x in zip(got, (q, k), strict=True):
            exact = reference.rotate(x, cos.double(), sin.double(), Rows(start), Spec())
            assert torch.equal(y, exact)
        refuse_python()


@pytest.mark.parametrize("length", [1, 40, 1500])
def test_norms_and_caches_are_launched_natively(length, refuse_python):
    cos, sin = (table.float() for table in tables(2048, 32, CUDA))
    q, k, v = halves(1, 4, length, 64), halves(1, 2, length, 64), halves(1, 2, length, 64)
    weights = halves(64), halves(64)
    slots = torch.arange(length, device=CUDA)[None]
    found = []
    for _ in range(3):
        caches = halves(2, 128, 16, 2, 64).zero_()
        normed = qk_norm_rope(q, k, *weights, cos, sin)
        names = {"q_weight": weights[0], "k_weight": weights[1]}
        rotated = rotate_and_cache(q, k, v, cos, sin, *caches, slots, **names)
        found.append((*normed, rotated, caches))
        if len(found) == 2:
            refuse_python()
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))


def test_streams_graphs_and_threads_have_their_own_launches():
    rope, q, k = posenc.RoPE(64, 64).to(CUDA), halves(1, 8, 1, 64), halves(1, 2, 1, 64)
    wanted, _ = rope(q, k, 7)
    other, wrong = torch.cuda.Stream(), []
    with torch.cuda.stream(other):
        on_stream, _ = rope(q, k, 7)
    other.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = rope(q, k, 7)
    captured.zero_()
    graph.replay()

    def work():
        for _ in range(50):
            if not torch.equal(rope(q, k, 7)[0], wanted):
                wrong.append(0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(on_stream, wanted)
    assert torch.equal(captured, wanted)
    assert not wrong


def test_positions_past_a_table_that_grows_are_computed():
    """A table that was made for a few tokens is no limit, and no kernel may stop at its end."""
    rope, q, k = posenc.RoPE(64, None).to(CUDA), halves(1, 8, 3, 64), halves(1, 2, 3, 64)
    rope(q, k)
    ids = torch.tensor([[5, 4000, 70_000]], device=CUDA)
    got, _ = rope(q, k, position_ids=ids)
    cos, sin = rope.tables(ids)
    assert torch.equal(got, posenc.functional.rotate(q, cos, sin))


def test_what_a_kernel_cannot_take_is_refused_natively():
    rope, q, k = posenc.RoPE(64, 64).to(CUDA), halves(1, 8, 3, 64), halves(1, 2, 3, 64)
    rope(q, k)
    with pytest.raises(ValueError, match="max_seq_len=64"):
        rope(q, k, 62)
    with pytest.raises(ValueError, match="agree in batch"):
        rope(q, k[:, :, :2])
    strided = torch.stack((q, q), -1)[..., 0]
    assert torch.equal(rope(strided, k, 3)[0], rope(q, k, 3)[0])
