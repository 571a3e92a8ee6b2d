"""Attention on a GPU as users call it: eager, compiled, in a CUDA graph, twice."""

import pytest
import torch

import posenc
from support.attention import written_down

CUDA = "cuda"
CASES = {
    "square": {"queries": 1000, "keys": 1000},
    "cache": {"queries": 300, "keys": 1500},
    "offsets": {"queries": 300, "keys": 1500, "offset": [0, 600]},
    "documents": {"queries": 1000, "keys": 1000, "documents": True},
    "symmetric": {"queries": 600, "keys": 600, "causal": False},
    "gqa": {"queries": 700, "keys": 700, "groups": 4, "documents": True},
    "one-head": {"queries": 300, "keys": 1500, "offset": [0, 600], "heads": 1},
    "decode": {"queries": 1, "keys": 1500, "offset": [7, 900], "documents": True},
    "few": {"queries": 5, "keys": 2048},
}


def exact(q, k, v, slopes, causal, offset, documents):
    """Softmax attention in float64, by the definition."""
    start = torch.as_tensor(offset, device=CUDA).reshape(-1, 1)
    own = (start + torch.arange(q.shape[2], device=CUDA)).expand(len(q), -1)
    how = {"own": own, "scale": q.shape[-1] ** -0.5, "causal": causal, "documents": documents}
    return written_down(*(x.double() for x in (q, k, v, slopes[None])), "slopes", **how)[0]


@pytest.mark.parametrize("prune", [True, False], ids=["pruned", "all-keys"])
@pytest.mark.parametrize("name", CASES)
def test_alibi_agrees_with_the_whole_matrix(name, prune):
    """bf16 results carry 2^-9 of each weight and of the sum: 2^-6 of the largest value covers."""
    case = {"offset": None, "documents": False, "causal": True, "groups": 1, "heads": 8}
    case |= CASES[name]
    heads, queries, keys = case["heads"], case["queries"], case["keys"]
    few = max(1, heads // case["groups"])
    q, k, v = (
        torch.randn(2, h, n, 64, device=CUDA, dtype=torch.bfloat16).requires_grad_()
        for h, n in ((heads, queries), (few, keys), (few, keys))
    )
    alibi = posenc.ALiBi(heads, bias_max=4.0, causal=case["causal"]).to(CUDA)
    documents = None
    if case["documents"]:
        documents = torch.rand(2, keys, device=CUDA).lt(0.004).cumsum(1)
        documents[0, :137] = -1
    offset = None if case["offset"] is None else torch.tensor(case["offset"], device=CUDA)
    places = {"query_offset": offset, "document_ids": documents}
    got = alibi.attention(q, k, v, **places, backend="triton", prune=prune)
    start = keys - queries if offset is None else offset
    wanted = exact(q, k, v, alibi.slopes, case["causal"], start, documents)
    assert (got - wanted).abs().max() < wanted.abs().max() * 2**-6
    above = torch.randn_like(got)
    grads = torch.autograd.grad(got, (q, k, v), above)
    exact_grads = torch.autograd.grad(wanted, (q, k, v), above.double())
    for grad, true in zip(grads, exact_grads, strict=True):
        assert (grad - true).abs().max() < true.abs().max() * 2**-5


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
        out = posenc.attention.biased_attention(*inputs[:3], bias)
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
        wanted = posenc.attention.biased_attention(q, k, v, bias)
        got = attend(q, k, v, bias)
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
        return posenc.attention.biased_attention(q, k, v, bias, query_offset=offset)

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


@pytest.mark.parametrize("window", [64, (700, 30)], ids=str)
@pytest.mark.parametrize("kind", ["none", "slopes", "table", "sums"])
def test_a_window_is_a_mask_of_that_window(kind, window):
    """The mask goes by torch operations, which tests/attention holds to the definition."""
    length, causal = 1500, isinstance(window, int)
    q, k, v = (
        torch.randn(2, 8, length, 64, device=CUDA, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    )
    bias = None if kind == "none" else biases(length)[kind]
    distance = torch.arange(length, device=CUDA)[:, None] - torch.arange(length, device=CUDA)
    left, right = (63, 0) if causal else window
    mask = (distance <= left) & (-distance <= right)
    inputs = [q, k, v] + ([] if bias is None else [bias.values])
    made = [
        posenc.attention.biased_attention(q, k, v, bias, causal=causal, **how)
        for how in ({"window": window, "backend": "triton"}, {"attn_mask": mask})
    ]
    above = torch.randn_like(made[0])
    grads = [torch.autograd.grad(x, inputs, above) for x in made]
    for got, wanted in ((made[0], made[1]), *zip(*grads, strict=True)):
        error = (got.double() - wanted.double()).norm()
        assert error < 2**-6 * wanted.double().norm()
