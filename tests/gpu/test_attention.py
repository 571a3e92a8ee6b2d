"""Attention on a GPU as users call it: eager, compiled, in a CUDA graph, twice."""

import pytest
import torch

import posenc

CUDA = "cuda"


def biases(length):
    """Each kind of bias for 8 heads, with numbers to learn."""
    slopes = posenc.functional.alibi_slopes(8, device=CUDA)
    gates = torch.nn.functional.logsigmoid(torch.randn(2, 8, length, device=CUDA).double() + 3)
    made = {
        "slopes": posenc.attention.Slopes(slopes),
        "table": posenc.attention.DistanceTable(torch.randn(8, 200, device=CUDA)),
        "sums": posenc.attention.RunningSum(gates.cumsum(-1)),
    }
    return {name: bias._replace(values=bias.values.requires_grad_()) for name, bias in made.items()}


@pytest.mark.parametrize("kind", ["slopes", "table", "sums"])
def test_a_training_step_gives_the_same_bits_twice(kind):
    """Sums have one order: no atomic addition shows."""
    bias = biases(3000)[kind]
    xs = [torch.randn(2, 8, 3000, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(4)]
    inputs = [x.requires_grad_() for x in xs[:3]] + [bias.values]

    def step():
        out = posenc.attention.biased_attention(*inputs[:3], bias, causal=True)
        return out, *torch.autograd.grad(out, inputs, xs[3])

    assert all(map(torch.equal, step(), step()))


@pytest.mark.parametrize("kind", ["slopes", "table", "sums"])
def test_one_graph_serves_all_lengths(kind):
    torch._dynamo.reset()
    attend = torch.compile(posenc.attention.biased_attention, fullgraph=True, dynamic=True)
    for length in (700, 1500, 2049):
        bias = biases(length)[kind]
        q, k, v = (torch.randn(2, 8, length, 64, device=CUDA).requires_grad_() for _ in range(3))
        inputs = [q, k, v, bias.values]
        wanted = posenc.attention.biased_attention(q, k, v, bias, causal=True)
        got = attend(q, k, v, bias, causal=True)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        pairs = (torch.autograd.grad(x.square().sum(), inputs) for x in (got, wanted))
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("queries", [1, 300])
@pytest.mark.parametrize("kind", ["slopes", "table", "sums"])
def test_a_captured_step_follows_the_offset(kind, queries):
    bias = biases(2000)[kind]
    q = torch.randn(2, 8, queries, 64, device=CUDA, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 8, 2000, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    offset = torch.tensor([3, 700], device=CUDA)

    @torch.no_grad()
    def step():
        return posenc.attention.biased_attention(q, k, v, bias, causal=True, query_offset=offset)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for places in ([3, 700], [1500, 0]):
        offset.copy_(torch.tensor(places))
        graph.replay()
        assert torch.equal(captured, step())


@pytest.mark.parametrize("queries", [1, 40], ids=["decode", "forward"])
def test_a_grid_has_room_for_every_head(queries):
    """CUDA has at most 65,535 programs along all axes of a grid but the first.

    The keys of a few queries are split into more parts in the smaller batch: two roundings.
    """
    q = torch.randn(2**15, 4, queries, 16, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2**15, 2, 256, 16, device=CUDA, dtype=q.dtype) for _ in range(2))
    alibi = posenc.ALiBi(4).to(CUDA)
    whole = alibi.attention(q, k, v)
    (grad,) = torch.autograd.grad(whole.sum(), q)
    ends = alibi.attention(q[-2:], k[-2:], v[-2:])
    assert (whole[-2:] - ends).abs().max() <= ends.abs().max() * 2**-8
    (wanted,) = torch.autograd.grad(ends.sum(), q)
    assert (grad[-2:] - wanted[-2:]).abs().max() <= wanted.abs().max() * 2**-7
