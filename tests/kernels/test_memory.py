"""Memory that large outputs leave behind and the next ones take."""

import copy
import io
import os
import random
import subprocess
import sys
import threading

import pytest
import torch

import posenc
from posenc.kernels import c

pytestmark = pytest.mark.skipif(not c._keeps, reason="needs the C extension, on Linux")
SHAPE = (2, 16, 512, 128)  # as large as outputs have to be
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True)
def nothing_kept():
    posenc.keep_memory(0)
    posenc.keep_memory()
    yield
    posenc.keep_memory()


def kept():
    return c._rotate.keep(1 << 30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("memory", ["heads", "tokens", "gaps", "expanded"])
def test_is_like_torchs(dtype, memory):
    x = torch.randn(SHAPE).to(dtype)
    if memory == "tokens":
        x = torch.randn(2, 512, 16, 128).to(dtype).transpose(1, 2)
    elif memory == "gaps":
        x = torch.randn(2, 16, 512, 384).to(dtype)[..., 128:256]
    elif memory == "expanded":
        x = x[:1].expand(2, -1, -1, -1)
    got, wanted = c.empty_like(x), torch.empty_like(x)
    assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    assert not got._is_view()
    rope = posenc.RoPE(128, 512)
    pieces = torch.cat([rope.rotate(x[:, h : h + 1]) for h in range(16)], 1)
    assert pieces[:, :1].numel() < c.LARGE <= x.numel()
    assert torch.equal(rope.rotate(x), pieces)


def page(x):
    return x.data_ptr() // 4096


@pytest.mark.parametrize("start", [0, 16, 32, 500, 512, 1000])
def test_lies_half_a_page_from_its_input(start):
    x = torch.randn(2 * 16 * 512 * 128 + 1024)[start:][: 2 * 16 * 512 * 128].view(SHAPE)
    y = c.empty_like(x)
    assert y.data_ptr() % 64 == 0
    assert 0 <= (x.data_ptr() + 2048 - y.data_ptr()) % 4096 < 64
    y.fill_(1)


def test_is_used_again_once_its_tensor_is_gone():
    rope, x = posenc.RoPE(128, 512), torch.randn(SHAPE)
    first = rope.rotate(x)
    second = rope.rotate(x)
    assert first.data_ptr() != second.data_ptr()
    at, held = page(first), second.clone()
    view = first[0]
    del first
    assert kept() == 0, "a view holds it"
    del view
    assert kept() == x.nbytes
    assert page(rope.rotate(2 * x)) == at
    assert torch.equal(second, held)


def test_gradients_come_from_it_too():
    rope, x = posenc.RoPE(128, 512), torch.randn(SHAPE, requires_grad=True)
    for _ in range(3):
        (gradient,) = torch.autograd.grad(rope.rotate(x), x, torch.ones_like(x))
        again = gradient
    assert torch.equal(rope.unrotate(torch.ones(SHAPE)), again)
    del gradient, again
    assert kept() <= 3 * x.nbytes


def test_its_tensors_are_like_any():
    rope, x = posenc.RoPE(128, 512), torch.randn(SHAPE)
    y = rope.rotate(x)
    wanted = y.clone()
    assert torch.equal(copy.deepcopy(y), wanted)
    saved = io.BytesIO()
    torch.save(y, saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved), wanted)
    y.requires_grad_().mul(2).sum().backward()
    assert torch.equal(y.grad, torch.full(SHAPE, 2.0))
    assert torch.equal(y.detach().share_memory_(), wanted)
    y.detach().add_(1)
    assert torch.equal(y.detach(), wanted + 1)
    with torch.inference_mode():
        assert rope.rotate(x).is_inference()
    assert not rope.rotate(x).is_inference()


def test_is_never_lent_twice():
    """Tensors of all sizes come and go; each finds what it wrote."""
    chance, live = random.Random(0), []
    posenc.keep_memory(64)
    for number in range(400):
        if live and chance.random() < 0.5:
            value, tensor = live.pop(chance.randrange(len(live)))
            assert bool((tensor == value).all())
        else:
            rows = chance.randrange(1, 5000)
            tensor = torch.from_dlpack(
                c._rotate.empty(2, 32, number, 1, 1, rows, 1024, 0, 0, 1024, 1)
            )
            live.append((number, tensor.fill_(number)))
        if len(live) > 12:
            live.pop(0)
        assert c._rotate.keep(64 << 20) <= 64 << 20
    assert all(bool((tensor == value).all()) for value, tensor in live)


