"""The bias of a window is Swin's, BEiT's and Swin v2's."""

import math

import pytest
import torch

from posenc import GridBias
from support.biases import assert_is_formula, drawn


def cell(token, width):
    return token // width, token % width


@pytest.mark.parametrize("token", [False, True], ids=["cells", "class-token"])
def test_attention_is_the_formula(token):
    height, width = 2, 3
    cells = (2 * height - 1) * (2 * width - 1)

    def formula(given, h, i, j):
        table = given["relative_position_bias_table"]
        if token and not (i and j):
            return table[cells + (2 if i == j else 0 if i == 0 else 1), h]
        (a, b), (c, d) = cell(i - token, width), cell(j - token, width)
        return table[(a - c + height - 1) * (2 * width - 1) + b - d + width - 1, h]

    bias = drawn(GridBias, (height, width), 4, class_token=token)
    assert_is_formula(bias, formula, queries=6 + token, keys=6 + token, kv_heads=2)


def test_continuous_attention_is_the_formula():
    def spaced(steps, side):
        return math.copysign(math.log2(8 * abs(steps) / (side - 1) + 1) / 3, steps)

    def formula(given, h, i, j):
        (a, b), (c, d) = cell(i, 3), cell(j, 3)
        x = torch.tensor([spaced(a - c, 4), spaced(b - d, 5)], dtype=torch.float64)
        first, last = (given[f"continuous_position_bias_mlp.{n}.weight"] for n in (0, 2))
        hidden = torch.relu(first @ x + given["continuous_position_bias_mlp.0.bias"])
        return 16 * torch.sigmoid(last[h] @ hidden)

    bias = drawn(GridBias, (2, 3), 4, continuous=True, hidden=5, pretrained_size=(4, 5))
    assert_is_formula(bias, formula, queries=6, keys=6)


def test_swin_is_reproduced():
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.swin.modeling_swin")
    config = transformers.SwinConfig(attention_probs_dropout_prob=0.0)
    name = "SwinSelfAttention" if hasattr(modeling, "SwinSelfAttention") else "SwinAttention"
    layer = getattr(modeling, name)(config, 32, 4, 4).eval()
    bias = drawn(GridBias, 4, 4)
    holder = next(m for m in layer.modules() if hasattr(m, "relative_position_bias_table"))
    holder.load_state_dict(bias.state_dict(), strict=False)
    table, index = holder.relative_position_bias_table, holder.relative_position_index
    theirs = table[index.view(-1)].view(16, 16, 4).permute(2, 0, 1)
    assert torch.equal(bias.bias(), theirs)


def test_beit_is_reproduced():
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.beit.modeling_beit")
    config = transformers.BeitConfig(image_size=64, patch_size=16, num_attention_heads=4)
    theirs = modeling.BeitRelativePositionBias(config)
    bias = drawn(GridBias, 4, 4, class_token=True)
    theirs.load_state_dict(bias.state_dict(), strict=False)
    assert torch.equal(bias.bias(), theirs((4, 4))[0])
    larger = bias.resize((6, 5), mode="bilinear")
    torch.testing.assert_close(larger.bias(), theirs((6, 5))[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pretrained", [0, 5], ids=["as-trained", "resized"])
def test_swin_v2_is_reproduced(pretrained):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.swinv2.modeling_swinv2")
    config = transformers.Swinv2Config(attention_probs_dropout_prob=0.0)
    theirs = modeling.Swinv2SelfAttention(config, 32, 4, (4, 4), (pretrained, pretrained)).eval()
    bias = drawn(GridBias, pretrained or 4, 4, continuous=True)
    bias = bias.resize(4) if pretrained else bias
    theirs.load_state_dict(bias.state_dict(), strict=False)
    table = theirs.continuous_position_bias_mlp(theirs.relative_coords_table).view(-1, 4)
    wanted = 16 * table[theirs.relative_position_index.view(-1)].view(16, 16, 4).sigmoid()
    torch.testing.assert_close(bias.bias(), wanted.permute(2, 0, 1), rtol=1e-4, atol=1e-5)


def test_resizing_keeps_what_it_can():
    bias = drawn(GridBias, (3, 4), 2, class_token=True)
    same, larger = bias.resize((3, 4)), bias.resize((6, 7))
    torch.testing.assert_close(same.bias(), bias.bias(), rtol=0, atol=1e-6)
    assert (larger.size, larger.tokens) == ((6, 7), 43)
    table = larger.relative_position_bias_table
    assert torch.equal(table[-3:], bias.relative_position_bias_table[-3:])
    flat = GridBias(3, 2)
    torch.nn.init.constant_(flat.relative_position_bias_table, 0.75)
    torch.testing.assert_close(flat.resize(5).bias(), torch.full((2, 25, 25), 0.75))


def test_the_score_mod_is_the_bias():
    bias = drawn(GridBias, (2, 3), 4)
    b, h, q, k = torch.zeros((), dtype=torch.int64), *map(torch.arange, (4, 6, 6))
    got = bias.score_mod(6, 6)(torch.ones(()), b, h[:, None, None], q[:, None], k)
    assert torch.equal(got, bias.bias() + 1)


def test_windows_that_do_not_fit_are_refused():
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    with pytest.raises(ValueError, match=r"GridBias: k_len must be 9, got 8.\n  Call resize"):
        GridBias(3, 2).attention(q, k, v)
    with pytest.raises(ValueError, match="GridBias: size must be one side, or rows and columns"):
        GridBias((2, 3, 4), 2)
    with pytest.raises(ValueError, match="GridBias: a continuous bias must have no class token"):
        GridBias(3, 2, class_token=True, continuous=True)
