import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import angles, cos_sin, sinusoid

POSITIONS = [0, 1, 2, 4095, 131_071, 2**20 - 1, 10_000_000, 2**31 - 1, 2**31, 2**40 + 3, 2**62 + 5]


@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 0.5])
@pytest.mark.parametrize("dim", [2, 64, 128])
def test_cos_and_sin_are_exact_at_every_position(dim, base):
    """An angle within pi, three roundings of 2^-53 each: under 1e-15, wherever the position is."""
    cos, sin = cos_sin(torch.tensor(POSITIONS), Spectrum(dim, base))
    exact_cos, exact_sin = oracles.exact_cos_sin(POSITIONS, dim, base)
    assert (cos - exact_cos).abs().max() < 1.5e-15
    assert (sin - exact_sin).abs().max() < 1.5e-15


@given(st.integers(0, 2**63 - 1), st.integers(1, 64).map(lambda pairs: 2 * pairs))
def test_any_int64_position_is_exact(position, dim):
    cos, _ = cos_sin(torch.tensor([position]), Spectrum(dim))
    assert (cos - oracles.exact_cos_sin([position], dim)[0]).abs().max() < 1.5e-15


def test_a_negative_position_turns_backwards():
    there, back = (angles(torch.tensor([p]), Spectrum(64)) for p in (12345, -12345))
    assert (there + back).abs().max() < 1e-15


def test_positions_keep_their_shape():
    assert angles(torch.zeros(2, 3, dtype=torch.int64), Spectrum(8)).shape == (2, 3, 4)


@pytest.mark.parametrize("dim", [1, 2, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_sinusoid_is_rounded_once(dim, dtype):
    """The cast of an exact float64: off by half a spacing and the 1e-15 of the table."""
    got = sinusoid(torch.tensor(POSITIONS), Spectrum(dim), dtype)
    exact = oracles.sinusoid(POSITIONS, dim)
    assert got.shape == (len(POSITIONS), dim)
    assert ((got.double() - exact).abs() <= 0.5 * oracles.ulp(exact.abs(), dtype) + 1e-15).all()


def test_compiled_angles_wrap_as_eager_ones_do():
    """The product overflows on purpose; a compiler must not think otherwise."""
    positions = torch.tensor(POSITIONS)
    compiled = torch.compile(angles, fullgraph=True)(positions, Spectrum(64))
    torch.testing.assert_close(compiled, angles(positions, Spectrum(64)), rtol=0, atol=1e-15)
