"""Forgetting gates: a running sum that attention and a cache take."""

import math

import pytest
import torch

import oracles
import posenc
from posenc.attention import RunningSum, relative_score_mod
from support.biases import leaves, qkv


def made(embed=6, heads=4):
    torch.manual_seed(0)
    return posenc.ForgetGate(heads, embed_dim=embed)


def exact_bias(given, x, queries):
    """The sum of the logarithms of the gates after the key, up to the query."""
    keys = x.shape[1]
    gates = torch.sigmoid(x.double() @ given["proj.weight"].T + given["proj.bias"])  # [B, K, H]
    rows = []
    for i in range(keys - queries, keys):
        row = [gates[:, j + 1 : i + 1].log().sum(1) for j in range(i + 1)]
        hidden = [torch.full_like(row[0], -math.inf)] * (keys - i - 1)
        rows.append(torch.stack(row + hidden, -1))  # [B, H, K]
    return torch.stack(rows, 2)


@pytest.mark.parametrize("queries", [7, 2, 1])
def test_attention_is_the_formula_with_its_gradients(queries):
    gate, x = made(), torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    given, copy = leaves(gate), x.detach().clone().requires_grad_()
    q, k, v = qkv(4, queries, 7, kv_heads=2)
    wanted = exact_bias(given, copy, queries)
    sums = gate.sums(x)
    got = gate.bias(sums, queries, dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)

    out, exact = gate(q, k, v, x), oracles.attention(q, k, v, wanted, 8**-0.5)
    torch.testing.assert_close(out, exact, rtol=1e-11, atol=1e-11)
    weight = torch.randn(out.shape, dtype=torch.float64)
    (out * weight).sum().backward()
    (exact * weight).sum().backward()
    torch.testing.assert_close(x.grad, copy.grad, rtol=1e-9, atol=1e-11)
    for name, p in gate.named_parameters():
        torch.testing.assert_close(p.grad.double(), given[name].grad, rtol=1e-5, atol=1e-7)


def test_decode_with_a_cache_of_sums_gives_the_rows_of_the_whole():
    gate, x = made(), torch.randn(2, 9, 6)
    q, k, v = (y.detach().float() for y in qkv(4, 9, 9))
    whole = gate(q, k, v, x)
    sums = gate.sums(x[:, :4])
    for n in range(5, 10):
        sums = gate.sums(x[:, n - 1 : n], past=sums)
        got = gate(q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], sums=sums)
        torch.testing.assert_close(got, whole[:, :, n - 1 : n], rtol=1e-5, atol=1e-6)
    last = gate.sums(x[:, 8:], past=sums[..., 7:8])
    torch.testing.assert_close(last[..., 1:], sums[..., 8:])


def test_the_sum_is_float64_in_half_precision_and_under_autocast():
    gate, x = made().bfloat16(), torch.randn(1, 5, 6).bfloat16()
    assert gate.proj.weight.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        sums = gate.sums(x)
    assert sums.dtype == torch.float64
    wanted = gate.double().sums(x.double())
    # The product of float32 numbers, once; bfloat16 would be off by 2**-9.
    torch.testing.assert_close(sums, wanted, rtol=1e-6, atol=1e-7)


def test_gates_start_near_one():
    gate = made(8, 5)
    keep = gate.sums(torch.zeros(1, 8)).detach().exp().flatten()
    wanted = torch.tensor([math.exp(-1 / 2**n) for n in (4, 6, 8, 10, 12)], dtype=torch.float64)
    torch.testing.assert_close(keep, wanted, rtol=1e-6, atol=0)


def test_the_score_mod_of_its_sums_is_the_bias():
    gate = made()
    b, h, q, k = map(torch.arange, (2, 4, 3, 8))
    at = b[:, None, None, None], h[:, None, None], q[:, None], k
    for x in (torch.randn(2, 8, 6), torch.randn(8, 6)):
        sums = gate.sums(x).detach()
        got = relative_score_mod(RunningSum(sums), 3, 8)(torch.zeros(()), *at)
        wanted = gate.bias(sums, 3).expand(got.shape)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


def test_bad_arguments_are_refused():
    gate = made()
    with pytest.raises(ValueError, match="ForgetGate: embed_dim must be 6, got 5"):
        gate.sums(torch.randn(2, 3, 5))
    with pytest.raises(ValueError, match=r"ForgetGate: past must have shape \(2, 4, P\)"):
        gate.sums(torch.randn(2, 3, 6), past=torch.zeros(2, 4, 0))
    q, k, v = torch.randn(3, 1, 4, 5, 8).unbind()
    with pytest.raises(ValueError, match=r"ForgetGate: sums must have shape \(4, 5\)"):
        gate(q, k, v, sums=torch.zeros(1, 4, 6))
    for both in ({}, {"x": torch.zeros(5, 6), "sums": torch.zeros(4, 5)}):
        with pytest.raises(ValueError, match="ForgetGate: pass either x or sums, got"):
            gate(q, k, v, **both)


@pytest.mark.parametrize("how", [{}, {"dropout_p": 0.1}, {"backend": "dense"}], ids=str)
def test_an_empty_batch_gives_an_empty_result(how):
    gate, q = posenc.ForgetGate(2, embed_dim=4), torch.zeros(0, 2, 5, 8)
    assert gate(q, q, q, torch.zeros(0, 5, 4), **how).shape == q.shape
