import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import angles, cos_sin, round_once, sinusoid
from support.assertions import SCALARS

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


def test_a_negative_position_rotates_backwards():
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


HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@HALVES
def test_numbers_near_a_tie_are_rounded_to_the_nearer_side(dtype):
    """By way of float32 they would land in the middle, and half of them go to the other side."""
    below = torch.linspace(-1, 1, 999).to(dtype).double()
    half = oracles.ulp(below.abs(), dtype) / 2
    middles = below + half
    beside = [middles * (1 + step) for step in (0, 2**-52, -(2**-52), 2**-30, -(2**-30), 2**-20)]
    ends = torch.tensor([0.0, -0.0, 1e-30, 3e-8, 65519.9999999, 65520.0], dtype=torch.float64)
    x = torch.cat([*beside, ends])
    wanted = torch.tensor([oracles.rounded(value, dtype) for value in x.tolist()]).double()
    assert torch.equal(round_once(x, dtype).double(), wanted)


@HALVES
def test_rounding_once_keeps_infinities_nan_and_the_gradient(dtype):
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 1 + 2**-40]).double()
    x.requires_grad_()
    y = round_once(x, dtype)
    assert y.tolist()[:2] == [float("inf"), float("-inf")]
    assert y[2].isnan()
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(4).double())
    assert round_once(x, torch.float64) is x


# Position and channel, of 16, where a cast by way of float32 goes to the wrong side.
TWICE = {
    torch.float16: [(300, 0), (1276, 11), (2385, 7), (3000, 4), (4412, 8), (4534, 12), (4535, 3)],
    torch.bfloat16: [(3805, 2), (6985, 13), (7839, 14), (11446, 0), (15443, 0), (17971, 6)],
}


@HALVES
def test_a_sinusoid_in_half_precision_is_the_nearest_number(dtype):
    """Also where its float32 is in the middle between two."""
    got = sinusoid(torch.arange(18_000), Spectrum(16), dtype)
    for position, channel in [*TWICE[dtype], *[(p, p % 16) for p in range(0, 18_000, 101)]]:
        phi = oracles.angle(position, channel // 2, 16)
        exact = mpmath.cos(phi) if channel % 2 else mpmath.sin(phi)
        assert got[position, channel].item() == oracles.rounded(exact, dtype), (position, channel)


# A product that overflows is wrong in scalar code above all, and in tables of few channels.
@pytest.mark.parametrize(
    ("dim", "options"),
    [
        pytest.param(2, SCALARS, id="2-scalars"),
        *(pytest.param(d, None, id=str(d), marks=pytest.mark.slow) for d in (1, 2, 4, 64)),
    ],
)
def test_compiled_angles_are_the_eager_ones(dim, options):
    """No product may overflow: a C++ compiler may take that for granted, and has."""

    def count(length, start):
        return angles(torch.arange(start, start + length), Spectrum(dim))

    compiled = torch.compile(count, fullgraph=True, dynamic=True, options=options)
    for length, start in ((40, 0), (7, 2**31 - 7)):
        wanted = count(length, start)
        torch.testing.assert_close(compiled(length, start), wanted, rtol=0, atol=1e-15)
