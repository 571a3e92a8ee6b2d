import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from posenc.functional import sinusoidal_pos_embedding, timestep_embedding


def test_shape_dtype_and_device_by_default():
    pe = sinusoidal_pos_embedding(4, 8)
    assert pe.shape == (4, 8)
    assert pe.dtype == torch.float32
    assert pe.device.type == "cpu"
    assert not pe.requires_grad


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 63, 64])
def test_matches_the_closed_form(dim):
    got = sinusoidal_pos_embedding(50, dim)
    exact = oracles.sinusoid(range(50), dim)
    assert ((got - exact).abs() <= 0.5 * oracles.ulp(exact.abs(), torch.float32) + 1e-15).all()


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**31 - 39))
def test_an_offset_is_a_slice(length, dim, offset):
    got = sinusoidal_pos_embedding(length, dim, offset=offset, dtype=torch.float64)
    exact = oracles.sinusoid(range(offset, offset + length), dim)
    assert (got - exact).abs().max() < 1.5e-15


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_honoured(dtype):
    assert sinusoidal_pos_embedding(2, 4, "cpu", dtype).dtype == dtype


def test_half_precision_is_rounded_once():
    """By way of float32, this one of the exact values would be rounded up and then down."""
    exact = mpmath.cos(oracles.angle(6985, 6, 16))
    got = sinusoidal_pos_embedding(1, 16, dtype=torch.bfloat16, offset=6985)[0, 13].item()
    assert got == oracles.rounded(exact, torch.bfloat16)
    assert got != oracles.rounded(float(torch.tensor(float(exact))), torch.bfloat16)


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


def test_each_sequence_may_have_positions_of_its_own():
    rows = sinusoidal_pos_embedding(20, 6)
    starts, ids = torch.tensor([3, 0]), torch.tensor([[4, 9, 0], [1, 1, 2]])
    got = sinusoidal_pos_embedding(3, 6, offset=starts)
    assert torch.equal(got, rows[starts[:, None] + torch.arange(3)])
    assert torch.equal(sinusoidal_pos_embedding(3, 6, position_ids=ids), rows[ids])
    assert torch.equal(sinusoidal_pos_embedding(3, 6, position_ids=ids[0]), rows[ids[0]])
    for one in ({"offset": starts[:1]}, {"position_ids": torch.arange(3, 6)[None]}):
        assert torch.equal(sinusoidal_pos_embedding(3, 6, **one), rows[None, 3:6])


def test_positions_are_held_to_what_every_encoding_takes():
    with pytest.raises(ValueError, match=r"positions must be at most 2\*\*31, got 2147483649"):
        sinusoidal_pos_embedding(2, 4, offset=2**31)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        sinusoidal_pos_embedding(2, 4, offset=torch.tensor([0, -1]))
    with pytest.raises(ValueError, match="exclude each other"):
        sinusoidal_pos_embedding(2, 4, offset=1, position_ids=torch.arange(2))
    with pytest.raises(ValueError, match=r"an integer tensor of shape \(2,\)"):
        sinusoidal_pos_embedding(2, 4, position_ids=torch.arange(3))
    with pytest.raises(TypeError, match="position_ids must be an integer tensor"):
        sinusoidal_pos_embedding(2, 4, position_ids=[0, 1])


class TestTimesteps:
    """Diffusion's form, with the conventions that its models differ in."""

    @pytest.mark.parametrize("shift", [0.0, 1.0])
    @pytest.mark.parametrize("flip", [False, True])
    @pytest.mark.parametrize("dim", [8, 9])
    def test_timesteps_follow_the_formula(self, dim, flip, shift):
        steps, half = [0.0, 1.0, 999.0, 0.25], dim // 2
        got = timestep_embedding(
            torch.tensor(steps),
            dim,
            flip_sin_to_cos=flip,
            downscale_freq_shift=shift,
            scale=2.0,
            dtype=torch.float64,
        )
        for row, t in enumerate(steps):
            phi = [2 * t * math.exp(-math.log(10_000) * i / (half - shift)) for i in range(half)]
            sin, cos = [math.sin(a) for a in phi], [math.cos(a) for a in phi]
            wanted = (cos + sin if flip else sin + cos) + [0.0] * (dim % 2)
            wanted = torch.tensor(wanted, dtype=torch.float64)
            assert torch.allclose(got[row], wanted, rtol=0, atol=1e-12)

    def test_half_precision_is_rounded_once(self):
        """The middle between two bfloat16 numbers, and a little: torch may lose the little."""
        angle = math.asin(0.5 + 2**-9 + 2**-40)
        at, shift = torch.tensor([angle], dtype=torch.float64), {"downscale_freq_shift": 0.0}
        got = timestep_embedding(at, 2, dtype=torch.bfloat16, **shift)
        assert got[0, 0].item() == oracles.rounded(math.sin(angle), torch.bfloat16)

    def test_bad_input_is_refused(self):
        with pytest.raises(ValueError, match="downscale_freq_shift must be from 0"):
            timestep_embedding(torch.arange(3), 2)
        with pytest.raises(ValueError, match=r"timesteps must have shape \(N,\)"):
            timestep_embedding(torch.ones(2, 2), 8)
