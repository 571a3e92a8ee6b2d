from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from posenc import ALiBi
from posenc.attention import chunked
from posenc.functional import alibi_slopes
from support.attention import HEADS, STEEP, qkv


def test_the_op_keeps_torchs_rules():
    q, k, v = qkv(40, 40, grad=True)
    at = torch.arange(40)[None]
    low, slopes = (at - 20).clamp(min=0)[None], alibi_slopes(HEADS).double()[None]
    plan = (at, torch.zeros_like(at), at, low, at[None], slopes, 0.25)
    torch.library.opcheck(chunked.attend_op, (q, k, v, *plan))


def test_gradients_are_there_under_a_mode():
    """Selective checkpoints and counters of operations see an op without autograd inside."""
    q, k, v = qkv(70, 70, groups=2, grad=True)
    alibi = ALiBi(HEADS, **STEEP)
    wanted = torch.autograd.grad(alibi.attention(q, k, v).sum(), (q, k, v))
    with FlopCounterMode(display=False):
        got = torch.autograd.grad(alibi.attention(q, k, v).sum(), (q, k, v))
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("casting", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_run_in_what_the_cpu_multiplies(dtype, casting, monkeypatch):
    seen = []

    def spy(q, *rest, **keywords):
        seen.append(q.dtype)
        return torch.nn.functional.scaled_dot_product_attention(q, *rest, **keywords)

    monkeypatch.setattr(chunked, "F", SimpleNamespace(scaled_dot_product_attention=spy))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casting):
        out = ALiBi(HEADS).attention(*qkv(70, 70, dtype=dtype))
    native = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert set(seen) == {dtype if native else torch.float32}
    assert out.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_rounded_once(dtype):
    """Each weight and value is exact in float32, whether or not the CPU multiplies halves."""
    q, k, v = qkv(70, 70, dtype=dtype, grad=True)
    alibi = ALiBi(HEADS, **STEEP)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    got, wanted = alibi.attention(q, k, v), alibi.attention(*wide)
    above = torch.randn_like(got)
    pairs = [(got, wanted)]
    pairs += zip(
        torch.autograd.grad(got, (q, k, v), above),
        torch.autograd.grad(wanted, wide, above.float()),
        strict=True,
    )
    # A CPU that multiplies bfloat16 rounds the weights to it as well.
    room = 4 if dtype == torch.bfloat16 else 1
    for half, exact in pairs:
        assert (half - exact).abs().max() <= room * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("dense_scores", [2**20, 0], ids=["dense", "pieces"])
def test_second_derivatives(dense_scores, monkeypatch):
    monkeypatch.setattr(chunked, "DENSE_SCORES", dense_scores)
    alibi = ALiBi(HEADS, **STEEP)
    inputs = [x.detach()[:, :, :4, :2].requires_grad_() for x in qkv(4, 4, groups=2, batch=1)]
    assert torch.autograd.gradgradcheck(alibi.attention, inputs)


@pytest.mark.parametrize("dense_scores", [2**20, 0], ids=["dense", "pieces"])
def test_results_are_contiguous_as_the_compiler_was_told(dense_scores, monkeypatch):
    """Projections give ``(B, L, H, D)`` seen as ``(B, H, L, D)``, and strides follow from less."""
    monkeypatch.setattr(chunked, "DENSE_SCORES", dense_scores)
    alibi = ALiBi(HEADS, **STEEP)
    inputs = [torch.randn(2, 40, HEADS, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    above = torch.randn(2, HEADS, 40, 8)

    def run(function):
        out = function(*inputs)
        return out, *torch.autograd.grad(out, inputs, above)

    wanted, got = run(alibi.attention), run(torch.compile(alibi.attention, fullgraph=True))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert wanted[0].is_contiguous()
    assert all(grad.is_contiguous() for grad in wanted[1:])
