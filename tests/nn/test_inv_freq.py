"""RoPE with frequencies of the user."""

import math

import mpmath
import pytest
import torch

import oracles
from posenc import RoPE, axes, functional, positions, scaling
from support.assertions import assert_within_ulps

FREQS = (0.0, 1.0, -0.3, 100.7)


def cos_sin(at, freqs):
    """Of exact products, by mpmath."""
    angles = [[mpmath.mpf(p) * mpmath.mpf(f) for f in freqs] for p in at]
    return [
        torch.tensor([[float(f(phi)) for phi in row] for row in angles], dtype=torch.float64)
        for f in (mpmath.cos, mpmath.sin)
    ]


@pytest.mark.parametrize("rate", [*FREQS, 1e-9, math.pi, 2.0**31], ids=str)
def test_angles_are_exact_at_any_position(rate):
    at = [0, 1, 12345, 2**31]
    rope = RoPE(2, None, inv_freq=[rate])
    with mpmath.workdps(60):
        wanted = cos_sin(at, [rate])
    for got, exact in zip(rope.tables(torch.tensor(at)), wanted, strict=True):
        assert (got - exact).abs().max() < 1.5e-15


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tokens_rotate_by_the_frequencies(dtype, interleaved):
    rope = RoPE(10, 16, inv_freq=torch.tensor(FREQS), rotary_dim=8, interleaved=interleaved)
    q, k = torch.randn(2, 4, 5, 10).to(dtype), torch.randn(2, 2, 5, 10).to(dtype)
    tables = cos_sin(range(3, 8), torch.tensor(FREQS).tolist())
    for got, x in zip(rope(q, k, 3), (q, k), strict=True):
        exact = oracles.rotate(x[..., :8], *tables, interleaved=interleaved)
        size = oracles.pair_magnitude(exact, 4, interleaved=interleaved)
        assert_within_ulps(got[..., :8], exact, 1.0, size)
        assert torch.equal(got[..., 8:], x[..., 8:])


def test_the_usual_rates_give_the_usual_rotation():
    """Up to the rounding of the rates to float64, which base does not have."""
    plain, x = RoPE(16, 64), torch.randn(1, 2, 9, 16)
    usual = plain.scaled_inv_freq()
    for rates in (usual, usual.tolist(), usual.numpy()):
        assert torch.allclose(RoPE(16, 64, inv_freq=rates).rotate(x), plain.rotate(x), atol=1e-6)


def test_equal_rates_share_tables_and_others_do_not():
    one = RoPE(8, 16, inv_freq=FREQS)
    same = RoPE(8, 16, inv_freq=torch.tensor(FREQS, dtype=torch.float64))
    x = torch.randn(1, 1, 4, 8)
    (one.rotate(x), same.rotate(x))
    assert one.inv_freq == same.inv_freq == FREQS
    assert one.cos_cached.data_ptr() == same.cos_cached.data_ptr()
    assert not torch.equal(RoPE(8, 16).cos_cached, one.cos_cached)


@pytest.mark.parametrize(
    ("how", "count"),
    [
        (axes.Axial(2), 4),
        (axes.Axial((4, 12)), 8),
        (axes.Axial(2, "shared"), 8),
        (axes.Sections((4, 2, 2)), 8),
    ],
    ids=["axial", "unequal", "shared", "sections"],
)
def test_axes_arrange_the_frequencies(how, count):
    freqs = [0.1 * i + 0.05 for i in range(count)]
    rope = RoPE(16, None, axes=how, inv_freq=freqs)
    at = positions.grid(*(2,) * how.count())
    taken = [freqs[i] for i in how.rate_index(8)]
    assert rope.scaled_inv_freq().tolist() == taken
    pairs = zip(how.followed(8), taken, strict=True)
    phi = torch.stack([at[axis].double() * rate for axis, rate in pairs], dim=-1)
    assert torch.allclose(rope.tables(at)[1], phi.sin(), atol=1e-14)


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (scaling.Linear(2.0), [f / 2 for f in FREQS]),
        (
            scaling.Llama3(2.0, original_length=8),
            [0.0, 1 / 2 + 1 / 2 * (8 / math.tau - 1) / 3, -0.15, 100.7],
        ),
        (
            scaling.LongRoPE((1.0, 2.0, 3.0, 4.0), long_factor=(1.0,) * 4, original_length=64),
            [0.0, 0.5, -0.1, 100.7 / 4],
        ),
        (scaling.NTK(8.0), [0.0, 1 / 2, -0.3 / 4, 100.7 / 8]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rules_scale_the_frequencies(rule, wanted):
    got = RoPE(8, None, inv_freq=FREQS, scaling=rule).scaled_inv_freq()
    assert torch.allclose(got, torch.tensor(wanted, dtype=torch.float64), rtol=1e-15)


def test_a_rule_that_needs_a_base_says_so():
    with pytest.raises(ValueError, match=r"YaRN: inv_freq must be None.*\n.*Llama3"):
        RoPE(8, None, inv_freq=FREQS, scaling=scaling.YaRN(4.0, original_length=64))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inv_freq": [1.0]}, ValueError, "inv_freq must have 4 numbers, got 1"),
        ({"inv_freq": 1.0}, TypeError, "a sequence of numbers"),
        ({"inv_freq": ["1"] * 4}, TypeError, "must be numbers"),
        ({"inv_freq": [True] * 4}, TypeError, "must be numbers"),
        ({"inv_freq": [math.nan] * 4}, ValueError, "finite and within"),
        ({"inv_freq": [math.inf] * 4}, ValueError, "finite and within"),
        ({"inv_freq": torch.ones(2, 2)}, ValueError, r"must have shape \(4,\)"),
        ({"inv_freq": torch.ones(4, requires_grad=True)}, TypeError, "use MixedRoPE"),
        ({"inv_freq": torch.ones(4, device="meta")}, TypeError, "on the meta device"),
        ({"inv_freq": FREQS, "base": 500.0}, ValueError, "base and inv_freq exclude each other"),
        (
            {"inv_freq": FREQS, "axes": axes.Axial(2)},
            ValueError,
            r"2 numbers.*\n.*of one coordinate",
        ),
    ],
)
def test_bad_rates_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        RoPE(8, **arguments)


@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize("most", [10, 224.0])
def test_pixel_frequencies_are_those_of_the_formula(count, most):
    shares = [mpmath.mpf(i) / max(count - 1, 1) for i in range(count)]
    half = mpmath.mpf(most) / 2
    for linear, bands in (
        (True, [1 + share * (half - 1) for share in shares]),
        (False, [half**share for share in shares]),
    ):
        wanted = torch.tensor([float(mpmath.pi * band) for band in bands], dtype=torch.float64)
        got = functional.pixel_frequencies(count, most, linear=linear)
        # A rounding each of the share, two products and a sum; a power is off by an ulp or two.
        assert ((got - wanted).abs() / wanted).max() < 4 * 2**-52


def test_pixel_frequencies_refuse_an_image_of_two_pixels():
    with pytest.raises(ValueError, match="max_freq must be above 2"):
        functional.pixel_frequencies(4, 2.0)
