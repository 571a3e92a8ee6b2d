import math

import mpmath
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import oracles
from posenc.functional import fourier_features, nerf_features
from support.assertions import compilations

# An angle of less than a turn is rounded for each coordinate, and so are their sum and the cosine.
EXACT = 2 * math.pi * 2**-52 + 2**-53


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("axes", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_random_features_are_the_formula(axes, dtype):
    x, matrix = drawn(4, axes, dtype=dtype) * 1000, drawn(6, axes, seed=1) * 10
    got = fourier_features(x, matrix, dtype=torch.float64)
    exact = oracles.fourier_features(x.tolist(), matrix.tolist())
    assert ((got - exact).abs() < axes * EXACT + rounded_products(x, matrix)).all()


def rounded_products(x, matrix):
    """How far the rounding of products puts an angle off, for each feature."""
    if x.dtype.itemsize <= 4 and x.dtype.is_floating_point:
        return 0.0
    return (x.double().abs() @ matrix.double().T.abs()).repeat(1, 2) * 2 * math.pi * 2**-53


def test_times_since_1970_keep_the_digits_of_float64():
    now = 1_763_362_800
    times = torch.tensor([[now], [now + 1], [now + 3600]])
    matrix = drawn(8, 1, seed=2) * 0.3
    got = fourier_features(times, matrix, dtype=torch.float64)
    exact = oracles.fourier_features(times.tolist(), matrix.tolist())
    assert ((got - exact).abs() < EXACT + rounded_products(times, matrix)).all()
    assert (got - exact).abs().max() < 4e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_results_are_rounded_once(dtype):
    x, matrix = drawn(20, 2), drawn(20, 2, seed=3)
    exact = fourier_features(x, matrix, dtype=torch.float64)
    got = fourier_features(x, matrix, dtype=dtype)
    wanted = [oracles.rounded(value, dtype) for value in exact.flatten().tolist()]
    assert got.dtype == dtype
    assert got.flatten().tolist() == wanted


@pytest.mark.parametrize("axes", [1, 3])
def test_nerf_features_are_the_formula(axes):
    """Products with powers of two are exact."""
    x = drawn(5, axes)
    got = nerf_features(x, 10, dtype=torch.float64)
    exact = oracles.nerf_features(x.tolist(), 10, 1.0)
    assert got.shape == (5, 2 * axes * 10)
    assert (got - exact).abs().max() < EXACT


def test_without_pi_is_the_published_code():
    """Its angles are 2^k x: 1 / pi and the product are rounded, and nothing else."""
    x = drawn(5, 3)
    got = nerf_features(x, 10, scale=1 / math.pi, dtype=torch.float64)
    exact = oracles.nerf_features(x.tolist(), 10, 1 / mpmath.pi)
    largest = 2**9 * float(x.abs().max())
    assert (got - exact).abs().max() < EXACT + largest * 2**-52


MATRIX = drawn(4, 3)


@pytest.mark.parametrize(
    "encode",
    [
        lambda x, **options: fourier_features(x, MATRIX, **options),
        lambda x, **options: nerf_features(x, 4, **options),
    ],
    ids=["random", "nerf"],
)
class TestBoth:
    """What holds for both functions."""

    def test_the_coordinates_come_first_if_included(self, encode):
        x = drawn(2, 7, 3)
        got = encode(x, include_input=True)
        assert torch.equal(got[..., :3], x)
        assert torch.equal(got[..., 3:], encode(x))

    def test_any_leading_axes_and_strides(self, encode):
        x = drawn(3, 4, 2).permute(1, 2, 0)
        assert torch.equal(encode(x), encode(x.contiguous()))
        assert torch.equal(encode(x)[1, 0], encode(x[1, 0]))
        assert encode(x[:0]).shape == (0, 2, *encode(x).shape[2:])

    def test_whole_coordinates_are_those_of_floats(self, encode):
        x = torch.tensor([[3, -2, 70_000]])
        for dtype in (torch.int32, torch.float32, torch.float64):
            got = encode(x.to(dtype), dtype=torch.float64)
            assert (got - encode(x, dtype=torch.float64)).abs().max() < 6 * EXACT

    def test_both_derivatives_pass_to_the_coordinates(self, encode):
        """Physics-informed networks differentiate twice."""
        x = drawn(1, 3, dtype=torch.float64).requires_grad_()

        def run(x):
            return encode(x, include_input=True, dtype=torch.float64)

        assert gradcheck(run, (x,), check_forward_ad=True)
        assert gradgradcheck(run, (x,))

    def test_functions_of_torch_func_transform_it(self, encode):
        x = drawn(5, 3)
        assert torch.equal(torch.func.vmap(encode)(x), encode(x))
        rows = torch.func.jacrev(encode)(x[0])
        columns = torch.func.jacfwd(encode)(x[0])
        torch.testing.assert_close(rows, columns)

    @pytest.mark.slow
    def test_one_graph_for_all_lengths(self, encode):
        calls = [(drawn(n, 3),) for n in (5, 3, 17)]
        assert compilations(encode, calls, dynamic=True, backend="aot_eager") == 1

    def test_bad_coordinates_are_refused(self, encode):
        with pytest.raises(TypeError, match="coordinates must be a tensor of shape"):
            encode([[0.0, 1.0, 2.0]])
        with pytest.raises(TypeError, match="coordinates must be a tensor"):
            encode(torch.zeros(2, 3, dtype=torch.complex64))
        with pytest.raises(ValueError, match=r"Pass times\[..., None\]"):
            encode(torch.tensor(1.0))
        with pytest.raises(TypeError, match="dtype must be one of"):
            encode(drawn(2, 3), dtype=torch.int64)
        with pytest.raises(TypeError, match="include_input must be True or False"):
            encode(drawn(2, 3), include_input=1)


def test_gradients_reach_the_frequencies():
    x, matrix = drawn(3, 2, dtype=torch.float64), drawn(4, 2, seed=1, dtype=torch.float64)
    matrix.requires_grad_()
    assert gradcheck(lambda b: fourier_features(x, b, dtype=torch.float64), (matrix,))


def test_meta_gives_meta():
    x = torch.empty(4, 3, device="meta")
    assert fourier_features(x, torch.empty(5, 3, device="meta")).shape == (4, 10)
    assert nerf_features(x, 2).is_meta


def test_bad_frequencies_are_refused():
    with pytest.raises(ValueError, match=r"frequencies must have shape \(F, A\)"):
        fourier_features(torch.zeros(2, 1), torch.ones(4))
    with pytest.raises(ValueError, match=r"coordinates must be a tensor of shape \(..., 2\)"):
        fourier_features(torch.zeros(2, 1), torch.ones(4, 2))
    with pytest.raises(TypeError, match="frequencies must be a float16"):
        fourier_features(torch.zeros(2, 1), torch.ones(4, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="num_frequencies must be at most 64"):
        nerf_features(torch.zeros(2, 1), 65)
    with pytest.raises(ValueError, match="scale must be finite and above zero"):
        nerf_features(torch.zeros(2, 1), 4, scale=-1.0)
