import pytest
import torch

import oracles
import posenc
from posenc.nn import ALiBi
from support.assertions import COMPILERS, compilations
from support.biases import assert_is_formula


@pytest.mark.parametrize("heads", [1, 8, 12])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_bias_is_slope_times_distance(heads, causal):
    alibi = ALiBi(heads, causal=causal)
    wanted = oracles.alibi_bias(alibi.slopes.tolist(), 7, 7, causal=causal)
    assert torch.equal(alibi.get_bias(7), wanted.float())
    assert alibi.get_bias(0).shape == (heads, 0, 0)


def test_slopes_are_constants_and_not_saved():
    """Whatever is done to them, every method takes the same ones."""
    alibi = ALiBi(8)
    assert alibi.state_dict() == {}
    assert alibi.slopes.dtype == alibi.half().slopes.dtype == torch.float32
    before, bias = alibi.slopes.clone(), alibi.get_bias(4)
    for name, value in {
        "num_heads": 4,
        "bias_max": 16.0,
        "geometric": True,
        "slopes": before,
    }.items():
        with pytest.raises(AttributeError, match=name):
            setattr(alibi, name, value)
    alibi.slopes.mul_(2)
    assert torch.equal(alibi.slopes, before)
    assert torch.equal(alibi.get_bias(4), bias)


def test_slopes_that_require_a_gradient_are_refused():
    with pytest.raises(ValueError, match=r"must not require a gradient.*\n.*alibi_attention"):
        ALiBi(4, slopes=torch.nn.Parameter(torch.ones(4)))


def test_add_bias_adds_the_bias_to_scores():
    alibi, scores = ALiBi(4), torch.randn(2, 4, 3, 5)
    wanted = scores + oracles.alibi_bias(alibi.slopes.tolist(), 3, 5, causal=True)
    torch.testing.assert_close(alibi.add_bias(scores), wanted.float(), rtol=1e-6, atol=1e-6)
    assert alibi.add_bias(scores.bfloat16()).dtype == torch.bfloat16


def test_bad_input_is_refused():
    alibi = ALiBi(4)
    with pytest.raises(TypeError, match="num_heads must be an int"):
        ALiBi(8.0)
    with pytest.raises(TypeError, match="causal must be True or False"):
        ALiBi(8, causal=1)
    with pytest.raises(ValueError, match="ALiBi: seq_len must be at least 0"):
        alibi.get_bias(-1)
    with pytest.raises(TypeError, match="seq_len must be an int"):
        alibi.get_bias(3.0)
    with pytest.raises(ValueError, match=r"scores must have shape \(\.\.\., 4, Q, K\)"):
        alibi.add_bias(torch.zeros(2, 3, 5, 5))
    with pytest.raises(ValueError, match="k_len must be at least q_len=5, got 4"):
        alibi.add_bias(torch.zeros(4, 5, 4))
    with pytest.raises(TypeError, match="scores must be a float16"):
        alibi.add_bias(torch.zeros(4, 5, 5).long())


@COMPILERS
def test_one_graph_serves_scores_of_all_lengths(backend):
    calls = [(torch.randn(2, 4, q, k),) for q, k in [(3, 9), (5, 6), (2, 64)]]
    assert compilations(ALiBi(4).add_bias, calls, dynamic=True, backend=backend) == 1


def test_float64_scores_get_exact_slopes():
    alibi = ALiBi(12)
    wanted = oracles.alibi_bias([2 ** (-8 * h / 8) for h in range(1, 9)], 9, 9, causal=True)
    assert torch.equal(alibi.add_bias(torch.zeros(12, 9, 9, dtype=torch.float64))[:8], wanted)


def test_slopes_may_be_those_of_the_user():
    alibi = ALiBi(3, slopes=[0.5, 0.0, 0.1])
    assert alibi.slopes.dtype == torch.float32
    assert torch.equal(alibi.slopes, torch.tensor([0.5, 0.0, 0.1]))
    wanted = oracles.alibi_bias([0.5, 0.0, 0.1], 4, 4, causal=True)
    assert torch.equal(alibi.bias(4, dtype=torch.float64), wanted)
    assert ALiBi(3, slopes=torch.rand(2, 3)).bias(4).shape == (2, 3, 4, 4)


def test_slopes_of_the_user_survive_the_meta_device_and_a_cast():
    with torch.device("meta"):
        alibi = ALiBi(2, slopes=[0.3, 0.2])
        assert alibi.slopes.is_meta
    alibi = alibi.to_empty(device="cpu").half()
    assert torch.equal(alibi.slopes, torch.tensor([0.3, 0.2]))


def test_a_rank_takes_a_slice_of_the_global_heads():
    whole = ALiBi(12)
    parts = [whole.select_heads(n, n + 4) for n in (0, 4, 8)]
    assert torch.equal(torch.cat([p.get_bias(9) for p in parts]), whole.get_bias(9))
    assert [p.num_heads for p in parts] == [4, 4, 4]


def test_bad_slopes_are_refused():
    for slopes in ([0.5, -0.1], [0.5, float("nan")], [0.5, float("inf")]):
        with pytest.raises(ValueError, match="slopes must be finite and not below zero"):
            ALiBi(2, slopes=slopes)
    with pytest.raises(ValueError, match="one number for each of the 3 heads"):
        ALiBi(3, slopes=[0.5, 0.1])
    with pytest.raises(TypeError, match="slopes must be numbers"):
        ALiBi(2, slopes="ab")
    with pytest.raises(ValueError, match="must select at least one of the 8 heads"):
        ALiBi(8).select_heads(4, 9)


def test_scores_keep_their_shape_with_slopes_of_each_sequence():
    slopes = [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]
    scores = torch.randn(3, 2, 4, 5)
    got = ALiBi(2, slopes=slopes).add_bias(scores)
    for each, row, x in zip(got, slopes, scores, strict=True):
        assert torch.equal(each, ALiBi(2, slopes=row).add_bias(x))
    for shape in [(1, 2, 4, 5), (2, 4, 5), (2, 2, 4, 5)]:
        with pytest.raises(ValueError, match=r"scores must have shape \(3, 2, Q, K\)"):
            ALiBi(2, slopes=slopes).add_bias(torch.randn(shape))


def test_learned_slopes_are_the_formula_and_start_at_the_papers():
    """Their logarithm is learned, so the gradient is the slope's times the slope."""

    def formula(given, h, i, j):
        return -given["log_slopes"][h].exp() * abs(i - j)

    for causal in (True, False):
        alibi = posenc.ALiBi(4, causal=causal, learned=True)
        torch.testing.assert_close(alibi.slopes, posenc.ALiBi(4).slopes, rtol=1e-6, atol=0)
        assert_is_formula(alibi, formula, kv_heads=2)


def test_learned_slopes_are_selected_copied_and_refused():
    alibi = posenc.ALiBi(4, slopes=[0.5, 0.3, 0.2, 0.1], learned=True)
    with torch.no_grad():
        alibi.log_slopes.add_(1.0)
    assert torch.equal(alibi.select_heads(1, 3).slopes, alibi.slopes[1:3])
    assert torch.equal(alibi.get_bias(5), alibi.bias(5))
    assert list(alibi.state_dict()) == ["log_slopes"]
    assert not posenc.ALiBi(4).state_dict()
    assert alibi.replace(learned=False).slopes[0] == 0.5
    for slopes in ([0.5, 0.0], [[0.5, 0.1], [0.2, 0.1]]):
        with pytest.raises(ValueError, match="learned slopes must be one for each head, above"):
            posenc.ALiBi(2, slopes=slopes, learned=True)
