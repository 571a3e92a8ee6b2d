import pytest
import torch

from posenc.numerics.slopes import head_slopes, window_length

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


@pytest.mark.parametrize("slope", [0.0, -0.5, float("nan")])
def test_a_slope_that_lowers_nothing_keeps_every_key(slope):
    slopes = torch.tensor([slope, 0.5], dtype=torch.float64)
    # (1 + ln(2^26) - ln(1 - exp(-1/2))) / (1/2) = 39.9
    assert window_length(slopes, 1.0, 1000, torch.float32).tolist() == [1000, 40]


@pytest.mark.parametrize("gap", [float("inf"), float("nan")])
def test_a_gap_that_is_no_number_keeps_every_key(gap):
    gaps = torch.tensor([gap, 1.0], dtype=torch.float64)
    slopes = torch.tensor(0.5, dtype=torch.float64)
    assert window_length(slopes, gaps, 1000, torch.float32).tolist() == [1000, 40]
