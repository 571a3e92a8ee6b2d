"""Ops on a GPU launch their kernels themselves, once Python has compiled them."""

import subprocess
import sys
import threading
from importlib.util import find_spec

import pytest
import torch

import posenc
from oracles import tables
from posenc.attention import DistanceTable, RunningSum, Slopes, biased_attention_with_lse
from posenc.functional import qk_norm_rope, rotate_and_cache
from posenc.ops import Spec, TableRows, execute, native
from posenc.ops.rotation import reference

CUDA = "cuda"
# An extension that is there, but finds no driver or lacks a function of torch, fails these tests.
pytestmark = pytest.mark.skipif(
    find_spec("posenc.ops.native._native") is None,
    reason="posenc runs from source here, and its C extension was not built",
)
FORMS = {
    "offset": lambda batch, length: {"offset": 5},
    "ids": lambda batch, length: {"position_ids": torch.randint(0, 64, (batch, length)).to(CUDA)},
    "ids-of-all": lambda batch, length: {"position_ids": torch.randint(0, 64, (length,)).to(CUDA)},
    "ids-of-32-bits": lambda batch, length: {
        "position_ids": torch.randint(0, 64, (1, length)).int().to(CUDA)
    },
}


def test_c_launches_kernels():
    """Else Python does, with the same results and several times the time for few tokens."""
    assert native.carries_out_plans, posenc.backends()


@pytest.fixture
def refuse_python(monkeypatch):
    """After this is called, Python makes no plan and carries none out."""

    def refuse():
        monkeypatch.setattr(execute, "run", None)

    return refuse


def halves(*shape):
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)


def steps(x):
    """The strides of axes of several elements."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


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
        assert steps(got) == steps(torch.empty_like(x))
        assert got.data_ptr() != x.data_ptr()
    assert in_place[0]._version == 1


def test_rows_of_a_native_launch_are_those_of_the_call(refuse_python):
    """The first row is an argument of the kernel, not part of it."""
    cos, sin = (table.float() for table in tables(64, 32, CUDA))
    q, k = halves(1, 4, 1, 64), halves(1, 2, 1, 64)
    for start in (0, 1, 40):
        got = posenc.functional.rotate_qk(q, k, cos, sin, offset=start)
        for y, x in zip(got, (q, k), strict=True):
            exact = reference.rotate(x, cos.double(), sin.double(), TableRows(start), Spec())
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


@pytest.mark.parametrize(
    "where", [{"offset": 9}, {"position_ids": [[1, 0, 40]]}], ids=["at", "ids"]
)
def test_pope_is_launched_natively(where, refuse_python):
    pope = posenc.PoPE(64, num_kv_heads=2, max_seq_len=64).to(CUDA)
    pope.delta.data.uniform_(-6.0, 0.0)
    q, k = halves(1, 4, 3, 64), halves(1, 2, 3, 64)
    if "position_ids" in where:
        where = {"position_ids": torch.tensor(where["position_ids"], device=CUDA)}
    with torch.no_grad():
        first = pope(q, k, **where)
        refuse_python()
        assert all(map(torch.equal, pope(q, k, **where), first))
        if "offset" in where:
            with pytest.raises(ValueError, match="64"):
                pope(q, k, offset=62)


def test_doubled_tables_are_checked_and_taken_as_they_are(refuse_python):
    cos, sin = (t.float().repeat(1, 2)[None] for t in tables(5, 32, CUDA))
    q, k = halves(2, 4, 5, 64), halves(2, 2, 5, 64)
    wanted = posenc.functional.rotate_qk(q, k, cos[0, :, :32], sin[0, :, :32], interleaved=False)
    posenc.interop.huggingface.apply_rotary_pos_emb(q, k, cos, sin)
    refuse_python()
    for _ in range(2):
        got = posenc.interop.huggingface.apply_rotary_pos_emb(q, k, cos, sin)
        assert all(map(torch.equal, got, wanted))


WRONG = """
import torch
from posenc.interop.huggingface import apply_rotary_pos_emb
q = torch.randn(1, 2, 3, 8, device="cuda", dtype=torch.bfloat16)
cos, sin = torch.ones(2, 1, 3, 8, device="cuda").unbind()
for _ in range({calls}):
    apply_rotary_pos_emb(q, q.clone(), cos, sin)
torch.cuda.synchronize()
sin[0, 2, 7] = 2
try:
    apply_rotary_pos_emb(q, q.clone(), cos, sin)
    torch.cuda.synchronize()
except RuntimeError:
    print("stopped")
