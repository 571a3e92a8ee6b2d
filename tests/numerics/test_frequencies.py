import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from posenc.numerics.frequencies import Spectrum, inverse_frequencies, turn_steps


@pytest.mark.parametrize("dim", [1, 2, 5, 64, 128, 256])
@pytest.mark.parametrize("base", [0.5, 2.0, 10_000.0, 500_000.0, 1e9])
def test_rates_are_correctly_rounded(dim, base):
    got = inverse_frequencies(dim, base)
    exact = [float(oracles.angle(1, i, dim, base)) for i in range((dim + 1) // 2)]
    assert got.dtype == torch.float64
    assert got.tolist() == exact


@given(st.integers(1, 300), st.floats(1e-3, 1e12))
def test_steps_and_rests_hold_the_rate_to_117_bits(dim, base):
    """64 bits of step and 53 of rest, in turns: nothing is lost before the position comes in."""
    steps, rests = turn_steps(Spectrum(dim, base))
    for i, (step, rest) in enumerate(zip(steps, rests, strict=True)):
        turns = oracles.angle(1, i, dim, base) / (2 * mpmath.pi) * mpmath.mpf(2) ** 64
        off = (mpmath.mpf(step) + mpmath.mpf(rest) - turns) / mpmath.mpf(2) ** 64
        assert 0 <= step < 2**64
        assert abs(rest) <= 0.5
        assert abs(off - mpmath.nint(off)) < mpmath.mpf(2) ** -117
