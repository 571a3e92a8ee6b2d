"""Outputs are ordinary tensors of torch's allocator, however large they are."""

import os
import threading

import pytest
import torch

import posenc

SHAPE = (2, 16, 512, 128)  # 2^21 elements
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(scope="module")
def rope():
    return posenc.RoPE(128, 512)


@pytest.mark.parametrize(
    ("memory", "dtype"),
    [*zip(["heads", "tokens", "gaps", "expanded"], DTYPES, strict=True)],
)
def test_a_large_output_has_the_strides_of_torchs_own(rope, dtype, memory):
    x = torch.randn(SHAPE).to(dtype)
    if memory == "tokens":
        x = torch.randn(2, 512, 16, 128).to(dtype).transpose(1, 2)
    elif memory == "gaps":
        x = torch.randn(2, 16, 512, 384).to(dtype)[..., 128:256]
    elif memory == "expanded":
        x = x[:1].expand(2, -1, -1, -1)
    got, wanted = rope.rotate(x), torch.empty_like(x)
    assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    assert not got._is_view()
    pieces = torch.cat([rope.rotate(x[:, h : h + 1]) for h in range(16)], 1)
    assert torch.equal(got, pieces)


def test_threads_rotate_at_the_same_time(rope):
    xs = [torch.randn(SHAPE) for _ in range(4)]
    wanted, wrong = [rope.rotate(x) for x in xs], []

    def work(i):
        for _ in range(5):
            if not torch.equal(rope.rotate(xs[i]), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_rotates(rope):
    x = torch.randn(SHAPE)
    wanted = rope.rotate(x)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a child has none of its parent's threads
    try:
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(rope.rotate(x), wanted) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rope.rotate(x), wanted)
