import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc.numerics.turns import turns

EXACT = 2.3e-15
WIDE = st.floats(-(2.0**40), 2.0**40)
RATE = st.floats(-(2.0**11), 2.0**11)


def off(x, rate, got):
    """How far ``got`` is from the exact product, in turns, modulo one."""
    gap = mpmath.mpf(x) * mpmath.mpf(rate) - mpmath.mpf(got)
    return abs(gap - mpmath.nint(gap))


@given(WIDE, RATE, st.sampled_from([torch.float32, torch.float64]))
def test_a_product_of_floats_loses_nothing_but_whole_turns(x, rate, dtype):
    at, rates = torch.tensor([x], dtype=torch.float64), torch.tensor([rate], dtype=dtype)
    got = turns(at, rates)
    assert got.dtype == torch.float64
    assert off(x, rates.item(), got.item()) < EXACT


@given(st.integers(-(2**63), 2**63 - 1), st.floats(2.0**-40, 2.0**-12, width=32))
def test_any_int64_is_multiplied_exactly(x, rate):
    """Nanoseconds since 1970 take 61 bits, and a float64 has 53."""
    got = turns(torch.tensor([x]), torch.tensor([rate]))
    assert off(x, rate, got.item()) < EXACT


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["float32-rate", "float64-rate"])
def test_every_dtype_is_exact(dtype, wide):
    ends = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype)
    x = torch.tensor([ends.min, ends.max, 1, 77], dtype=dtype)
    rate = torch.tensor([0.1], dtype=torch.float64 if wide else torch.float32)
    for number, got in zip(x.tolist(), turns(x, rate).tolist(), strict=True):
        assert off(number, rate.item(), got) < EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_gradients_are_those_of_the_product(dtype):
    x = torch.tensor([1.7e9, -3.3], dtype=dtype, requires_grad=True)
    rate = torch.tensor([0.3, 1234.5], dtype=dtype, requires_grad=True)
    turns(x, rate).sum().backward()
    assert torch.equal(x.grad, rate.detach())
    assert torch.equal(rate.grad, x.detach())


def test_what_is_not_finite_stays_so():
    x = torch.tensor([float("inf"), float("nan")], dtype=torch.float64)
    assert turns(x, torch.ones(1)).isnan().all()
