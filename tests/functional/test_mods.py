import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

import oracles
from posenc import ALiBi
from posenc.attention import alibi_block_mask, alibi_mask_mod, alibi_score_mod
from posenc.functional import alibi_bias, alibi_slopes

B, HEADS, QUERIES, KEYS = 2, 3, 8, 12
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [-1] * 3 + [2] * 9])


def scores_of(mod, heads=HEADS):
    """The mod at every place, on scores of zero."""
    places = torch.meshgrid(*map(torch.arange, (B, heads, QUERIES, KEYS)), indexing="ij")
    return mod(torch.zeros(B, heads, QUERIES, KEYS), *places)


PLACES = {
    "aligned": {},
    "top": {"query_offset": 0},
    "tensor": {"query_offset": torch.tensor(2)},
    "offsets": {"query_offset": torch.tensor([0, 3])},
    "documents": {"document_ids": DOCUMENTS},
    "positions": {"position_ids": torch.arange(KEYS).mul(2).expand(B, -1)},
}


def test_without_k_len_there_are_as_many_keys_as_queries():
    """As in `alibi_block_mask` and `relative_bias`."""
    slopes, at = alibi_slopes(HEADS), torch.zeros((), dtype=torch.int64)
    later = torch.arange(4)
    ids = {"position_ids": later}
    got, wanted = (alibi_score_mod(slopes, *n, **ids) for n in ((4,), (4, 4)))
    score = torch.zeros(())
    assert torch.equal(got(score, at, at, at, later), wanted(score, at, at, at, later))
    assert alibi_mask_mod(4)(at, at, at, later).tolist() == [True, False, False, False]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_score_mod_is_the_bias(place, causal):
    slopes = alibi_slopes(HEADS)
    wanted = alibi_bias(slopes, QUERIES, KEYS, causal=causal, **place).expand(B, -1, -1, -1)
    assert torch.equal(
        scores_of(alibi_score_mod(slopes, QUERIES, KEYS, causal=causal, **place)), wanted
    )


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("place", ["aligned", "offsets", "documents"])
def test_mask_mod_hides_what_the_bias_does(place, causal):
    bias = alibi_bias(alibi_slopes(1), QUERIES, KEYS, causal=causal, **PLACES[place])
    mod = alibi_mask_mod(QUERIES, KEYS, causal=causal, **PLACES[place])
    mask = create_mask(mod, B, 1, QUERIES, KEYS, device="cpu")
    assert torch.equal(mask, (bias > float("-inf")).expand(B, 1, -1, -1))


def test_slopes_may_differ_by_sequence():
    slopes = torch.stack((alibi_slopes(HEADS), alibi_slopes(HEADS, geometric=True)))
    wanted = alibi_bias(slopes, QUERIES, KEYS)
    assert torch.equal(scores_of(alibi_score_mod(slopes, QUERIES, KEYS)), wanted)


def test_a_rank_has_its_own_heads():
    alibi = ALiBi(8)
    offset = scores_of(alibi_score_mod(alibi.slopes, QUERIES, KEYS, head_offset=5))
    part = scores_of(alibi.select_heads(5, 8).score_mod(QUERIES, KEYS))
    assert torch.equal(offset, part)


def test_a_score_mod_of_the_user_comes_first():
    def capped(score, b, h, q, k):
        return torch.tanh(score + 1)

    got = scores_of(ALiBi(HEADS).score_mod(QUERIES, KEYS, base=capped))
    wanted = torch.tanh(torch.ones(())) + ALiBi(HEADS).bias(QUERIES, KEYS)
    assert torch.equal(got, wanted.expand(B, -1, -1, -1))
    both = alibi_mask_mod(QUERIES, KEYS, base=lambda b, h, q, k: k != 2)
    assert not create_mask(both, 1, 1, QUERIES, KEYS, device="cpu")[..., 2].any()


