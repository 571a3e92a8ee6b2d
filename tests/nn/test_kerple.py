"""KERPLE's two decays."""

import pytest
import torch

import posenc
from support.biases import assert_is_formula


def log_decay(given, h, i, j):
    r1, r2 = given["raw_r1"][h].exp(), given["raw_r2"][h].exp()
    return -r1 * torch.log(1 + r2 * abs(i - j))


def power_decay(given, h, i, j):
    if i == j:
        return given["raw_r1"][h] * 0
    r1, r2 = given["raw_r1"][h].exp(), 2 / (1 + torch.exp(-given["raw_r2"][h]))
    return -r1 * torch.tensor(float(abs(i - j)), dtype=torch.float64) ** r2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["log", "power"])
def test_attention_is_the_formula(kind, causal):
    torch.manual_seed(0)
    bias = posenc.KERPLE(4, kind=kind, causal=causal)
    formula = log_decay if kind == "log" else power_decay
    assert_is_formula(bias, formula, kv_heads=2)
    assert_is_formula(bias, formula, queries=1, keys=20)


def test_parameters_stay_in_their_range_whatever_the_optimizer_does():
    bias = posenc.KERPLE(2, kind="power")
    with torch.no_grad():
        for raw, r2 in ((30.0, 2.0), (-30.0, 0.0)):
            bias.raw_r1.fill_(raw)
            bias.raw_r2.fill_(raw)
            assert (bias.r1 > 0).all()
            assert (bias.r2 > 0).all()
            assert (bias.r2 <= 2).all()
            torch.testing.assert_close(bias.r2, torch.full((2,), r2).double(), rtol=0, atol=1e-12)


def test_second_derivatives_are_numbers():
    """The power of distance zero has none by the usual rule."""
    bias = posenc.KERPLE(2, kind="power")
    (g,) = torch.autograd.grad(bias.table(5).sum(), bias.raw_r2, create_graph=True)
    (second,) = torch.autograd.grad(g.sum(), bias.raw_r2)
    assert second.isfinite().all()


def test_another_kind_is_refused():
    with pytest.raises(ValueError, match="KERPLE: kind must be 'log' or 'power', got 'exp'"):
        posenc.KERPLE(2, kind="exp")
