"""Sandwich is the product of sinusoids, compressed by each head."""

import mpmath
import pytest
import torch

import posenc
from support.biases import assert_is_formula


def entry(dim, heads, h, distance):
    angles = [mpmath.mpf(distance) / mpmath.mpf(10000) ** (mpmath.mpf(2 * k) / dim)
              for k in range(dim // 2)]  # fmt: skip
    return sum(map(mpmath.cos, angles)) * heads / (8 * (h + 1))


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_the_formula(causal):
    def formula(given, h, i, j):
        return torch.tensor(float(entry(12, 4, h, i - j)), dtype=torch.float64)

    assert_is_formula(posenc.Sandwich(4, dim=12, causal=causal), formula, kv_heads=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_far_number_is_rounded_once(dtype):
    """Angles of far distances lose digits unless they are exact."""
    got = posenc.Sandwich(2).table(100_001, dtype=dtype)[:, 100_000]
    wanted = [float(entry(128, 2, h, 100_000)) for h in range(2)]
    assert torch.equal(got, torch.tensor(wanted, dtype=torch.float64).to(dtype))


def test_nothing_is_learned_or_saved_and_a_cast_changes_nothing():
    bias = posenc.Sandwich(2)
    before = bias.table(50)
    assert not list(bias.parameters())
    assert not bias.state_dict()
    assert torch.equal(bias.half().table(50), before)


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="Sandwich: dim must be even"):
        posenc.Sandwich(2, dim=7)