@pytest.mark.parametrize("masked", [True, False], ids=["alone", "with-a-block-mask"])
def test_flex_attention_takes_them(masked):
    alibi = ALiBi(HEADS)
    q, k, v = torch.randn(3, B, HEADS, 256, 16).unbind()
    bound = {"score_bound": 99.0, "dtype": torch.float32}
    mask = None if masked else alibi_block_mask(alibi.slopes, 256, **bound)
    flex = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    out = flex(q, k, v, alibi.score_mod(256, 256, masked=masked), mask)
    exact = oracles.attention(q, k, v, alibi.get_bias(256), 0.25)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6)


def test_bad_arguments_are_named():
    slopes = alibi_slopes(2)
    with pytest.raises(ValueError, match="query_offset must be at least 0"):
        alibi_score_mod(slopes, 1, 4, query_offset=-1)
    with pytest.raises(ValueError, match="k_len must be at least q_len=4, got 3"):
        alibi_score_mod(slopes, 4, 3)
    with pytest.raises(ValueError, match=r"query_offset must have shape \(\) or \(B,\)"):
        alibi_mask_mod(1, 4, query_offset=torch.zeros(2, 2).long())
    with pytest.raises(TypeError, match="document_ids must be an integer tensor"):
        alibi_mask_mod(1, 4, document_ids=torch.zeros(4))
    with pytest.raises(ValueError, match=r"position_ids must have shape \(4,\) or \(B, 4\)"):
        alibi_score_mod(slopes, 1, 4, position_ids=torch.zeros(3).long())
    with pytest.raises(ValueError, match="head_offset must be at least 0"):
        alibi_score_mod(slopes, 1, 4, head_offset=-1)
    with pytest.raises(ValueError, match="head_offset must be below the 2 heads"):
        alibi_score_mod(slopes, 3, 3, head_offset=2)


@pytest.mark.parametrize(
    ("offset", "error", "text"),
    [
        (torch.tensor(1.9), TypeError, "an integer tensor"),
        (torch.tensor([True, False]), TypeError, "an integer tensor"),
        (torch.tensor(2**32 + 2), ValueError, "at most"),
        (torch.tensor([0, 2**31]), ValueError, "at most"),
        (4, ValueError, "at most k_len - q_len = 3"),
        (torch.tensor([0, 4]), ValueError, "at most k_len - q_len = 3"),
        (torch.tensor(-3), ValueError, "at least 0"),
        (torch.tensor([3, -3]), ValueError, "at least 0"),
        (torch.zeros(1, 1).long(), ValueError, "shape"),
        ([0, 1], TypeError, "an integer tensor"),
        ("1", TypeError, "an int"),
    ],
    ids=str,
)
def test_an_offset_is_whole_and_has_a_key(offset, error, text):
    """Cast to int32 unseen, 1.9 is 1, 2^32 + 2 is 2, and a query at -3 sees nothing."""
    for mod in (alibi_mask_mod, ALiBi(2).score_mod):
        with pytest.raises(error, match=f"(mask|score)_mod: query_offset must .*{text}"):
            mod(1, 4, query_offset=offset)


def test_arguments_of_different_batches_are_refused():
    three = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="alibi_mask_mod: query_offset must be for 1 or 3 seq"):
        alibi_mask_mod(1, 3, query_offset=three[:2], document_ids=three.expand(3, 3))
    with pytest.raises(ValueError, match="alibi_score_mod: slopes must be for 1 or 3 sequences"):
        alibi_score_mod(torch.ones(2, 4), 1, 1, query_offset=three)


def test_mods_are_made_inside_a_compiled_function():
    """Values cannot be read there: an offset without a key is refused when the program runs."""

    @torch.compile(backend="eager", fullgraph=True)
    def seen(offset, q, k):
        sequence = q * 0
        mod = alibi_mask_mod(1, 3, query_offset=offset, document_ids=q * 0)
        return mod(sequence, sequence, q, k)

    index = torch.arange(3)
    assert seen(torch.tensor(1), torch.tensor([0, 0, 1]), index).tolist() == [True, True, True]
    with pytest.raises(RuntimeError, match="query_offset must be in"):
        seen(torch.tensor(-1), torch.tensor([0, 0, 1]), index)


def listed(counts, indices, columns):
    """How often each block is in the lists, ``[B, H, rows, columns]``."""
    found = torch.zeros(*counts.shape, columns, dtype=torch.int)
    for place in itertools.product(*map(range, counts.shape)):
        for column in indices[place][: counts[place]].tolist():
            found[(*place, column)] += 1
    return found


