"""Sinusoids of positions, of grids and of timesteps."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

import oracles
from posenc import positions
from posenc.functional import (
    sinusoidal_grid_embedding,
    sinusoidal_pos_embedding,
    timestep_embedding,
)


def test_shape_dtype_and_device_are_as_asked():
    pe = sinusoidal_pos_embedding(4, 8)
    assert (pe.shape, pe.dtype, pe.device.type) == ((4, 8), torch.float32, "cpu")
    assert sinusoidal_pos_embedding(2, 4, "meta", torch.bfloat16).is_meta
    assert sinusoidal_pos_embedding(2, 4, "cpu", torch.bfloat16).dtype == torch.bfloat16


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**31 - 39))
def test_an_offset_is_a_slice(length, dim, offset):
    got = sinusoidal_pos_embedding(length, dim, offset=offset, dtype=torch.float64)
    exact = oracles.sinusoid(range(offset, offset + length), dim)
    assert (got - exact).abs().max() < 1.5e-15


def test_each_sequence_may_have_positions_of_its_own():
    rows = sinusoidal_pos_embedding(20, 6)
    starts, ids = torch.tensor([3, 0]), torch.tensor([[4, 9, 0], [1, 1, 2]])
    got = sinusoidal_pos_embedding(3, 6, offset=starts)
    assert torch.equal(got, rows[starts[:, None] + torch.arange(3)])
    assert torch.equal(sinusoidal_pos_embedding(3, 6, position_ids=ids), rows[ids])
    assert torch.equal(sinusoidal_pos_embedding(3, 6, position_ids=ids[0]), rows[ids[0]])
    for one in ({"offset": starts[:1]}, {"position_ids": torch.arange(3, 6)[None]}):
        assert torch.equal(sinusoidal_pos_embedding(3, 6, **one), rows[None, 3:6])


def test_the_table_is_on_the_device_of_its_positions():
    """Moving positions to the CPU would wait for a GPU, and the sum with embeddings there fail."""
    ids, first = torch.tensor([[4, 0, 2]], device="meta"), torch.tensor([3], device="meta")
    for where in ({"position_ids": ids}, {"position_ids": ids[0]}, {"offset": first}):
        assert sinusoidal_pos_embedding(3, 6, **where).is_meta
        with pytest.raises(ValueError, match="must hold values, got a meta tensor"):
            sinusoidal_pos_embedding(3, 6, "cpu", **where)
    assert sinusoidal_pos_embedding(3, 6, "meta", position_ids=torch.arange(3)).is_meta
    with torch.device("meta"):
        assert sinusoidal_pos_embedding(3, 6).device.type == "cpu"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"seq_len": 0}, ValueError, "sinusoidal_pos_embedding: seq_len must be at least 1"),
        ({"seq_len": True}, TypeError, "seq_len must be an int"),
        ({"embed_dim": 0}, ValueError, "embed_dim must be at least 1"),
        ({"embed_dim": 4.0}, TypeError, "embed_dim must be an int"),
        ({"dtype": torch.int64}, TypeError, "dtype must be one of"),
        ({"offset": -1}, ValueError, "offset must be at least 0"),
        ({"offset": 2**31}, ValueError, r"positions must be at most 2\*\*31, got 2147483649"),
        ({"offset": torch.tensor([0, -1])}, ValueError, "must not be negative, got -1"),
        ({"offset": 1, "position_ids": torch.arange(2)}, ValueError, "exclude each other"),
        ({"position_ids": torch.arange(3)}, ValueError, r"an integer tensor of shape \(2,\)"),
        ({"position_ids": [0, 1]}, TypeError, "position_ids must be an integer tensor"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        sinusoidal_pos_embedding(**{"seq_len": 2, "embed_dim": 4, **arguments})


def grid_of(size, widths, order, *, concatenated):
    """Cell by cell and coordinate by coordinate, from the sinusoid of one coordinate."""
    lines = [
        oracles.sinusoid(range(count), width).tolist()
        for count, width in zip(size, widths, strict=True)
    ]
    rows = []
    for cell in itertools.product(*map(range, size)):
        row = []
        for axis in order:
            one = lines[axis][cell[axis]]
            row += one[0::2] + one[1::2] if concatenated else one
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("size", "dim", "options", "widths", "order"),
    [
        pytest.param((2, 3), 16, {}, (8, 8), (0, 1), id="positional-encodings"),
        pytest.param((2, 2, 3), 24, {}, (8, 8, 8), (0, 1, 2), id="positional-encodings-3d"),
        pytest.param((2, 3), 16, {"concatenated": True}, (8, 8), (1, 0), id="mae-dit"),
        pytest.param(
            (3, 2), 16, {"concatenated": True, "order": (0, 1)}, (8, 8), (0, 1), id="height-first"
        ),
        pytest.param(
            (2, 3, 4),
            32,
            {"concatenated": True, "widths": (8, 12, 12), "order": (0, 2, 1)},
            (8, 12, 12),
            (0, 2, 1),
            id="cogvideox",
        ),
        pytest.param((2, 3), 10, {"widths": [2, 8]}, (2, 8), (0, 1), id="unequal"),
        pytest.param((5,), 6, {"concatenated": True}, (6,), (0,), id="one"),
    ],
)
def test_each_coordinate_has_its_channels(size, dim, options, widths, order):
    at = positions.grid(*size)
    got = sinusoidal_grid_embedding(at, dim, dtype=torch.float64, **options)
    concatenated = options.get("concatenated", False)
    wanted = grid_of(size, widths, order, concatenated=concatenated)
    assert (got - wanted).abs().max() < 1.5e-15


def test_coordinates_may_lie_between_the_cells():
    """An image of twice the patches, in the range that was trained."""
    fine, coarse = positions.grid(4, 4) / 2, positions.grid(2, 2)
    got = sinusoidal_grid_embedding(fine, 8, dtype=torch.float64).view(4, 4, 8)[::2, ::2]
    wanted = sinusoidal_grid_embedding(coarse, 8, dtype=torch.float64).view(2, 2, 8)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_fractional_times_keep_the_digits_of_float64(dtype):
    """Where seconds are counted from 1970, the rate and the product are each off by 2e-7."""
    times = torch.tensor([1_763_362_800.123, 1e6 + 0.3, 3.7, -0.1, 0.0], dtype=torch.float64)
    times = times.clamp(max=torch.finfo(dtype).max).to(dtype)
    got = sinusoidal_grid_embedding(times[None], 12, dtype=torch.float64)
    exact = oracles.sinusoid(times.tolist(), 12)
    assert ((got - exact).abs() <= times.double().abs()[:, None] * 2**-52 + 2**-53).all()


def test_gradients_pass_to_fractional_coordinates():
    at = torch.tensor([[0.3, 7.1]], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda at: sinusoidal_grid_embedding(at, 6, dtype=torch.float64), (at,))


def test_batches_of_coordinates():
    at = positions.grid(2, 3)
    both = torch.stack((at, at + 5), dim=1)
    got = sinusoidal_grid_embedding(both, 8)
    assert got.shape == (2, 6, 8)
    assert torch.equal(got[1], sinusoidal_grid_embedding(at + 5, 8))


def test_bad_channels_are_refused():
    at = positions.grid(2, 2)
    with pytest.raises(ValueError, match="embed_dim must be a multiple of twice the 2 coordinates"):
        sinusoidal_grid_embedding(at, 6)
    with pytest.raises(ValueError, match=r"position_ids must have shape \(A, ..., L\)"):
        sinusoidal_grid_embedding(torch.arange(4), 8)
    for widths in ((4, 6), (3, 5)):
        with pytest.raises(ValueError, match="widths must be even and add up to embed_dim=8"):
            sinusoidal_grid_embedding(at, 8, widths=widths)
    for wrong in ((4, 2, 2), 4):
        with pytest.raises(ValueError, match="widths must be a tuple of 2 ints"):
            sinusoidal_grid_embedding(at, 8, widths=wrong)
    with pytest.raises(ValueError, match="order must name each of the coordinates 0 to 1 once"):
        sinusoidal_grid_embedding(at, 8, order=(1, 1))


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
