import pytest
import torch

from posenc.functional import alibi_model_bias, alibi_model_slopes, alibi_slopes

HEADS = [1, 7, 8, 12, 20, 32, 40, 71, 112]
MASK = torch.tensor([[1] * 300, [0] * 40 + [1] * 260])
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("heads", HEADS)
def test_bloom_is_its_own_function(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(MASK, heads, torch.float32).reshape(2, heads, 1, 300)
    torch.testing.assert_close(alibi_model_bias("bloom", heads, MASK), theirs, rtol=2e-6, atol=0)


@pytest.mark.parametrize("bias_max", [8.0, 4.0])
@pytest.mark.parametrize("heads", HEADS)
def test_mpt_is_its_own_function(heads, bias_max):
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    theirs = build_mpt_alibi_tensor(heads, 300, alibi_bias_max=bias_max)
    ours = alibi_model_bias("mpt", heads, MASK[:1], bias_max=bias_max)[0]
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads", HEADS)
def test_falcon_is_its_own_function_before_the_scale(heads, dtype):
    """To the last bit: its roundings to bfloat16 are part of what it was trained with."""
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    theirs = build_alibi_tensor(MASK, heads, dtype).reshape(2, heads, 1, 300) / 64**0.5
    assert torch.equal(alibi_model_bias("falcon", heads, MASK, head_dim=64, dtype=dtype), theirs)


@pytest.mark.parametrize("model", ["bloom", "mpt", "falcon"])
@pytest.mark.parametrize("heads", HEADS)
def test_slopes_are_what_the_bias_rises_by(model, heads):
    """Over the first keys, which no rounding of a position touches."""
    bias = alibi_model_bias(model, heads, MASK[:1, :64], head_dim=64)[0, :, 0].double()
    rise = (bias[:, 32] - bias[:, 0]) / 32
    wanted = alibi_model_slopes(model, heads, head_dim=64)
    torch.testing.assert_close(rise, wanted, rtol=2**-8 if model == "falcon" else 1e-6, atol=0)


def test_falcon_differs_from_the_paper_by_its_scale():
    ratio = alibi_slopes(8, dtype=torch.float64) / alibi_model_slopes("falcon", 8, head_dim=64)
    assert ratio.tolist() == [8.0] * 8


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="model must be 'bloom' or 'falcon' or 'mpt'"):
        alibi_model_bias("gpt", 8, MASK)
    with pytest.raises(ValueError, match="head_dim must be given for falcon"):
        alibi_model_slopes("falcon", 8)
    with pytest.raises(ValueError, match=r"attention_mask must be a \(B, K\) tensor"):
        alibi_model_bias("bloom", 8, MASK[0])
    with pytest.raises(TypeError, match="dtype must be one of"):
        alibi_model_bias("bloom", 8, MASK, dtype=torch.int32)
