"""The scaling of a RoPE from the dict that a config publishes."""

import pytest
import torch

from posenc import RoPE, scaling

LENGTH = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"rope_type": "linear", "factor": 4.0}, scaling.Linear(4.0)),
        ({"type": "yarn", "factor": 4.0, LENGTH: 64}, scaling.YaRN(4.0, original_length=64)),
        (
            {"rope_type": "yarn", "max_position_embeddings": 256, LENGTH: 64, "beta_fast": 16},
            scaling.YaRN(4.0, original_length=64, beta_fast=16.0),
        ),
        (
            {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 64},
            scaling.DynamicNTK(2.0, original_length=64),
        ),
        ({"type": "dynamic", "alpha": 8.0}, scaling.NTK(8.0)),
        (
            {"rope_type": "llama3", "factor": 8.0, LENGTH: 64, "low_freq_factor": 1.0}
            | {"high_freq_factor": 4.0, "rope_theta": 10_000.0},
            scaling.Llama3(8.0, original_length=64),
        ),
        (
            {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, LENGTH: 64}
            | {"factor": 4.0},
            scaling.LongRoPE((1.0,) * 4, long_factor=(2.0,) * 4, original_length=64, factor=4.0),
        ),
        (
            {"rope_type": "proportional", "partial_rotary_factor": 0.5},
            scaling.Proportional(0.5),
        ),
        ("proportional", scaling.Proportional(1.0)),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}, None),
        ("default", None),
        ({}, None),
    ],
    ids=str,
)
def test_a_dict_is_its_rule(given, wanted):
    rope = RoPE(8, None, scaling=given)
    assert rope.scaling == wanted
    assert torch.equal(
        rope.scaled_inv_freq(300), RoPE(8, None, scaling=wanted).scaled_inv_freq(300)
    )
    assert rope.replace().scaling == wanted


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("linear", ValueError, r"'linear' must have factor.*\n.*\"factor\""),
        ("yarn", ValueError, f"'yarn' must have factor, {LENGTH}"),
        ("longrope", ValueError, f"must have short_factor, long_factor, {LENGTH}, factor"),
        ({"type": "llama3", "factor": 8.0}, ValueError, f"{LENGTH}, low_freq_factor, high_freq"),
        ("ntk", ValueError, "must be one of default, linear, dynamic"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fst": 1}, ValueError, "mean beta_fast"),
        ({"factor": 2.0}, ValueError, "scaling.rope_type must be given"),
        ({"rope_type": "linear", "factor": 0.5}, ValueError, "factor must be at least 1"),
        ({"rope_theta": 5e5}, ValueError, r"base must be scaling.rope_theta=500000.0, got 10000.0"),
        ({"mrope_section": [2, 1, 1]}, ValueError, r"mrope_section.*\n.*from_config"),
        ({"partial_rotary_factor": 0.5}, ValueError, r"partial_rotary_factor.*\n.*rotary_dim"),
        (4.0, TypeError, "scaling must be of type Rule"),
    ],
    ids=str,
)
def test_an_incomplete_scaling_is_refused(given, error, text):
    with pytest.raises(error, match=text):
        RoPE(8, None, scaling=given)


def test_a_theta_that_is_the_base_is_fine():
    given = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert RoPE(8, None, 5e5, scaling=given).scaling == scaling.Linear(2.0)
