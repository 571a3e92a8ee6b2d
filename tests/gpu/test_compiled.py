"""torch.compile on a GPU: what it makes runs this library's kernels, and is made once."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import posenc
from oracles import tables
from posenc.functional import qk_norm_rope
from posenc.ops.rotation.rotation import norm_rotate_qk_op, rotate_qk_op

CUDA = "cuda"
# Biases that are more than a number for each distance.
TERMS = {
    "FIRE": lambda: posenc.FIRE(8, threshold=100.0),
    "CoPE": lambda: posenc.CoPE(64, max_pos=32),
    "RelativeKeys": lambda: posenc.RelativeKeys(64, max_distance=40),
    "DeBERTaBias": lambda: posenc.DeBERTaBias(
        8, head_dim=64, max_relative_positions=50, causal=True
    ),
    "TransformerXLBias": lambda: posenc.TransformerXLBias(8, embed_dim=512),
}


def queries_and_keys(length, grad):
    return [
        torch.randn(2, heads, length, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=grad)
        for heads in (8, 2)
    ]


def assert_equal_calls(function, op, times, inputs, grad):
    """Eager and compiled are one kernel: equal to the bit, and so are gradients."""
    # Not imported above: it takes seconds, also where these tests are skipped.
    from torch._inductor.compile_fx import compile_fx

    found = []

    def backend(graph, example):
        found.append(sum(node.target == op for node in graph.graph.nodes))
        return compile_fx(graph, example)

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for length in (17, 300, 511):
        given = inputs(length, grad)
        eager, fused = function(*given), compiled(*given)
        assert all(map(torch.equal, eager, fused))
        if grad:
            above = [torch.randn_like(y) for y in eager]
            both = [torch.autograd.grad(ys, given, above) for ys in (eager, fused)]
            assert all(map(torch.equal, *both))
    # The compiler may take a graph to the backend twice, and keep one.
    assert counters["stats"]["unique_graphs"] == 1
    assert set(found) == {times}


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
def test_a_compiled_rotation_is_the_eager_one(grad):
    rope = posenc.RoPE(64, 1024, interleaved=False).to(CUDA)
    assert_equal_calls(rope, rotate_qk_op.overload, 1, queries_and_keys, grad)


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
def test_a_compiled_norm_and_rotation_are_the_eager_ones(grad):
    cos, sin = tables(1024, 32, CUDA)

    def rotate(q, k, weight):
        return qk_norm_rope(q, k, weight, weight, cos, sin, interleaved=False)

    def inputs(length, grad):
        weight = torch.rand(64, device=CUDA, dtype=torch.bfloat16, requires_grad=grad)
        return *queries_and_keys(length, grad), weight

    assert_equal_calls(rotate, norm_rotate_qk_op.overload, 1, inputs, grad)


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
def test_attention_never_holds_all_scores(grad):
    """Those of 8,192 tokens and 8 heads would be a GiB in bfloat16."""
    alibi = posenc.ALiBi(8).to(CUDA)
    q, k, v = (
        torch.randn(1, 8, 8192, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=grad)
        for _ in range(3)
    )
    torch.compiler.reset()
    compiled = torch.compile(alibi.attention, fullgraph=True)
    wanted = alibi.attention(q, k, v)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        got = compiled(q, k, v)
        if grad:
            torch.autograd.grad(got, (q, k, v), got.detach())
    assert torch.cuda.max_memory_allocated() - before < 2**28
    assert (got - wanted).abs().max() < wanted.abs().max() * 2**-6


def attention_of(module, length):
    """Output and gradients of a call in float32."""
    torch.manual_seed(length)
    q, k, v, above = torch.randn(4, 2, 8, length, 64, device=CUDA).unbind()
    given = [x.requires_grad_() for x in (q, k, v)]
    module.zero_grad()
    out = module(*given)
    out.backward(above)
    return out, *[x.grad for x in given], *[p.grad for p in module.parameters()]


def assert_close(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        x = x.full_tensor() if hasattr(x, "full_tensor") else x
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TERMS)
def test_a_compiled_bias_is_the_eager_one(name):
    """One graph for all lengths."""
    module = TERMS[name]().to(CUDA)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for length in (300, 30, 511):
        assert_close(attention_of(compiled, length), attention_of(module, length))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", TERMS)
def test_a_bias_in_a_framework_is_the_eager_one(group, name, wrap):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    module = TERMS[name]().to(CUDA)
    wanted = attention_of(module, 300)
    wrapped = fully_shard(module) if wrap == "fsdp2" else DistributedDataParallel(module)
    assert_close(attention_of(wrapped, 300), wanted)


@pytest.mark.parametrize("name", TERMS)
def test_an_exported_bias_is_the_eager_one(name):
    module = TERMS[name]().to(CUDA)
    q, k, v = torch.randn(3, 2, 8, 300, 64, device=CUDA).unbind()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(module, (q, k, v), dynamic_shapes=({2: length},) * 3)
    for some in (300, 77):
        given = [x[:, :, :some] for x in (q, k, v)]
        assert_close([program.module()(*given)], [module(*given)])
