import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from posenc.functional import sinusoidal_pos_embedding


def test_shape_dtype_and_device_by_default():
    pe = sinusoidal_pos_embedding(4, 8)
    assert pe.shape == (4, 8)
    assert pe.dtype == torch.float32
    assert pe.device.type == "cpu"
    assert not pe.requires_grad


def test_the_seeds_own_example_adds_to_a_batch():
    pe = sinusoidal_pos_embedding(seq_len=4, embed_dim=8)
    assert (torch.randn(2, 4, 8) + pe.unsqueeze(0)).shape == (2, 4, 8)


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 63, 64])
def test_matches_the_closed_form(dim):
    got = sinusoidal_pos_embedding(50, dim)
    exact = oracles.sinusoid(range(50), dim)
    assert ((got - exact).abs() <= 0.5 * oracles.ulp(exact.abs(), torch.float32) + 1e-15).all()


def test_position_zero_alternates_zero_and_one():
    assert sinusoidal_pos_embedding(1, 5).tolist() == [[0.0, 1.0, 0.0, 1.0, 0.0]]


def test_an_odd_width_ends_with_a_sine_that_has_no_cosine():
    got = sinusoidal_pos_embedding(3, 5, dtype=torch.float64)
    lonely = torch.sin(torch.arange(3, dtype=torch.float64) * 10_000 ** (-4 / 5))
    torch.testing.assert_close(got[:, 4], lonely, rtol=1e-14, atol=0)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**31))
def test_an_offset_is_a_slice(length, dim, offset):
    got = sinusoidal_pos_embedding(length, dim, offset=offset, dtype=torch.float64)
    exact = oracles.sinusoid(range(offset, offset + length), dim)
    assert (got - exact).abs().max() < 1.5e-15


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_honoured(dtype):
    assert sinusoidal_pos_embedding(2, 4, "cpu", dtype).dtype == dtype


def test_device_is_honoured():
    assert sinusoidal_pos_embedding(2, 4, device="meta").is_meta


@pytest.mark.parametrize("seq_len", [0, -1])
def test_seq_len_must_be_positive(seq_len):
    with pytest.raises(ValueError, match="sinusoidal_pos_embedding: seq_len must be at least 1"):
        sinusoidal_pos_embedding(seq_len, 4)


@pytest.mark.parametrize("embed_dim", [0, -2])
def test_embed_dim_must_be_positive(embed_dim):
    with pytest.raises(ValueError, match="embed_dim must be at least 1"):
        sinusoidal_pos_embedding(4, embed_dim)


@pytest.mark.parametrize("length", [True, 4.0, "4", None])
def test_lengths_are_ints(length):
    with pytest.raises(TypeError, match="seq_len must be an int"):
        sinusoidal_pos_embedding(length, 4)
    with pytest.raises(TypeError, match="embed_dim must be an int"):
        sinusoidal_pos_embedding(4, length)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, "float32"], ids=str)
def test_dtype_must_be_floating(dtype):
    with pytest.raises(TypeError, match="dtype must be one of"):
        sinusoidal_pos_embedding(4, 4, dtype=dtype)


def test_offset_must_not_be_negative():
    with pytest.raises(ValueError, match="offset must be at least 0"):
        sinusoidal_pos_embedding(4, 4, offset=-1)
