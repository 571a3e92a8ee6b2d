import pytest
import torch
from torch.autograd import gradcheck

import oracles
import posenc
from posenc import MixedRoPE, positions
from support.assertions import assert_within_ulps, compilations


def expected(x, at, freqs, *, interleaved):
    """Angle by angle: every head rotates by the sum of its frequencies times the coordinates."""
    batch, heads, length, dim = x.shape
    group = heads // freqs.shape[1]
    out = torch.empty_like(x, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            phi = torch.zeros(length, dim // 2, dtype=torch.float64)
            for a in range(freqs.shape[0]):
                line = at[a] if at.dim() == 2 else at[a, b]
                phi += line.double()[:, None] * freqs[a, h // group].double()
            out[b, h] = oracles.rotate(x[b, h], phi.cos(), phi.sin(), interleaved=interleaved)
    return out


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
@pytest.mark.parametrize("queries", [2, 6], ids=["as-many", "grouped"])
@pytest.mark.parametrize("batched", [False, True], ids=["shared", "batched"])
def test_every_head_rotates_by_its_own_mixture(batched, queries, interleaved):
    rope = MixedRoPE(8, num_kv_heads=2, interleaved=interleaved)
    at = positions.grid(2, 3)
    at = torch.stack((at, at + 4), dim=1) if batched else at
    q, k = torch.randn(2, queries, 6, 8), torch.randn(2, 2, 6, 8)
    for got, x in zip(rope(q, k, position_ids=at), (q, k), strict=True):
        wanted = expected(x, at, rope.freqs.detach(), interleaved=interleaved)
        size = oracles.pair_magnitude(wanted, 4, interleaved=interleaved)
        assert_within_ulps(got, wanted, 1.0, size)


def test_the_initial_frequencies_are_axial_ones_rotated_in_each_head():
    """The lengths of the two-dimensional frequencies are the axial rates."""
    freqs = MixedRoPE(16, num_kv_heads=3, base=100.0).freqs.detach()
    rates = 100.0 ** (-torch.arange(4) / 4)
    assert torch.allclose(freqs.norm(dim=0), rates.repeat(2).expand(3, 8), rtol=1e-6)
    first, second = freqs[:, :, :4], freqs[:, :, 4:]
    assert torch.allclose((first * second).sum(0), torch.zeros(3, 4), atol=1e-6)


@pytest.mark.parametrize("heads", [1, 2], ids=["shared", "each"])
def test_gradients_reach_the_frequencies(heads):
    rope = MixedRoPE(4, num_kv_heads=heads, coordinates=1)
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)

    def run(x, freqs):
        return torch.func.functional_call(rope, {"freqs": freqs}, (x, x))[0]

    assert gradcheck(run, (q, rope.freqs.detach().double().requires_grad_()))


@pytest.mark.slow
def test_one_graph_for_every_length():
    rope = MixedRoPE(8, num_kv_heads=2)

    def rotated(q, k, at):
        return rope(q, k, position_ids=at)

    calls = [
        (torch.randn(1, 2, n * n, 8), torch.randn(1, 2, n * n, 8), positions.grid(n, n))
        for n in (2, 3, 4)
    ]
    assert compilations(rotated, calls, dynamic=True, backend="aot_eager") == 1


def test_bad_input_is_refused():
    rope, x = MixedRoPE(8, num_kv_heads=2), torch.randn(1, 2, 6, 8)
    with pytest.raises(ValueError, match=r"of shape \(2, 6\)"):
        rope(x, x, position_ids=positions.grid(1, 2, 3))
    with pytest.raises(ValueError, match="heads of k must be 2"):
        rope(x, x[:, :1], position_ids=positions.grid(2, 3))
    with pytest.raises(ValueError, match="heads of q must be a multiple of 2"):
        rope(torch.randn(1, 3, 6, 8), x, position_ids=positions.grid(2, 3))
    with pytest.raises(ValueError, match="head_dim must be a multiple of 4"):
        MixedRoPE(6, num_kv_heads=2)


@pytest.mark.parametrize("kind", [MixedRoPE, posenc.STRING])
def test_positions_of_each_sequence_are_taken_as_by_rope(kind):
    """So that one can be swapped for the other. Frequencies are float32: 50 times 2**-25 rad."""
    rope, x = kind(8, num_kv_heads=1, coordinates=1), torch.randn(3, 2, 5, 8)
    for ids in (torch.randint(0, 50, (3, 5)), torch.randint(0, 50, (1, 5))):
        got, wanted = rope(x, x, position_ids=ids), posenc.RoPE(8)(x, x, position_ids=ids)
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
