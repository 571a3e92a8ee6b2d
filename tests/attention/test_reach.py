import math

import pytest
import torch

from posenc.attention import alibi_attention, alibi_reach
from posenc.functional import alibi_slopes


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_keys_past_the_reach_weigh_less_than_the_rounding(causal):
    """Counted one by one, with the own key's score at -S and every other at S."""
    slopes, keys, bound = alibi_slopes(12), 5000, 4.0
    reach = alibi_reach(slopes, keys, score_bound=bound, dtype=torch.bfloat16, causal=causal)
    assert reach.dtype == torch.int64
    for slope, w in zip(slopes.tolist(), reach.tolist(), strict=True):
        lost = math.fsum(math.exp(2 * bound - slope * d) for d in range(w, keys))
        assert (1 if causal else 2) * lost <= torch.finfo(torch.bfloat16).eps / 8
        # A fifth less would leave too much out: it is no idle bound.
        near = math.fsum(math.exp(2 * bound - slope * d) for d in range(int(0.8 * w), keys))
        assert w == keys or near > torch.finfo(torch.bfloat16).eps / 8


def test_a_window_of_the_reach_is_the_whole_attention():
    """A sliding window of that many tokens, in an attention of the user's own."""
    slopes, generator = alibi_slopes(4), torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 600, 16, generator=generator).unbind()
    bound = float((q.norm(dim=-1).max() * k.norm(dim=-1).max()) / 4)
    reach = alibi_reach(slopes, 600, score_bound=bound, dtype=torch.float32)
    assert reach.min() < 600
    distance = torch.arange(600)[:, None] - torch.arange(600)
    seen = (distance >= 0) & (distance < reach[:, None, None])
    bias = (-slopes[:, None, None] * distance).masked_fill(~seen, -math.inf)
    windowed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
    whole = alibi_attention(q, k, v, slopes, prune=False)
    torch.testing.assert_close(windowed, whole, rtol=0, atol=1e-5)


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
