"""Tables on a GPU: which ones halves read, and what a CUDA graph may go on reading."""

import copy
import gc

import pytest
import torch

import posenc
from posenc import functional


def halves(length=4096, dtype=torch.bfloat16):
    return [torch.randn(2, h, length, 64, device="cuda", dtype=dtype) for h in (64, 2)]


def exact(rope, q, k, **options):
    return functional.rotate_qk(q, k, rope.cos_cached, rope.sin_cached, **options)


def held(rope):
    return {dtype for device, dtype in rope._tables._held if device.type == "cuda"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [8192, None], ids=["sized", "growing"])
def test_halves_read_float32_tables_and_get_the_same_numbers(dtype, size):
    rope = posenc.RoPE(64, size).to("cuda")
    for length in (4096, 1, 33, 600):
        q, k = halves(length, dtype)
        found = rope(q, k, 7)
        assert torch.float32 in held(rope)
        wide = posenc.RoPE(64, 8192).to("cuda")
        assert wide.cos_cached.dtype == torch.float64
        for got, wanted in zip(found, exact(wide, q, k, offset=7), strict=True):
            assert torch.equal(got, wanted)


def test_float32_reads_float64_tables():
    rope = posenc.RoPE(64, 8192).to("cuda")
    rope(*halves(dtype=torch.float32))
    assert held(rope) == {torch.float64}


def test_tables_follow_the_module_and_leave_the_other_device():
    rope = posenc.RoPE(64, 4096).to("cuda")
    rope(*halves())
    assert rope.cos_cached.is_cuda
    twin = copy.deepcopy(rope)
    assert twin.cos_cached.data_ptr() == rope.cos_cached.data_ptr()
    rope.cpu()
    assert not rope.cos_cached.is_cuda
    assert held(rope) == set()
    assert twin.cos_cached.is_cuda


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("size", [None, 16384], ids=["growing", "sized"])
def test_a_graph_goes_on_reading_what_it_was_captured_with(warm, size):
    """Also once longer tables have taken their place, or the module is gone."""
    rope = posenc.RoPE(64, size).to("cuda")
    q, k = halves()
    rope(*halves(dtype=torch.bfloat16 if warm else torch.float32))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rope(q, k)
    rope(*halves(9000))
    del rope
    gc.collect()
    junk = [torch.full((4096, 64), 7.0, device="cuda") for _ in range(8)]
    graph.replay()
    fresh = posenc.RoPE(64, 16384).to("cuda")
    for got, wanted in zip(out, exact(fresh, q, k), strict=True):
        assert torch.equal(got, wanted)
    assert all(bool((t == 7).all()) for t in junk)


def test_captures_of_one_table_do_not_add_up():
    """Who loads, captures and drops a model again and again holds its table once."""
    from posenc._contract.tracing import _captured

    counts = []
    for _ in range(3):
        rope, (q, k) = posenc.RoPE(64, 777).to("cuda"), halves(4)
        rope(q, k)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rope(q, k)
        del rope, graph
        gc.collect()
        counts.append(len(_captured))
    assert counts[1] == counts[2] == counts[0]


# torch says so itself when it begins a pool for its graphs.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cudagraphs_of_the_compiler_rotate_as_the_module_does(dtype):
    rope = posenc.RoPE(64, 8192).to("cuda")
    q, k = halves(64, dtype)
    rope(q, k)
    compiled = torch.compile(rope, fullgraph=True, mode="reduce-overhead")
    for offset in (3, 3, 3):
        torch.compiler.cudagraph_mark_step_begin()
        got = [t.clone() for t in compiled(q, k, offset)]
    for each, wanted in zip(got, rope(q, k, 3), strict=True):
        assert torch.equal(each, wanted)


def test_a_device_that_differs_is_an_error_each_time():
    rope = posenc.RoPE(64, 64).to("cuda")
    q, k = halves(1)
    for _ in range(2):
        rope(q, k, 5)
        with pytest.raises(ValueError, match="device"):
            rope(q, k.cpu(), 5)
        with pytest.raises(ValueError, match="device"):
            rope(q.cpu(), k, 5)
