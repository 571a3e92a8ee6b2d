"""Scaling rules to try, and what a rotation by their rates gives."""

import pytest

import oracles
from posenc import scaling
from support.assertions import assert_within_ulps

LONG = scaling.LongRoPE(
    (1.0, 1.5, 2.0, 3.0), long_factor=(2.0, 3.0, 5.0, 8.0), original_length=16, factor=4.0
)


BY_LENGTH = [scaling.DynamicNTK(4.0, original_length=16), LONG]


FIXED = [
    None,
    scaling.Linear(4.0),
    scaling.NTK(4.0),
    scaling.YaRN(4.0, original_length=16),
    scaling.Llama3(4.0, original_length=16),
    scaling.Proportional(0.5),
]


RULES = [*FIXED, *BY_LENGTH]


def name(rule):
    return "plain" if rule is None else type(rule).__name__


ALL = pytest.mark.parametrize("rule", RULES, ids=name)


DEPENDENT = pytest.mark.parametrize("rule", BY_LENGTH, ids=name)


def exact(x, positions, rates, gain, *, interleaved=True):
    """``x`` of (B, H, L, D) rotated in float64, by positions [.., L] and rates [.., P]."""
    phi = positions.double()[..., None] * rates
    cos, sin = gain * phi.cos(), gain * phi.sin()
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    return oracles.rotate(x, cos, sin, interleaved=interleaved)


def assert_rotated_by(got, x, at, rates, gain=1.0, *, ulps=1.0, interleaved=True):
    wanted = exact(x, at, rates, gain, interleaved=interleaved)
    size = oracles.pair_magnitude(wanted, rates.shape[-1], interleaved=interleaved)
    assert_within_ulps(got, wanted, ulps, size)