def test_memory_over_the_limit_goes_back():
    rope, x = posenc.RoPE(128, 512), torch.randn(SHAPE)
    posenc.keep_memory(12)
    outputs = [rope.rotate(x) for _ in range(3)]
    del outputs
    assert c._rotate.keep(12 << 20) == x.nbytes
    posenc.keep_memory(4)
    rope.rotate(x)
    assert kept() == 0


def test_a_round_size_fits_the_limit_it_equals():
    x = torch.randn(SHAPE)
    posenc.keep_memory(x.nbytes >> 20)
    at = page(c.empty_like(x))
    assert c._rotate.keep(x.nbytes) == x.nbytes
    assert page(c.empty_like(x)) == at


def test_a_much_larger_block_is_left_for_others():
    large = c.empty_like(torch.empty(8, 16, 512, 128))
    at = page(large)
    del large
    small = c.empty_like(torch.empty(SHAPE))
    assert page(small) != at
    assert page(c.empty_like(torch.empty(8, 15, 512, 128))) == at


def test_without_it_outputs_are_torchs():
    rope, x = posenc.RoPE(128, 512), torch.randn(SHAPE)
    with pytest.raises(RuntimeError, match="not resizable"):
        rope.rotate(x).untyped_storage().resize_(0)
    posenc.keep_memory(0)
    y = rope.rotate(x)
    y.untyped_storage().resize_(0)
    posenc.keep_memory()
    assert kept() == 0


SCARCE = """
import resource, torch, posenc
from posenc.kernels import c
rope, x = posenc.RoPE(128, 512), torch.randn(8, 16, 512, 128)
outputs = [rope.rotate(x) for _ in range(20)]
del outputs
assert c._rotate.keep(1 << 30) >= 20 * x.nbytes
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
used = int(status["VmSize"].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
held = c.empty_like(torch.empty(1).expand(100, 16, 512, 128))
assert c._rotate.keep(1 << 30) == 0
try:
    c.empty_like(torch.empty(1).expand(10000, 16, 512, 128))
except RuntimeError as error:
    assert "DefaultCPUAllocator" in str(error), error
else:
    raise AssertionError("39 GiB")
"""


def test_what_waits_is_given_up_when_memory_is_scarce():
    command = [sys.executable, "-c", SCARCE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_capsule_that_nobody_takes_gives_its_memory_back():
    c._rotate.empty(2, 32, 0, 1, 1, 1024, 1024, 0, 0, 1024, 1)
    assert kept() == 4 << 20


def test_threads_share_it():
    rope, xs = posenc.RoPE(128, 512), [torch.randn(SHAPE) for _ in range(4)]
    wanted, wrong = [rope.rotate(x) for x in xs], []

    def work(i):
        for _ in range(20):
            if not torch.equal(rope.rotate(xs[i]), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_its_own():
    rope, x = posenc.RoPE(128, 512), torch.randn(SHAPE)
    wanted = rope.rotate(x)
    rope.rotate(x)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a child has none of its parent's threads
    try:
        child = os.fork()
        if not child:
            same = torch.equal(rope.rotate(x), wanted) and torch.equal(rope.rotate(x), wanted)
            os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rope.rotate(x), wanted)


@pytest.mark.parametrize(("bad", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_keep_memory_refuses(bad, error):
    with pytest.raises(error, match="keep_memory: mebibytes must be"):
        posenc.keep_memory(bad)


def test_the_extension_refuses():
    with pytest.raises(TypeError, match="arguments given"):
        c._rotate.empty(2, 32)
    with pytest.raises(TypeError):
        c._rotate.keep("all")
    with pytest.raises(MemoryError):
        c._rotate.empty(2, 32, 0, 1, 1, 2**30, 2**30, 0, 0, 2**30, 1)
