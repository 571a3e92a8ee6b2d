"""Several coordinates, a run of channels each."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck

import oracles
from posenc import positions
from posenc.functional import sinusoidal_grid_embedding


def expected(size, widths, order, *, concatenated):
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
    wanted = expected(size, widths, order, concatenated=concatenated)
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


def test_half_precision_is_rounded_once():
    at = positions.grid(8, 8)
    exact = sinusoidal_grid_embedding(at, 16, dtype=torch.float64).flatten().tolist()
    got = sinusoidal_grid_embedding(at, 16, dtype=torch.bfloat16).flatten().tolist()
    assert got == [oracles.rounded(value, torch.bfloat16) for value in exact]


def test_bad_arguments_are_named():
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
