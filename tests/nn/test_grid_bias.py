"""The bias of a window is Swin's, BEiT's and Swin v2's."""

import math

import numpy as np
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

    bias = drawn(GridBias, (height, width), num_heads=4, prefix=int(token))
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

    bias = drawn(GridBias, (2, 3), num_heads=4, continuous=True, hidden=5, pretrained_size=(4, 5))
    assert_is_formula(bias, formula, queries=6, keys=6)


def test_swin_is_reproduced():
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.swin.modeling_swin")
    config = transformers.SwinConfig(attention_probs_dropout_prob=0.0)
    name = "SwinSelfAttention" if hasattr(modeling, "SwinSelfAttention") else "SwinAttention"
    layer = getattr(modeling, name)(config, 32, 4, 4).eval()
    bias = drawn(GridBias, 4, num_heads=4)
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
    bias = drawn(GridBias, 4, num_heads=4, prefix=1)
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
    bias = drawn(GridBias, pretrained or 4, num_heads=4, continuous=True)
    bias = bias.resize(4) if pretrained else bias
    theirs.load_state_dict(bias.state_dict(), strict=False)
    table = theirs.continuous_position_bias_mlp(theirs.relative_coords_table).view(-1, 4)
    wanted = 16 * table[theirs.relative_position_index.view(-1)].view(16, 16, 4).sigmoid()
    torch.testing.assert_close(bias.bias(), wanted.permute(2, 0, 1), rtol=1e-4, atol=1e-5)


def test_resizing_keeps_what_it_can():
    bias = drawn(GridBias, (3, 4), num_heads=2, prefix=1)
    same, larger = bias.resize((3, 4)), bias.resize((6, 7))
    torch.testing.assert_close(same.bias(), bias.bias(), rtol=0, atol=1e-6)
    assert (larger.size, larger.tokens) == ((6, 7), 43)
    table = larger.relative_position_bias_table
    assert torch.equal(table[-3:], bias.relative_position_bias_table[-3:])
    flat = GridBias(3, num_heads=2)
    torch.nn.init.constant_(flat.relative_position_bias_table, 0.75)
    torch.testing.assert_close(flat.resize(5).bias(), torch.full((2, 25, 25), 0.75))


def geometric_oracle(grid, old, new):
    """Side by side, with the ratio as a root: its powers add up to the farthest new distance."""
    for before, after in zip(old, new, strict=True):
        powers = np.ones(before - 1)
        powers[-1] -= after - 1
        roots = np.roots(powers)
        ratio = np.clip(max([1.0, *roots[abs(roots.imag) < 1e-9].real]), 1.01, 1.5)
        reach = np.cumsum(ratio ** np.arange(before - 1))
        known = np.concatenate((-reach[::-1], [0.0], reach))
        wanted = np.arange(1 - after, after)
        # The columns are rows then, and the second side comes next.
        grid = np.stack([np.interp(wanted, known, line) for line in grid.T])
    return grid


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param((7, 7), (12, 12), id="swin-224-to-384"),
        pytest.param((14, 14), (24, 24), id="beit-224-to-384"),
        pytest.param((4, 3), (6, 5), id="not-square"),
        pytest.param((8, 6), (5, 9), id="one-side-smaller"),
        pytest.param((3, 3), (12, 12), id="farther-than-the-ratio-reaches"),
        pytest.param((2, 4), (3, 4), id="one-side-as-before"),
    ],
)
@pytest.mark.parametrize("token", [False, True], ids=["cells", "class-token"])
def test_geometric_resizing_is_linear_between_growing_distances(old, new, token):
    """timm's loaders resize so; the table of the result is rounded once to float32."""
    bias = drawn(GridBias, old, num_heads=3, prefix=int(token))
    larger = bias.resize(new, mode="geometric")
    table = bias.relative_position_bias_table.detach()
    cells = (2 * old[0] - 1) * (2 * old[1] - 1)
    got = larger.relative_position_bias_table.detach()
    for head in range(3):
        grid = table[:cells, head].double().view(2 * old[0] - 1, -1).numpy()
        wanted = torch.from_numpy(geometric_oracle(grid, old, new)).flatten()
        # The root of a polynomial of degree 12 is exact to some 1e-12.
        torch.testing.assert_close(
            got[: len(wanted), head].double(), wanted, rtol=2**-24, atol=1e-9
        )
    assert torch.equal(got[len(wanted) :], table[cells:])
    assert len(got) == len(wanted) + 3 * token


def test_geometric_resizing_keeps_near_numbers_and_the_farthest():
    bias = drawn(GridBias, (7, 1), num_heads=2)
    table = bias.relative_position_bias_table
    larger = bias.resize((12, 1), mode="geometric").relative_position_bias_table
    assert torch.equal(larger[[0, 10, 11, 12, 22]], table[[0, 5, 6, 7, 12]])
    assert torch.equal(bias.resize((7, 1), mode="geometric").relative_position_bias_table, table)
    one = bias.resize((7, 4), mode="geometric").relative_position_bias_table
    assert torch.equal(one.view(13, 7, 2)[:, 0], one.view(13, 7, 2)[:, -1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_resized_module_has_the_dtype_of_the_old_one(dtype):
    assert GridBias(4, num_heads=2).to(dtype).resize(6).relative_position_bias_table.dtype == dtype


def test_an_unknown_way_to_resize_is_refused():
    with pytest.raises(
        ValueError, match=r"GridBias.resize: mode must be .* or 'geometric', got 'cubic'"
    ):
        GridBias(3, num_heads=2).resize(4, mode="cubic")


def test_the_score_mod_is_the_bias():
    bias = drawn(GridBias, (2, 3), num_heads=4)
    b, h, q, k = torch.zeros((), dtype=torch.int64), *map(torch.arange, (4, 6, 6))
    got = bias.score_mod(6, 6)(torch.ones(()), b, h[:, None, None], q[:, None], k)
    assert torch.equal(got, bias.bias() + 1)


def test_windows_that_do_not_fit_are_refused():
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    with pytest.raises(ValueError, match=r"GridBias: k_len must be 9, got 8.\n  Call resize"):
        GridBias(3, num_heads=2).attention(q, k, v)
    with pytest.raises(ValueError, match="GridBias: size must be one side, or rows and columns"):
        GridBias((2, 3, 4), num_heads=2)
    with pytest.raises(ValueError, match="GridBias: prefix must be 0 if continuous"):
        GridBias(3, num_heads=2, prefix=1, continuous=True)
