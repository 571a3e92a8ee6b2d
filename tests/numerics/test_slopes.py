import pytest
import torch

from posenc.numerics.slopes import head_slopes

# Written out from the rule, h by h: exponents of two.
EXPONENTS = {
    1: [-8],
    2: [-4, -8],
    3: [-4, -8, -2],
    6: [-2, -4, -6, -8, -1, -3],
    12: [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5],
}


@pytest.mark.parametrize("heads", EXPONENTS)
def test_slopes_follow_the_paper_in_its_order(heads):
    wanted = torch.tensor(EXPONENTS[heads], dtype=torch.float64).exp2()
    torch.testing.assert_close(head_slopes(heads), wanted, rtol=2**-52, atol=0)


@pytest.mark.parametrize("heads", [7, 20, 71, 112])
def test_other_counts_begin_as_the_power_of_two_below(heads):
    below = 1 << (heads.bit_length() - 1)
    slopes = head_slopes(heads)
    assert len(slopes) == heads
    assert torch.equal(slopes[:below], head_slopes(below))
    assert torch.equal(slopes[below:], head_slopes(2 * below)[0::2][: heads - below])


def test_plain_slopes_are_one_geometric_sequence():
    slopes = head_slopes(12, plain=True)
    ratio = slopes[1:] / slopes[:-1]
    torch.testing.assert_close(ratio, ratio[:1].expand(11), rtol=1e-15, atol=0)
    assert slopes[-1] == 2.0**-8


def test_bias_max_is_the_last_exponent():
    assert head_slopes(16, 4.0)[-1] == 2.0**-4
