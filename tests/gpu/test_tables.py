"""Tables that a GPU reads for tensors in half precision: rounded once, and kept."""

import copy

import pytest
import torch

import posenc
from posenc import functional


def halves(length=4096, dtype=torch.bfloat16):
    return [torch.randn(2, h, length, 64, device="cuda", dtype=dtype) for h in (64, 2)]


def exact(rope, q, k, **options):
    return functional.rotate(q, k, rope.cos_cached, rope.sin_cached, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [8192, None], ids=["sized", "growing"])
def test_halves_read_float32_tables_and_get_the_same_numbers(dtype, size):
    rope = posenc.RoPE(64, size).to("cuda")
    for length in (4096, 1, 33, 600):
        q, k = halves(length, dtype)
        found = rope(q, k, 7)
        assert rope._rounded[3].dtype == torch.float32
        assert rope.cos_cached.dtype == torch.float64
        for got, wanted in zip(found, exact(rope, q, k, offset=7), strict=True):
            assert torch.equal(got, wanted)
    first = rope._rounded
    rope(q, k, 3)
    assert rope._rounded is first


def test_float32_reads_float64_tables():
    rope = posenc.RoPE(64, 8192).to("cuda")
    rope(*halves(dtype=torch.float32))
    assert rope._rounded is None


def test_they_follow_the_table():
    rope = posenc.RoPE(64, None).to("cuda")
    rope(*halves())
    before = rope._rounded
    q, k = halves(9000)
    for got, wanted in zip(rope(q, k), exact(rope, q, k), strict=True):
        assert torch.equal(got, wanted)
    assert rope._rounded[3].shape == rope.cos_cached.shape != before[3].shape
    again = copy.deepcopy(rope)
    assert again._rounded is None
    assert torch.equal(again(q, k)[0], rope(q, k)[0])
    assert again._rounded[0] is again.cos_cached
    rope.cpu()
    assert rope._rounded is None


def test_a_table_of_inference_mode_serves_training():
    rope = posenc.RoPE(64, 8192).to("cuda")
    q, k = halves()
    with torch.inference_mode():
        rope(q, k)
    q.requires_grad_()
    rope(q, k)[0].sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_a_graph_goes_on_reading_what_it_was_captured_with(warm):
    """Whichever tables it found, also once longer ones have taken their place."""
    rope = posenc.RoPE(64, None).to("cuda")
    q, k = halves()
    rope(*halves(dtype=torch.bfloat16 if warm else torch.float32))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rope(q, k)
    rope(*halves(9000))
    junk = [torch.full((4096, 64), 7.0, device="cuda") for _ in range(8)]
    graph.replay()
    for got, wanted in zip(out, exact(rope, q, k), strict=True):
        assert torch.equal(got, wanted)
    assert all(bool((t == 7).all()) for t in junk)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [64, None], ids=["sized", "growing"])
def test_calls_like_the_last_one_are_not_checked_again(dtype, size, monkeypatch):
    rope = posenc.RoPE(64, size).to("cuda")
    q, k = halves(1, dtype)
    rope(q, k, 63)
    monkeypatch.setattr(posenc.RoPE, "_tables_for", None)
    for offset in range(8):
        for got, wanted in zip(rope(q, k, offset), exact(rope, q, k, offset=offset), strict=True):
            assert torch.equal(got, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rope(q, k, 5)
    q.normal_()
    graph.replay()
    assert torch.equal(out[0], exact(rope, q, k, offset=5)[0])
    gradients = torch.autograd.grad(rope(q.requires_grad_(), k, 5)[0].sum(), q)
    assert torch.equal(
        gradients[0],
        torch.autograd.grad(exact(rope, q, k, offset=5)[0].sum(), q)[0],
    )
    rope.cos_cached.zero_()
    rope.sin_cached.zero_()
    assert not rope(q, k, 5)[0].any()


def test_a_device_that_differs_is_an_error_each_time():
    rope = posenc.RoPE(64, 64).to("cuda")
    q, k = halves(1)
    for _ in range(2):
        rope(q, k, 5)
        with pytest.raises(ValueError, match="device"):
            rope(q, k.cpu(), 5)
        with pytest.raises(ValueError, match="device"):
            rope(q.cpu(), k, 5)
