"""A learned number for each distance, clipped."""

import pytest

import posenc
from support.biases import assert_is_formula, drawn


@pytest.mark.parametrize("most", [0, 3, 50])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_the_formula(causal, most):
    bias = drawn(posenc.LearnedBias, 4, max_distance=most, causal=causal)

    def formula(given, h, i, j):
        distance = max(min(i - j, most), -most)
        return given["weight"][h, distance if causal else distance + most]

    assert_is_formula(bias, formula, kv_heads=2)
    assert_is_formula(bias, formula, queries=1, keys=9)


def test_it_starts_without_a_bias():
    assert not posenc.LearnedBias(2, max_distance=3, causal=False).bias(5).any()


def test_a_negative_distance_is_refused():
    with pytest.raises(ValueError, match="LearnedBias: max_distance must be at least 0"):
        posenc.LearnedBias(2, max_distance=-1)
