import math

import pytest
import torch

import oracles
from posenc.attention import alibi_attention, alibi_reach, bound_scores
from posenc.functional import alibi_bias, alibi_slopes
from posenc.ops.attention import chunked, pruning
from support.attention import HEADS, STEEP, WIDTH, call_of, qkv


def pruned(kind, values, causal=True):
    values = torch.atleast_2d(values) if kind == "slopes" else values
    return call_of(values, kind, start=0, scale=WIDTH**-0.5, causal=causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_pruned_keys_move_the_output_by_less_than_half_an_ulp(dtype):
    """The claim of the inequality, in float64 arithmetic with the windows of each dtype.

    The unit is the spacing at the largest value that is averaged.
    """
    q, k, v = qkv(400, 400)
    slopes = alibi_slopes(HEADS, dtype=torch.float64, **STEEP)
    # Windows of this dtype: taken from its inputs, used on exact arithmetic.
    cut = [x.to(dtype) for x in (q, k, v)]
    low, _ = pruning.needed_keys(cut[0], cut[1], pruned("slopes", slopes))
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
        low = pruning.needed_keys(q.to(dtype), k.to(dtype), pruned("slopes", slopes))[0]
        return key < low[0, 0, 299]

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


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("shape", ["falling", "wandering"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_keys_pruned_by_running_sums_have_no_weight(dtype, shape, causal):
    """Of the weights in float64, those left out sum to at most an eighth of the dtype's spacing."""
    q, k, _ = (x.to(dtype) for x in qkv(300, 300, groups=2))
    steps = torch.randn(2, HEADS, 300, dtype=torch.float64)
    sums = (-steps.abs() if shape == "falling" else 4 * steps).cumsum(-1)

    low, high = pruning.needed_keys(q, k, pruned("sums", sums, causal))

    index = torch.arange(300)
    left_out = (index < low[..., None]) | (index > high[..., None])
    hidden = (index > index[:, None]) if causal else torch.zeros(300, 300, dtype=torch.bool)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * WIDTH**-0.5
    scores = scores + sums[..., :, None] - sums[..., None, :]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    assert (left_out & ~hidden).float().mean() > 0.02
    assert weights.masked_fill(~left_out, 0).sum(-1).max() <= torch.finfo(dtype).eps / 8


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
    wanted = alibi_attention(
        q, k, v, alibi_slopes(HEADS), causal=True, document_ids=torch.arange(100) // 50
    )
    k[:, :, 99] = value
    got = alibi_attention(
        q, k, v, alibi_slopes(HEADS), causal=True, document_ids=torch.arange(100) // 50
    )
    assert torch.equal(got[:, :, :50], wanted[:, :, :50])


@pytest.mark.parametrize("batch", [1, 3])
def test_keys_are_pruned_once_there_are_many(batch, monkeypatch):
    q, k, v = torch.randn(batch, 4, 1, 16), *torch.randn(2, batch, 2, 300, 16).unbind()
    wanted = alibi_attention(q, k, v, alibi_slopes(4), causal=True)
    monkeypatch.setattr(chunked, "DENSE_KEYS", batch * 4 * 300 - 1)
    assert not chunked.is_dense(q, k)
    assert chunked.is_dense(q, k[:, :, 1:])
    torch.testing.assert_close(alibi_attention(q, k, v, alibi_slopes(4), causal=True), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_keys_past_the_reach_weigh_less_than_the_rounding(causal, dtype):
    """Counted one by one, with the own key's score at -S and every other at S."""
    slopes, keys, bound = torch.cat((alibi_slopes(12), torch.tensor([3.0, 1e-4]))), 5000, 4.0
    reach = alibi_reach(slopes, keys, score_bound=bound, dtype=dtype, causal=causal)
    assert reach.dtype == torch.int64
    for slope, w in zip(slopes.tolist(), reach.tolist(), strict=True):
        lost, near = (
            math.fsum(math.exp(2 * bound - slope * d) for d in range(first, keys))
            for first in (w, int(0.8 * w))
        )
        assert (1 if causal else 2) * lost <= torch.finfo(dtype).eps / 8
        # A fifth less would leave too much out: it is no idle bound.
        assert w == keys or near > torch.finfo(dtype).eps / 8


def test_sequences_may_have_slopes_and_bounds_of_their_own():
    slopes = alibi_slopes(4)
    one = alibi_reach(slopes, 9000, score_bound=2.0, dtype=torch.float16)
    two = alibi_reach(slopes, 9000, score_bound=6.0, dtype=torch.float16)
    bounds = torch.tensor([[2.0], [6.0]]).expand(2, 4)
    for given in (slopes, slopes.expand(2, 4)):
        both = alibi_reach(given, 9000, score_bound=bounds, dtype=torch.float16)
        assert torch.equal(both, torch.stack((one, two)))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"slopes": [0.5]}, TypeError, "slopes must be a torch.Tensor"),
        ({"k_len": 0}, ValueError, "k_len must be at least 1"),
        ({"score_bound": -1.0}, ValueError, "score_bound must not be negative"),
        ({"dtype": torch.int8}, TypeError, "dtype must be one of"),
    ],
    ids=["slopes", "k_len", "score_bound", "dtype"],
)
def test_bad_arguments_are_refused(given, error, text):
    usual = {"slopes": alibi_slopes(2), "k_len": 8, "score_bound": 1.0, "dtype": torch.float32}
    with pytest.raises(error, match=f"alibi_reach: {text}"):
        alibi_reach(**{**usual, **given})