def tiles(x, block, outside):
    """``[..., Q, K]`` cut into blocks ``[..., rows, columns, block * block]``."""
    pad = (0, -x.shape[-1] % block, 0, -x.shape[-2] % block)
    x = torch.nn.functional.pad(x.int(), pad, value=outside).bool()
    x = x.unflatten(-1, (-1, block)).unflatten(-3, (-1, block)).transpose(-3, -2)
    return x.flatten(-2)


@pytest.mark.parametrize(
    ("place", "bound"), [("aligned", 0.5), ("documents", 4.0), ("offsets", float("inf"))]
)
@pytest.mark.parametrize(("queries", "keys"), [(96, 96), (70, 70), (3, 90), (30, 100)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_the_lists_hold_what_is_needed_once_and_mask_what_must_be(
    causal, queries, keys, place, bound
):
    """Against the matrix, which the mask itself never makes."""
    block, slopes, options = 16, alibi_slopes(4, bias_max=3.0), {}
    if place == "documents":
        options["document_ids"] = torch.stack(
            [torch.rand(keys).lt(0.05).cumsum(0), torch.arange(keys) // 40]
        )
    if place == "offsets":
        options["query_offset"] = torch.tensor([0, (keys - queries) // 2])

    mask = alibi_block_mask(
        slopes, queries, keys, score_bound=bound, dtype=torch.bfloat16, causal=causal,
        block=block, **options,
    )  # fmt: skip

    bias = alibi_bias(slopes, queries, keys, causal=causal, dtype=torch.float64, **options)
    bias = bias if bias.dim() == 4 else bias[None]
    seen = bias > float("-inf")
    # A weight of this much or more of the own key's, with scores as unlike as the bound allows.
    counted = (2 * bound + bias).exp() > torch.finfo(torch.bfloat16).eps
    rows, columns = -(-queries // block), -(-keys // block)
    partial = listed(mask.kv_num_blocks, mask.kv_indices, columns)
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices, columns)
    visited = partial + full
    assert visited.max() == 1
    assert visited.bool()[tiles(seen & counted, block, 0).any(-1)].all()
    # Queries past the last do not count, keys past the last do.
    unseen = torch.nn.functional.pad(~seen, (0, 0, 0, -queries % block), value=False)
    assert not full[tiles(unseen, block, 1).any(-1)].any()
    back = listed(mask.q_num_blocks, mask.q_indices, rows).mT
    full_back = listed(mask.full_q_num_blocks, mask.full_q_indices, rows).mT
    assert torch.equal(back, partial)
    assert torch.equal(full_back, full)


def test_windows_leave_blocks_out():
    slopes = alibi_slopes(8)
    counts = [
        int(alibi_block_mask(slopes, 4096, score_bound=s, dtype=torch.bfloat16).to_dense().sum())
        for s in (1.0, 8.0, float("inf"))
    ]
    assert counts[0] < counts[1] < counts[2] == 8 * 32 * 33 // 2


def test_bad_arguments_of_a_block_mask_are_named():
    slopes = alibi_slopes(2)
    options = {"dtype": torch.bfloat16}
    for bound in (-1.0, float("nan"), torch.tensor([1.0, -1.0])):
        with pytest.raises(ValueError, match="score_bound must not be negative or NaN"):
            alibi_block_mask(slopes, 4, score_bound=bound, **options)
    with pytest.raises(TypeError, match="score_bound must be a number or a tensor"):
        alibi_block_mask(slopes, 4, score_bound="8", **options)
    with pytest.raises(ValueError, match="k_len must be at least q_len=4, got 3"):
        alibi_block_mask(slopes, 4, 3, score_bound=1.0, **options)
    with pytest.raises(ValueError, match="q_len must be at least 1"):
        alibi_block_mask(slopes, 0, score_bound=1.0, **options)
    with pytest.raises(TypeError, match="dtype must be one of"):
        alibi_block_mask(slopes, 4, score_bound=1.0, dtype=torch.int8)
