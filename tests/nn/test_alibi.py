import pytest
import torch

import oracles
from assertions import compilations
from posenc.nn import ALiBi


@pytest.mark.parametrize("heads", [1, 8, 12])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_bias_is_slope_times_distance(heads, causal):
    alibi = ALiBi(heads, causal=causal)
    wanted = oracles.alibi_bias(alibi.slopes.tolist(), 7, 7, causal=causal)
    assert torch.equal(alibi.get_bias(7), wanted.float())
    assert alibi.get_bias(0).shape == (heads, 0, 0)


def test_slopes_are_a_buffer_that_is_not_saved():
    alibi = ALiBi(8)
    assert "slopes" in dict(alibi.named_buffers())
    assert alibi.state_dict() == {}


def test_the_seeds_plain_sequence_on_request():
    slopes = ALiBi(3, plain=True).slopes
    wanted = [2 ** (-8 * h / 3) for h in (1, 2, 3)]
    torch.testing.assert_close(slopes, torch.tensor(wanted), rtol=1e-7, atol=0)


def test_forward_adds_the_bias_to_scores():
    alibi, scores = ALiBi(4), torch.randn(2, 4, 3, 5)
    wanted = scores + oracles.alibi_bias(alibi.slopes.tolist(), 3, 5, causal=True)
    torch.testing.assert_close(alibi(scores), wanted.float(), rtol=1e-6, atol=1e-6)
    assert alibi(scores.bfloat16()).dtype == torch.bfloat16


def test_softmax_over_far_keys_prefers_the_near():
    alibi = ALiBi(8)
    weights = alibi(torch.zeros(8, 16, 16)).softmax(-1)
    assert (weights[:, -1].diff() > 0).all()
    assert weights.triu(1).sum() == 0


@pytest.mark.parametrize("heads", [0, -1])
def test_heads_must_be_positive(heads):
    with pytest.raises(ValueError, match="ALiBi: num_heads must be at least 1"):
        ALiBi(heads)


def test_bad_input_is_named():
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
        alibi(torch.zeros(2, 3, 5, 5))
    with pytest.raises(
        ValueError, match="ALiBi: scores must have at least as many keys as queries, 5, got 4"
    ):
        alibi(torch.zeros(4, 5, 4))
    with pytest.raises(TypeError, match="scores must be a float16"):
        alibi(torch.zeros(4, 5, 5).long())


@pytest.mark.parametrize(
    "sizes", [[(5, 5), (3, 3), (17, 17)], [(3, 9), (5, 6), (2, 64)]], ids=["square", "cache"]
)
def test_one_graph_for_all_lengths(sizes):
    calls = [(torch.randn(2, 4, q, k),) for q, k in sizes]
    assert compilations(ALiBi(4), calls, dynamic=True) == 1


def test_float64_scores_get_exact_slopes():
    alibi = ALiBi(12)
    wanted = oracles.alibi_bias([2 ** (-8 * h / 8) for h in range(1, 9)], 9, 9, causal=True)
    assert torch.equal(alibi(torch.zeros(12, 9, 9, dtype=torch.float64))[:8], wanted)


def test_slopes_are_made_where_the_device_context_says():
    with torch.device("meta"):
        assert ALiBi(8).slopes.is_meta
