"""ALiBi's slopes and biases; those of published models."""

import pytest
import torch

import oracles
from posenc.functional import alibi_bias, alibi_model_slopes, alibi_slopes

HEADS = [1, 7, 8, 12, 20, 32, 40, 71, 112]


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_are_the_float64_ones_rounded(heads):
    slopes = alibi_slopes(heads)
    assert slopes.shape == (heads,)
    assert slopes.dtype == torch.float32
    assert torch.equal(slopes, alibi_slopes(heads, dtype=torch.float64).float())


def test_slopes_may_be_geometric_or_of_another_exponent():
    assert alibi_slopes(4, geometric=True, dtype=torch.float64).tolist() == [
        2**-2,
        2**-4,
        2**-6,
        2**-8,
    ]
    assert alibi_slopes(2, bias_max=4.0).tolist() == [2**-2, 2**-4]
    assert alibi_slopes(2, device="meta").is_meta


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (5, 5), (1, 9), (4, 9), (0, 0), (0, 3)], ids=str
)
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_bias_matches_the_closed_form(heads, queries, keys, causal):
    slopes = alibi_slopes(heads, dtype=torch.float64)
    got = alibi_bias(slopes, queries, keys, causal=causal, dtype=torch.float64)
    wanted = oracles.alibi_bias(slopes.tolist(), queries, keys, causal=causal)
    assert torch.equal(got, wanted)


def test_a_bias_in_half_precision_is_rounded_once():
    """By way of float32, head 32 of 40 is wrong at distance 247, whichever way it is made."""
    slopes, keys = alibi_slopes(40), 248
    exact = -247 * slopes[32].double().item()
    wanted = oracles.rounded(exact, torch.bfloat16)
    assert wanted != oracles.rounded(float(torch.tensor(exact)), torch.bfloat16)
    half = {"dtype": torch.bfloat16}
    made = [
        alibi_bias(slopes, 1, keys, **half),
        alibi_bias(slopes, 1, keys, position_ids=torch.arange(keys), **half),
    ]
    assert [bias[32, 0, 0].item() for bias in made] == [wanted] * 2


def test_no_zero_is_negative():
    for causal in (True, False):
        diagonal = alibi_bias(alibi_slopes(2), 4, causal=causal).diagonal(dim1=1, dim2=2)
        assert not diagonal.signbit().any()


def test_gradient_reaches_learned_slopes():
    slopes = torch.nn.Parameter(alibi_slopes(2))
    alibi_bias(slopes, 3, causal=False).sum().backward()
    assert slopes.grad.tolist() == [-8.0, -8.0]


def test_under_a_causal_mask_one_row_serves_every_query():
    """It lacks a constant of each row, which the softmax cancels."""
    slopes, scores = alibi_slopes(7, dtype=torch.float64), torch.randn(7, 12, 40).double()
    future = torch.ones(12, 40, dtype=torch.bool).triu(29)
    wanted, got = (
        scores + alibi_bias(slopes, rows, 40, dtype=torch.float64).masked_fill(future, -torch.inf)
        for rows in (12, 1)
    )
    torch.testing.assert_close(got.softmax(-1), wanted.softmax(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("offset", [0, 3, torch.tensor(3)], ids=str)
def test_an_offset_picks_rows_of_the_square(offset, causal):
    slopes = alibi_slopes(3)
    square = alibi_bias(slopes, 9, causal=causal)
    got = alibi_bias(slopes, 4, 9, query_offset=offset, causal=causal)
    assert torch.equal(got, square[:, int(offset) : int(offset) + 4])


def test_sequences_may_have_offsets_and_slopes_of_their_own():
    slopes = torch.stack((alibi_slopes(3), alibi_slopes(3, geometric=True)))
    got = alibi_bias(slopes, 2, 6, query_offset=torch.tensor([1, 4]))
    assert got.shape == (2, 3, 2, 6)
    for b, start in enumerate((1, 4)):
        assert torch.equal(got[b], alibi_bias(slopes[b], 2, 6, query_offset=start))


def test_left_padding_leaves_a_sequence_as_it_is_alone():
    """Positions begin at its first token; nothing before that is seen."""
    slopes, mask = alibi_slopes(3), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    bias = alibi_bias(slopes, 5, position_ids=positions, document_ids=mask)
    assert torch.equal(bias[0, :, 2:, 2:], alibi_bias(slopes, 3))
    assert bias[0, :, 2:, :2].eq(float("-inf")).all()
    assert torch.equal(bias[1], alibi_bias(slopes, 5))


def test_packed_documents_do_not_see_each_other():
    slopes, ids = alibi_slopes(3), torch.tensor([0, 0, 0, 1, 1])
    bias = alibi_bias(slopes, 5, document_ids=ids, causal=False)
    assert torch.equal(bias[:, :3, :3], alibi_bias(slopes, 3, causal=False))
    assert torch.equal(bias[:, 3:, 3:], alibi_bias(slopes, 2, causal=False))
    assert bias[:, :3, 3:].eq(float("-inf")).all()
    assert bias[:, 3:, :3].eq(float("-inf")).all()


def test_arguments_of_different_batches_are_refused():
    slopes, ids = torch.ones(2, 2), torch.zeros(3, 5, dtype=torch.int64)
    for call in (
        lambda: alibi_bias(slopes, 2, 5, document_ids=ids),
        lambda: alibi_bias(
            torch.ones(2), 2, 5, query_offset=torch.tensor([1, 2]), position_ids=ids
        ),
    ):
        with pytest.raises(ValueError, match="must be for 1 or 3 sequences"):
            call()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: alibi_slopes(8.0), TypeError, "num_heads must be an int"),
        (lambda m: alibi_slopes(0), ValueError, "alibi_slopes: num_heads must be at least 1"),
        (lambda m: alibi_slopes(8, bias_max=0), ValueError, "bias_max must be finite and above"),
        (lambda m: alibi_bias(m, True), TypeError, "q_len must be an int"),
        (lambda m: alibi_bias(m, 4, 3), ValueError, "k_len must be at least q_len=4, got 3"),
        (lambda m: alibi_bias(m[None, None], 4), ValueError, r"slopes must have shape \(H,\) or"),
        (lambda m: alibi_bias(8, 4), TypeError, "slopes must be a torch.Tensor"),
        (lambda m: alibi_bias(m, 4, dtype=torch.int32), TypeError, "dtype must be one of"),
        (
            lambda m: alibi_bias(m, 3, 5, document_ids=torch.zeros(3).long()),
            ValueError,
            r"document_ids must have shape \(5,\) or \(B, 5\)",
        ),
        (
            lambda m: alibi_bias(m, 5, position_ids=torch.zeros(5)),
            TypeError,
            "position_ids must be an integer tensor",
        ),
        (lambda m: alibi_model_slopes("gpt", 8), ValueError, "model must be 'bloom' or 'falcon'"),
        (lambda m: alibi_model_slopes("falcon", 8), ValueError, "head_dim must be given for fal"),
    ],
)
def test_bad_arguments_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call(alibi_slopes(2))
