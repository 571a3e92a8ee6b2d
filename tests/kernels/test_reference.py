import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import oracles
from oracles import tables
from posenc.kernels import reference
from posenc.kernels.spec import Rows, Spec
from support.assertions import assert_within_ulps

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("shape", "pairs"),
    [
        pytest.param((2, 3, 33, 64), 32, id="odd-length"),
        pytest.param((1, 1, 1, 64), 32, id="decode"),
        pytest.param((2, 2, 40, 96), 48, id="pairs-not-a-power-of-two"),
        pytest.param((2, 2, 17, 64), 8, id="partial"),
        pytest.param((0, 2, 5, 8), 4, id="empty-batch"),
        pytest.param((2, 2, 0, 8), 4, id="no-tokens"),
        pytest.param((1, 1, 7, 2), 1, id="one-pair"),
    ],
)
def test_matches_float64(dtype, shape, pairs, interleaved):
    """Half precisions owe their output rounding; float64, computed in itself, three roundings."""
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    cos, sin = tables(shape[-2], pairs) if shape[-2] else (torch.empty(0, pairs),) * 2

    got = reference.rotate(x, cos, sin, Rows(), Spec(interleaved, interleaved))

    exact = oracles.rotate(x, cos, sin, interleaved=interleaved)
    size = oracles.pair_magnitude(exact, pairs, interleaved=interleaved)
    assert got.dtype == dtype
    assert_within_ulps(got, exact, 4 if dtype == torch.float64 else 0.501, size)
    assert torch.equal(got[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_transposed_undoes_it_and_is_its_gradient(interleaved):
    x = torch.randn(3, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(3, 2, 5, 8, dtype=torch.float64)
    cos, sin = tables(5, 4)
    spec = Spec(interleaved, interleaved)
    y = reference.rotate(x, cos, sin, Rows(), spec)
    (gradient,) = torch.autograd.grad(y, x, upstream)
    transposed = reference.rotate(upstream, cos, sin, Rows(), spec.transpose())
    torch.testing.assert_close(gradient, transposed, rtol=1e-14, atol=1e-15)
    back = reference.rotate(y, cos, sin, Rows(), spec.transpose())
    torch.testing.assert_close(back, x, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_first_and_second_gradients_are_numerical_ones(interleaved):
    x = torch.randn(2, 1, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.requires_grad_() for t in tables(3, 3))

    def rotated(*arguments):
        return reference.rotate(*arguments, Rows(), Spec(interleaved, interleaved))

    assert gradcheck(rotated, (x, cos, sin))
    assert gradgradcheck(rotated, (x, cos, sin))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_add_rounds_once_where_the_two_cancel(dtype):
    """x close to minus the table: the sum is small, and must still be right to half an ulp."""
    table = torch.linspace(-1, 1, 4001)
    x = (-table).to(dtype)
    exact = x.double() + table.double()
    assert_within_ulps(reference.add(x, table), exact, 0.5, exact.abs())


def test_add_keeps_the_dtype_of_its_input():
    for dtype in DTYPES:
        assert reference.add(torch.ones(2, dtype=dtype), torch.ones(2)).dtype == dtype
