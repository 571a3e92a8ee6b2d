"""Serving loops on a GPU: one graph for all lengths, and graphs replayed at other positions."""

import pytest
import torch

import posenc
from posenc import axes, scaling
from support.assertions import compilations

LENGTHS = (17, 64, 65, 100, 256, 300, 511, 777)
CUDA = "cuda"


def hidden(n):
    return (torch.randn(2, n, 64, device=CUDA),)


def heads(n, dtype=torch.float32):
    return tuple(torch.randn(2, count, n, 64, device=CUDA, dtype=dtype) for count in (8, 2))


def at_ids(n):
    return *heads(n), torch.randint(0, 1024, (2, n), device=CUDA)


def at_offsets(n):
    return *heads(n), torch.randint(0, 1024, (2,), device=CUDA)


def attended(n):
    q, k = heads(n)
    return q, k, torch.randn_like(k)


def by_ids(module, q, k, ids):
    return module(q, k, position_ids=ids)


def call(module, *arguments):
    return module(*arguments)


MODULES = {
    "sinusoid": (lambda: posenc.SinusoidalPosEmbedding(), hidden, call),
    "sinusoid-sized": (lambda: posenc.SinusoidalPE(1024, 64), hidden, call),
    "learned": (lambda: posenc.LearnedPosEmbedding(1024, 64), hidden, call),
    "rotary": (lambda: posenc.RotaryPosEmbedding(64, 1024), hidden, call),
    "rotary-growing": (lambda: posenc.RotaryPosEmbedding(), hidden, call),
    "rope": (lambda: posenc.RoPE(64, 1024), heads, call),
    "rope-half": (lambda: posenc.RoPE(64, 1024, interleaved=False), heads, call),
    "rope-growing": (lambda: posenc.RoPE(64, None), heads, call),
    "rope-yarn": (
        lambda: posenc.RoPE(64, None, scaling=scaling.YaRN(4.0, original_length=256)),
        heads,
        call,
    ),
    "rope-by-length": (
        lambda: posenc.RoPE(64, None, scaling=scaling.DynamicNTK(2.0, original_length=256)),
        heads,
        call,
    ),
    "rope-sections": (
        lambda: posenc.RoPE(64, None, axes=axes.Sections((8, 12, 12))),
        lambda n: (*heads(n), torch.randint(0, 1024, (3, 2, n), device=CUDA)),
        by_ids,
    ),
    "rope-ids": (lambda: posenc.RoPE(64, 1024), at_ids, by_ids),
    "rope-offsets": (lambda: posenc.RoPE(64, 2048), at_offsets, call),
    "rope-offsets-by-length": (
        lambda: posenc.RoPE(64, None, scaling=scaling.DynamicNTK(2.0, original_length=256)),
        at_offsets,
        call,
    ),
    "alibi": (lambda: posenc.ALiBi(8), attended, call),
    "alibi-scores": (
        lambda: posenc.ALiBi(8),
        lambda n: (torch.randn(1, 8, n, n, device=CUDA),),
        lambda module, scores: module.add_bias(scores),
    ),
    "t5-window": (
        lambda: posenc.T5Bias(8, causal=True),
        attended,
        lambda module, *xs: module(*xs, window=64),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_one_graph_serves_eight_lengths(name):
    make, arguments, run = MODULES[name]
    module = make().to(CUDA)
    calls = [arguments(n) for n in LENGTHS]
    assert compilations(lambda *xs: run(module, *xs), calls, dynamic=True) == 1


def replayed(step, inputs, others):
    """Capture ``step`` once and replay it for each of ``others``, copied over ``inputs``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*inputs)
    for other in others:
        for held, fresh in zip(inputs, other, strict=True):
            held.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        wanted = step(*[x.clone() for x in other])
        out, wanted = (y if isinstance(y, tuple) else (y,) for y in (out, wanted))
        assert all(map(torch.equal, out, wanted))


ROPES = {
    "sized": lambda: posenc.RoPE(64, 4096),
    "growing": lambda: posenc.RoPE(64, None, interleaved=False),
    "yarn": lambda: posenc.RoPE(64, None, scaling=scaling.YaRN(4.0, original_length=1024)),
    "by-length": lambda: posenc.RoPE(64, None, scaling=scaling.DynamicNTK(2.0, original_length=64)),
    "two-sets": lambda: posenc.RoPE(
        64,
        None,
        scaling=scaling.LongRoPE(
            (1.0,) * 32, long_factor=(4.0,) * 32, original_length=1000, short_attention_factor=1.1
        ),
    ),
    "partial": lambda: posenc.RoPE(64, None, rotary_dim=32, last=True),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROPES)
def test_a_replayed_graph_rotates_by_the_positions_it_finds(name, dtype):
    rope = ROPES[name]().to(CUDA)

    def inputs(at):
        return *heads(1, dtype), torch.tensor([[at], [4095 - at]], device=CUDA)

    calls = [inputs(at) for at in (0, 1, 77, 4095)]
    replayed(lambda q, k, ids: rope(q, k, position_ids=ids), inputs(3), calls)
    replayed(lambda q, k, ids: rope(q, k, ids[:, 0]), inputs(3), calls)


@torch.no_grad()
@pytest.mark.parametrize("name", ["by-length", "two-sets"])
def test_a_sequence_rotates_as_it_would_alone_whoever_is_beside_it(name):
    rope, starts = ROPES[name]().to(CUDA), torch.tensor([3, 1200], device=CUDA)
    q, k = heads(5, torch.bfloat16)
    got = rope(q, k, starts)
    ids = rope(q, k, position_ids=starts[:, None] + torch.arange(5, device=CUDA))
    for row, start in enumerate((3, 1200)):
        one = slice(row, row + 1)
        for alone, *batched in zip(rope(q[one], k[one], start), got, ids, strict=True):
            assert all(torch.equal(each[one], alone) for each in batched)


@torch.no_grad()
def test_a_replayed_graph_follows_three_coordinates():
    rope = posenc.RoPE(64, None, axes=axes.Sections((8, 12, 12))).to(CUDA)

    def inputs(at):
        return *heads(1), torch.tensor([[[at], [5]], [[2 * at], [6]], [[0], [at]]], device=CUDA)

    calls = [inputs(at) for at in (0, 9, 1000)]
    replayed(lambda q, k, ids: rope(q, k, position_ids=ids), inputs(3), calls)


@torch.no_grad()
def test_a_table_that_a_capture_would_grow_is_left_alone():
    """What is captured has not run: a table kept from it would hold whatever memory held."""
    rope = posenc.RoPE(64, None).to(CUDA)
    (q, k), (long_q, long_k) = heads(8), heads(64)
    rope(q, k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rope(long_q, long_k)
    assert rope.cos_cached.shape[0] < 64
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, out, rope(long_q, long_k)))


@torch.no_grad()
def test_a_replayed_graph_rotates_in_place():
    rope = posenc.RoPE(64, 4096).to(CUDA)
    cos, sin = rope.cos_cached, rope.sin_cached

    def step(q, k, ids):
        q, k = q.clone(), k.clone()
        posenc.functional.rotate_qk_(q, k, cos, sin, position_ids=ids)
        return q, k

    def inputs(at):
        return *heads(1, torch.bfloat16), torch.full((2, 1), at, device=CUDA)

    replayed(step, inputs(0), [inputs(at) for at in (3, 900, 4095)])


@torch.no_grad()
def test_a_replayed_graph_keeps_a_number_for_a_scale():
    """The number is not copied from the host, which a capture refuses."""
    rope = posenc.RoPE(64, 4096).to(CUDA)
    slots = torch.arange(2, device=CUDA)[:, None]

    def step(q, k, ids):
        caches = torch.zeros(2, 1, 16, 2, 64, dtype=torch.int8, device=CUDA)
        how = {"position_ids": ids, "k_scale": 0.05, "v_scale": 0.02}
        return rope.rotate_and_cache(q, k, k, *caches, slots, **how), caches

    def inputs(at):
        return *heads(1, torch.bfloat16), torch.full((2, 1), at, device=CUDA)

    replayed(step, inputs(0), [inputs(at) for at in (3, 900, 4095)])


@torch.no_grad()
def test_a_replayed_graph_adds_sinusoids_and_learned_rows():
    sinusoid = posenc.SinusoidalPosEmbedding().to(CUDA)
    learned = posenc.LearnedPosEmbedding(4096, 64).to(CUDA)

    def step(x, ids):
        return learned(sinusoid(x, position_ids=ids), position_ids=ids)

    def inputs(at):
        return *hidden(1), torch.full((2, 1), at, device=CUDA)

    replayed(step, inputs(0), [inputs(at) for at in (9, 4095)])


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own first pass
@pytest.mark.parametrize("what", ["ids", "offsets"])
def test_reduce_overhead_replays_a_decoding_loop(what):
    rope = posenc.RoPE(64, 4096).to(CUDA)

    def step(q, k, at):
        return rope(q, k, position_ids=at[:, None]) if what == "ids" else rope(q, k, at)

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for i in range(20):
        q, k = heads(1, torch.bfloat16)
        at = torch.tensor([i, 7 * i], device=CUDA)
        torch.compiler.cudagraph_mark_step_begin()
        got = [y.clone() for y in compiled(q, k, at)]
        assert all(map(torch.equal, got, step(q, k, at)))
