import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import angles, cos_sin, sinusoid

POSITIONS = [0, 1, 2, 4095, 131_071, 2**20 - 1, 10_000_000, 2**31 - 1, 2**31]


@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 0.5])
@pytest.mark.parametrize("dim", [2, 64, 128])
def test_cos_and_sin_are_exact_at_every_position(dim, base):
    """An angle within pi, three roundings of 2^-53 each: under 1e-15, wherever the position is."""
    cos, sin = cos_sin(torch.tensor(POSITIONS), Spectrum(dim, base))
    exact_cos, exact_sin = oracles.exact_cos_sin(POSITIONS, dim, base)
    assert (cos - exact_cos).abs().max() < 1.5e-15
    assert (sin - exact_sin).abs().max() < 1.5e-15


@given(
    st.integers(0, 2**31), st.integers(1, 64).map(lambda pairs: 2 * pairs), st.floats(1e-15, 1e60)
)
def test_any_position_and_base_is_exact(position, dim, base):
    with mpmath.workprec(500):
        exact = oracles.exact_cos_sin([position], dim, base)[0]
    assert (cos_sin(torch.tensor([position]), Spectrum(dim, base))[0] - exact).abs().max() < 1.5e-15


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


@pytest.mark.parametrize("dim", [1, 2, 4, 64])
def test_compiled_angles_are_the_eager_ones(dim):
    """No product may overflow: a C++ compiler may take that for granted, and has."""

    def count(length, start):
        return angles(torch.arange(start, start + length), Spectrum(dim))

    compiled = torch.compile(count, fullgraph=True, dynamic=True)
    for length, start in ((40, 0), (7, 2**31 - 7)):
        wanted = count(length, start)
        torch.testing.assert_close(compiled(length, start), wanted, rtol=0, atol=1e-15)
