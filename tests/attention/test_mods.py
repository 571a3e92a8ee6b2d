import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

import oracles
from posenc import ALiBi
from posenc.attention import alibi_mask_mod, alibi_score_mod
from posenc.functional import alibi_bias, alibi_slopes

B, HEADS, QUERIES, KEYS = 2, 3, 8, 12
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [-1] * 3 + [2] * 9])


def scores_of(mod, heads=HEADS):
    """The mod at every place, on scores of zero."""
    places = torch.meshgrid(*map(torch.arange, (B, heads, QUERIES, KEYS)), indexing="ij")
    return mod(torch.zeros(B, heads, QUERIES, KEYS), *places)


PLACES = {
    "plain": {"offset": 4},
    "top": {"offset": 0},
    "tensor": {"offset": torch.tensor(4)},
    "offsets": {"offset": torch.tensor([0, 3])},
    "documents": {"offset": 4, "documents": DOCUMENTS},
    "positions": {"offset": 4, "position_ids": torch.arange(KEYS).mul(2).expand(B, -1)},
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_score_mod_is_the_bias(place, causal):
    slopes = alibi_slopes(HEADS)
    wanted = alibi_bias(slopes, QUERIES, KEYS, causal=causal, **place).expand(B, -1, -1, -1)
    assert torch.equal(scores_of(alibi_score_mod(slopes, causal=causal, **place)), wanted)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("place", ["plain", "offsets", "documents"])
def test_mask_mod_hides_what_the_bias_does(place, causal):
    bias = alibi_bias(alibi_slopes(1), QUERIES, KEYS, causal=causal, **PLACES[place])
    mod = alibi_mask_mod(causal=causal, **PLACES[place])
    mask = create_mask(mod, B, 1, QUERIES, KEYS, device="cpu")
    assert torch.equal(mask, (bias > float("-inf")).expand(B, 1, -1, -1))


def test_slopes_may_differ_by_sequence():
    slopes = torch.stack((alibi_slopes(HEADS), alibi_slopes(HEADS, plain=True)))
    wanted = alibi_bias(slopes, QUERIES, KEYS)
    assert torch.equal(scores_of(alibi_score_mod(slopes, offset=4)), wanted)


def test_a_rank_has_its_own_heads():
    alibi = ALiBi(8)
    slices = scores_of(alibi.score_mod(head_offset=5)), scores_of(alibi.heads(5, 8).score_mod())
    assert torch.equal(*slices)


def test_a_mod_of_ones_own_comes_first():
    def capped(score, b, h, q, k):
        return torch.tanh(score + 1)

    got = scores_of(ALiBi(HEADS).score_mod(offset=4, base=capped))
    wanted = torch.tanh(torch.ones(())) + ALiBi(HEADS).bias(QUERIES, KEYS)
    assert torch.equal(got, wanted.expand(B, -1, -1, -1))
    both = ALiBi(HEADS).mask_mod(offset=4, base=lambda b, h, q, k: k != 2)
    assert not create_mask(both, 1, 1, QUERIES, KEYS, device="cpu")[..., 2].any()


@pytest.mark.parametrize("masked", [True, False], ids=["alone", "with-a-block-mask"])
def test_flex_attention_takes_them(masked):
    alibi = ALiBi(HEADS)
    q, k, v = torch.randn(3, B, HEADS, 256, 16).unbind()
    mask = None if masked else alibi.block_mask(256, score_bound=99.0, dtype=torch.float32)
    flex = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    out = flex(q, k, v, alibi.score_mod(masked=masked), mask)
    exact = oracles.attention(q, k, v, alibi.get_bias(256), 0.25)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6)


def test_bad_arguments_are_named():
    slopes = alibi_slopes(2)
    with pytest.raises(ValueError, match="offset must be at least 0"):
        alibi_score_mod(slopes, offset=-1)
    with pytest.raises(ValueError, match=r"offset must have shape \(\) or \(B,\)"):
        alibi_mask_mod(offset=torch.zeros(2, 2).long())
    with pytest.raises(TypeError, match="documents must be an integer tensor"):
        alibi_mask_mod(documents=torch.zeros(4))
    with pytest.raises(ValueError, match="head_offset must be at least 0"):
        alibi_score_mod(slopes, head_offset=-1)


@pytest.mark.parametrize(
    ("offset", "error", "text"),
    [
        (torch.tensor(1.9), TypeError, "an integer tensor"),
        (torch.tensor([True, False]), TypeError, "an integer tensor"),
        (torch.tensor(2**32 + 2), ValueError, "at most"),
        (torch.tensor([0, 2**31]), ValueError, "at most"),
        (2**31, ValueError, "at most"),
        (torch.tensor(-3), ValueError, "at least 0"),
        (torch.tensor([4, -3]), ValueError, "at least 0"),
        (torch.zeros(1, 1).long(), ValueError, "shape"),
        ([0, 1], TypeError, "an integer tensor"),
        (None, TypeError, "an int"),
    ],
    ids=str,
)
def test_an_offset_is_whole_and_has_a_place(offset, error, text):
    """Cast to int32 unseen, 1.9 is 1, 2^32 + 2 is 2, and a query at -3 sees nothing."""
    for mod in (lambda: alibi_mask_mod(offset=offset), lambda: ALiBi(2).score_mod(offset=offset)):
        with pytest.raises(error, match=f"alibi_(mask|score)_mod: offset must .*{text}"):
            mod()


def test_an_offset_stays_among_the_keys_that_have_ids():
    """Past them, a query would read the documents of no key."""
    ids = torch.zeros(2, 4, dtype=torch.int64)
    alibi_mask_mod(offset=torch.tensor([3, 0]), documents=ids)
    for offset in (4, torch.tensor([0, 4])):
        with pytest.raises(ValueError, match="offset must be at most k_len - q_len = 3"):
            alibi_mask_mod(offset=offset, documents=ids)
        with pytest.raises(ValueError, match="offset must be at most k_len - q_len = 3"):
            alibi_score_mod(alibi_slopes(2), offset=offset, position_ids=ids)


def test_what_is_said_of_each_sequence_is_said_of_all():
    three = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="alibi_mask_mod: offset must be for 1 or 3 sequences"):
        alibi_mask_mod(offset=three[:2], documents=three.expand(3, 3))
    with pytest.raises(ValueError, match="alibi_score_mod: slopes must be for 1 or 3 sequences"):
        alibi_score_mod(torch.ones(2, 4), offset=three)


def test_mods_are_made_inside_a_compiled_function():
    """Values cannot be read there: an offset without a place is refused when the program runs."""

    @torch.compile(backend="eager", fullgraph=True)
    def seen(offset, q, k):
        sequence = q * 0
        return alibi_mask_mod(offset=offset, documents=q * 0)(sequence, sequence, q, k)

    place = torch.arange(3)
    assert seen(torch.tensor(1), torch.tensor([0, 0, 1]), place).tolist() == [True, True, True]
    with pytest.raises(RuntimeError, match="offset must be in"):
        seen(torch.tensor(-1), torch.tensor([0, 0, 1]), place)
