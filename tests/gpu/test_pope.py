"""PoPE on a GPU: Triton's kernels against the formula in float64, and against the CPU's."""

import pytest
import torch

import posenc
from support.assertions import assert_within_ulps


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("tokens_first", [False, True], ids=["heads-first", "tokens-first"])
@pytest.mark.parametrize("width", [40, 64, 128])
def test_results_and_gradients_match_float64(dtype, tokens_first, width):
    pope = posenc.PoPE(width, num_kv_heads=3, max_seq_len=None, init="uniform").to("cuda")
    x = (3 * torch.randn(2, 3, 300, width, device="cuda")).to(dtype)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else x
    x.requires_grad_()
    wide, zero = x.detach().double(), torch.zeros(1, dtype=torch.float64, device="cuda")
    size = torch.logaddexp(wide, zero)
    cos, sin = pope.tables(torch.arange(300, device="cuda"))
    phi = torch.atan2(sin, cos)
    delta = pope.delta.detach().double()[:, None]
    q, k = pope(x, x)
    for got, phase in ((q, phi), (k, phi + delta)):
        exact = torch.cat((size * phase.cos(), size * phase.sin()), -1)
        assert_within_ulps(
            got.detach().cpu(), exact.cpu(), 0.503, torch.cat((size, size), -1).cpu()
        )
    g = torch.randn_like(k)
    k.backward(g)
    a, b = g.double().chunk(2, -1)
    c, s = (phi + delta).cos(), (phi + delta).sin()
    length = (a.square() + b.square()).sqrt() * wide.sigmoid()
    wanted = wide.sigmoid() * (a * c + b * s)
    assert_within_ulps(x.grad.cpu(), wanted.cpu(), 0.51, length.cpu())
    to_delta = (size * (b * c - a * s)).sum((0, 2))
    torch.testing.assert_close(pope.delta.grad.double(), to_delta, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_number_of_half_precision(dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    x = x[x.isfinite()].view(1, 1, -1, 1)
    cos, sin = torch.ones(x.shape[2], 1, device="cuda"), torch.zeros(x.shape[2], 1, device="cuda")
    got = posenc.functional.polar(x.cuda(), cos, sin)[..., :1]
    exact = torch.logaddexp(x.double(), torch.zeros(1, dtype=torch.float64))
    assert_within_ulps(got.cpu(), exact, 0.503, exact)


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_attention_compiles_and_agrees_with_the_cpu():
    pope = posenc.PoPE(64, num_kv_heads=2, init="uniform")
    q, k, v = torch.randn(1, 4, 50, 64), torch.randn(1, 2, 50, 64), torch.randn(1, 2, 50, 64)
    wanted = pope.attention(q, k, v)
    pope.to("cuda")
    on_gpu = [x.cuda() for x in (q, k, v)]
    torch.testing.assert_close(pope.attention(*on_gpu).cpu(), wanted, rtol=1e-3, atol=1e-4)
    compiled = torch.compile(pope.attention, fullgraph=True)
    torch.testing.assert_close(compiled(*on_gpu).cpu(), wanted, rtol=1e-3, atol=1e-4)