"""


@pytest.mark.parametrize("calls", [0, 2])
def test_tables_that_differ_in_a_pair_stop_the_device(calls):
    done = subprocess.run(
        [sys.executable, "-c", WRONG.format(calls=calls)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["stopped"], done.stderr


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


BIASES = {
    "none": lambda keys: None,
    "slopes": lambda keys: Slopes(torch.rand(4, device=CUDA)),
    "table": lambda keys: DistanceTable(torch.randn(4, 50, device=CUDA), 7),
    "sums": lambda keys: RunningSum(torch.rand(4, keys, device=CUDA).double().cumsum(-1)),
}
LENGTHS = {"token": (1, 300), "first-token": (1, 20), "tokens": (7, 40), "prompt": (130, 130)}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-sides"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_attention_is_launched_natively(bias, causal, lengths, refuse_python):
    queries, keys = lengths
    given = BIASES[bias](keys)
    q, k, v = halves(2, 4, queries, 64), halves(2, 2, keys, 64), halves(2, 2, keys, 32)

    def attend(**options):
        return biased_attention_with_lse(q, k, v, given, causal=causal, **options)

    def results():
        others = attend(window=9), attend(scale=0.5, prune=False)
        return [attend(), *[attend(query_offset=n) for n in offsets], *others]

    offsets = sorted({0, min(3, keys - queries), keys - queries})
    dense = [attend(query_offset=n, backend="dense") for n in offsets]
    wanted, originals = results(), (q, k, v)
    refuse_python()
    q, k, v = (torch.randn_like(x) for x in originals)
    attend()
    q, k, v = originals
    got = results()
    for ours, theirs in zip(got, wanted, strict=True):
        assert all(map(torch.equal, ours, theirs))
    # The first row is an argument of the kernel.
    for ours, theirs in zip(got[1:], dense, strict=False):
        assert torch.allclose(ours[0].float(), theirs[0].float(), rtol=2e-2, atol=2e-2)
        assert torch.allclose(ours[1], theirs[1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("bias", "learned"),
    [*[(bias, False) for bias in BIASES], ("slopes", True), ("table", True)],
)
def test_gradients_of_attention_are_launched_natively(bias, learned, refuse_python):
    given, found = BIASES[bias](130), []
    numbers = [given.values.requires_grad_()] if learned else []
    start = [halves(2, 4, 130, 64), halves(2, 2, 130, 64), halves(2, 2, 130, 64)]
    g = halves(2, 4, 130, 64)
    for _ in range(3):
        q, k, v = (x.clone().requires_grad_() for x in start)
        out, _ = biased_attention_with_lse(q, k, v, given, causal=True)
        found.append((out.detach(), *torch.autograd.grad(out, (q, k, v, *numbers), g)))
        refuse_python()
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))


def test_attention_of_a_tensor_to_itself_says_nothing_of_others():
    """Three arguments at one address say nothing of the next call."""
    x, y, z = halves(3, 1, 4, 80, 64).unbind()
    posenc.attention.biased_attention(x, x, x, causal=True)
    wanted = posenc.attention.biased_attention(x, y, z, causal=True, backend="chunked")
    got = [posenc.attention.biased_attention(x, y, z, causal=True) for _ in range(3)]
    assert torch.allclose(got[0].float(), wanted.float(), rtol=2e-2, atol=2e-2)
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])


def test_learned_numbers_get_their_gradient_in_every_call():
    """Running sums have torch operations in their backward pass, which stays Python's."""
    q, k, v, g = halves(4, 2, 4, 70, 64).unbind()
    sums, found = torch.rand(4, 70, device=CUDA).double().cumsum(-1).requires_grad_(), []
    for _ in range(3):
        out = posenc.attention.biased_attention(q, k, v, RunningSum(sums), causal=True)
        found.append(torch.autograd.grad(out, sums, g)[0])
    assert found[0].abs().min() > 0
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_norms_of_equal_heads_are_both_launched():
    cos, sin = (table.float() for table in tables(4096, 32, CUDA))
    q, k, weight = halves(2, 4, 2000, 64), halves(2, 4, 2000, 64), halves(64)
    for _ in range(3):
        got = qk_norm_rope(q, k, weight, weight, cos, sin)
        swapped = qk_norm_rope(k, q, weight, weight, cos, sin)
        assert torch.equal(got[0], swapped[1])
        assert torch.equal(got[1], swapped[0])
        torch.full_like(q, torch.nan)  # what a result that nobody writes would hold


PRODUCTS = {
    "RelativeKeys": lambda: posenc.RelativeKeys(64, max_distance=40),
    "DeBERTa": lambda: posenc.DeBERTaBias(
        4, head_dim=64, max_relative_positions=64, position_buckets=32, causal=False
    ),
    "FIRE": lambda: posenc.FIRE(4, threshold=20.0),
    "TransformerXL": lambda: posenc.TransformerXLBias(4, embed_dim=256),
    "CoPE": lambda: posenc.CoPE(64, max_pos=20),
}


@pytest.mark.parametrize("make", PRODUCTS.values(), ids=PRODUCTS)
def test_products_and_their_gradients_are_launched_natively(make, refuse_python):
    """The same bits as by Python, for other values of the tensors too."""
    module, found = make().to(CUDA), []
    inputs = [halves(2, heads, 150, 64) for heads in (4, 2, 2)]
    others = [halves(2, heads, 150, 64) for heads in (4, 2, 2)]
    g = halves(2, 4, 150, 64)
    for n in range(4):
        given = [x.clone().requires_grad_() for x in (others if n == 2 else inputs)]
        out = module(*given)
        out.backward(g)
        parameters = [x.grad for x in module.parameters()]
        found.append([out, *[x.grad for x in given], *parameters])
        module.zero_grad()
        if n == 1:
            refuse_python()
    for n in (1, 3):
        assert all(map(torch.equal, found[n], found[0]))
    assert not torch.equal(found[2][0], found[0][0])
