import pytest
import torch

import oracles
from posenc.functional import alibi_bias, alibi_slopes

HEADS = [1, 7, 8, 12, 20, 32, 40, 71, 112]


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_are_the_float64_ones_rounded(heads):
    slopes = alibi_slopes(heads)
    assert slopes.shape == (heads,)
    assert slopes.dtype == torch.float32
    assert torch.equal(slopes, alibi_slopes(heads, dtype=torch.float64).float())


def test_slopes_on_request():
    assert alibi_slopes(4, plain=True, dtype=torch.float64).tolist() == [
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


def test_one_query_is_the_last_row_of_many():
    slopes = alibi_slopes(8)
    assert torch.equal(alibi_bias(slopes, 1, 16), alibi_bias(slopes, 16)[:, -1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_rounded_once(dtype):
    slopes = alibi_slopes(12)
    wanted = oracles.alibi_bias(slopes.tolist(), 3, 300, causal=True).to(dtype)
    assert torch.equal(alibi_bias(slopes, 3, 300, dtype=dtype), wanted)


def test_no_zero_is_negative():
    for causal in (True, False):
        diagonal = alibi_bias(alibi_slopes(2), 4, causal=causal).diagonal(dim1=1, dim2=2)
        assert not diagonal.signbit().any()


def test_gradient_reaches_learned_slopes():
    slopes = torch.nn.Parameter(alibi_slopes(2))
    alibi_bias(slopes, 3, causal=False).sum().backward()
    assert slopes.grad.tolist() == [-8.0, -8.0]


@pytest.mark.parametrize("heads", [0, -3])
def test_heads_must_be_positive(heads):
    with pytest.raises(ValueError, match="alibi_slopes: num_heads must be at least 1"):
        alibi_slopes(heads)


def test_bad_arguments_are_named():
    slopes = alibi_slopes(2)
    with pytest.raises(TypeError, match="num_heads must be an int"):
        alibi_slopes(8.0)
    with pytest.raises(ValueError, match="bias_max must be finite and above zero"):
        alibi_slopes(8, bias_max=0)
    with pytest.raises(TypeError, match="q_len must be an int"):
        alibi_bias(slopes, True)
    with pytest.raises(ValueError, match="k_len must be at least q_len=4, got 3"):
        alibi_bias(slopes, 4, 3)
    with pytest.raises(ValueError, match=r"slopes must have shape \(H,\) or \(B, H\)"):
        alibi_bias(slopes[None, None], 4)
    with pytest.raises(TypeError, match=r"slopes must be a torch.Tensor"):
        alibi_bias(8, 4)
    with pytest.raises(TypeError, match="dtype must be one of"):
        alibi_bias(slopes, 4, dtype=torch.int32)
