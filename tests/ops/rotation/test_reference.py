"""The sum of an input and an encoding."""

import pytest
import torch

from posenc.ops.rotation import reference
from support.assertions import assert_within_ulps

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


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
