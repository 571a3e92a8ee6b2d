import pytest
import torch

from posenc.functional import alibi_model_slopes, alibi_slopes

HEADS = [1, 7, 8, 12, 20, 32, 40, 71, 112]
# Over the first keys, which no rounding of a position touches.
MASK = torch.ones(1, 64, dtype=torch.long)
transformers = pytest.importorskip("transformers")


def rise(bias, heads):
    """What the bias of a model rises by from key to key."""
    bias = bias.reshape(heads, 64).double()
    return (bias[:, 32] - bias[:, 0]) / 32


@pytest.mark.parametrize("heads", HEADS)
def test_bloom_is_its_own_function(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = rise(build_alibi_tensor(MASK, heads, torch.float32), heads)
    torch.testing.assert_close(alibi_model_slopes("bloom", heads), theirs, rtol=2e-6, atol=0)


@pytest.mark.parametrize("bias_max", [8.0, 4.0])
@pytest.mark.parametrize("heads", HEADS)
def test_mpt_is_its_own_function(heads, bias_max):
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    theirs = rise(build_mpt_alibi_tensor(heads, 64, alibi_bias_max=bias_max), heads)
    ours = alibi_model_slopes("mpt", heads, bias_max=bias_max)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)


@pytest.mark.parametrize("heads", HEADS)
def test_falcon_is_its_own_function_before_the_scale(heads):
    """Its products are bfloat16, and 32 times a slope of bfloat16 is exact."""
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    theirs = rise(build_alibi_tensor(MASK, heads, torch.float32), heads) / 64**0.5
    assert torch.equal(alibi_model_slopes("falcon", heads, head_dim=64), theirs)


def test_falcon_differs_from_the_paper_by_its_scale():
    ratio = alibi_slopes(8, dtype=torch.float64) / alibi_model_slopes("falcon", 8, head_dim=64)
    assert ratio.tolist() == [8.0] * 8


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="model must be 'bloom' or 'falcon' or 'mpt'"):
        alibi_model_slopes("gpt", 8)
    with pytest.raises(ValueError, match="head_dim must be given for falcon"):
        alibi_model_slopes("falcon", 8)
