import pytest
import torch

import oracles
from posenc.attention import alibi_attention, bound_scores, chunked, pruning
from posenc.functional import alibi_bias, alibi_slopes
from support.attention import HEADS, STEEP, WIDTH, qkv


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_pruned_keys_move_the_output_by_less_than_half_an_ulp(dtype):
    """The claim of the inequality, in float64 arithmetic with the windows of each dtype.

    The unit is the spacing at the largest value that is averaged.
    """
    q, k, v = qkv(400, 400)
    slopes = alibi_slopes(HEADS, dtype=torch.float64, **STEEP)
    # Windows of this dtype: taken from its inputs, used on exact arithmetic.
    cut = [x.to(dtype) for x in (q, k, v)]
    plan = pruning.Plan(slopes, None, None, WIDTH**-0.5, causal=True, prune=True)
    _, low, _ = pruning.needed_keys(cut[0], cut[1], 0, plan)
    bias = alibi_bias(slopes, 400, dtype=torch.float64)
    exact = oracles.attention(*cut, bias, WIDTH**-0.5)
    far = torch.arange(400) < low[..., None]
    windowed = oracles.attention(*cut, bias.masked_fill(far, float("-inf")), WIDTH**-0.5)
    assert far.any()
    largest = cut[2].double().abs().amax(2, keepdim=True)
    half = oracles.ulp(largest, dtype) / 2
    assert ((exact - windowed).abs() <= half).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_scores_as_adverse_as_the_bound_allows_are_still_within_it(dtype):
    """All keys that are left out point along the query, and all others against it."""
    slopes = alibi_slopes(1, bias_max=2.0, dtype=torch.float64)
    bias, key = alibi_bias(slopes, 300, dtype=torch.float64), torch.arange(300)
    q = torch.full((1, 1, 300, WIDTH), 1.5, dtype=torch.float64)

    def left_out(k):
        plan = pruning.Plan(slopes, None, None, 0.25, causal=True, prune=True)
        return key < pruning.needed_keys(q.to(dtype), k.to(dtype), 0, plan)[1][0, 0, 299]

    # The own key is against the query from the start: it decides how far others can be above it.
    k = torch.where(left_out(-q), 1.0, -1.0)[:, None] * q
    far, v = left_out(k), torch.where(k[..., :1] > 0, 1.0, -1.0).double()
    assert far.any()
    # The softmax is the oracle's own: what kernels round is not the window's.
    exact = oracles.attention(q, k, v, bias, 0.25)
    near = oracles.attention(q, k, v, bias.masked_fill(far, -torch.inf), 0.25)
    # At most eps / 8 of the weight is left out, and moves from one value to the other.
    moved = (near - exact)[..., 299, :].abs().max()
    assert moved <= torch.finfo(dtype).eps / 4 + 2.0**-50


def test_a_bound_the_data_breaks_costs_the_pruning_and_not_the_answer():
    """Per head: the norms of the others still confirm it."""
    q, k, v = qkv(200, 200)
    q[:, 1] *= 50
    slopes = alibi_slopes(HEADS, dtype=torch.float64, **STEEP)
    exact = oracles.attention(q, k, v, alibi_bias(slopes, 200, dtype=torch.float64), WIDTH**-0.5)
    out = alibi_attention(q, k, v, slopes, score_bound=10.0)
    assert (out - exact).abs().max() <= 1e-12


def test_a_bound_that_is_the_product_of_the_norms_is_confirmed():
    """As after a norm of q and k, where it is met with equality."""
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 2, 50, 64), dim=-1).mul(8).unbind()
    gap = pruning.confirmed_gap(q, k, 0.125, torch.tensor([[8.0, 7.9]]))
    assert torch.isfinite(gap[0, 0]).all()
    assert torch.isinf(gap[0, 1]).all()


def test_bound_scores_is_above_every_score():
    q, k, _ = qkv(100, 100, groups=2)
    scores = q @ k.repeat_interleave(2, 1).mT * WIDTH**-0.5
    bound = bound_scores(q, k)
    assert bound.shape == (2, HEADS)
    assert (scores.abs().amax((2, 3)) <= bound).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_key_does_not_silence_the_others(value):
    """Its norm is no bound, so nothing is left out, and what never sees it is as ever."""
    q, k, v = qkv(100, 100)
    wanted = alibi_attention(q, k, v, alibi_slopes(HEADS), document_ids=torch.arange(100) // 50)
    k[:, :, 99] = value
    got = alibi_attention(q, k, v, alibi_slopes(HEADS), document_ids=torch.arange(100) // 50)
    assert torch.equal(got[:, :, :50], wanted[:, :, :50])


def test_at_decode_no_norms_are_taken_of_keys_that_are_all_read(monkeypatch):
    q, k, v = torch.randn(1, 4, 1, 16), *torch.randn(2, 1, 2, 300, 16).unbind()
    wanted = alibi_attention(q, k, v, alibi_slopes(4), prune=False)
    monkeypatch.setattr(pruning, "norms", None)
    assert torch.equal(alibi_attention(q, k, v, alibi_slopes(4)), wanted)
    assert torch.equal(alibi_attention(q, k, v, alibi_slopes(4), score_bound=9.0), wanted)


@pytest.mark.parametrize("batch", [1, 3])
def test_keys_are_pruned_once_there_are_many(batch, monkeypatch):
    q, k, v = torch.randn(batch, 4, 1, 16), *torch.randn(2, batch, 2, 300, 16).unbind()
    wanted = alibi_attention(q, k, v, alibi_slopes(4))
    monkeypatch.setattr(chunked, "DENSE_KEYS", batch * 4 * 300 - 1)
    assert not chunked.is_dense(q, k)
    assert chunked.is_dense(q, k[:, :, 1:])
    torch.testing.assert_close(alibi_attention(q, k, v, alibi_slopes(4)), wanted)
