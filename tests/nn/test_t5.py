"""T5's bias is T5's."""

import math

import pytest
import torch

import posenc
from posenc.functional import t5_buckets
from support.biases import assert_is_formula, drawn


def bucket(n, buckets, far, causal):
    """The published rule for one distance, with its logarithm in float32."""
    first = 0
    if not causal:
        buckets //= 2
        first = buckets if n < 0 else 0
    n = max(n, 0) if causal else abs(n)
    exact = buckets // 2
    if n < exact:
        return first + n
    ratio = torch.tensor(n, dtype=torch.float32).div(exact).log().div(math.log(far / exact))
    return first + min(exact + int(ratio * (buckets - exact)), buckets - 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (8, 20), (6, 7)])
def test_attention_is_the_formula(causal, buckets, far):
    def formula(given, h, i, j):
        return given["weight"][bucket(i - j, buckets, far, causal), h]

    assert_is_formula(
        drawn(posenc.T5Bias, 3, num_buckets=buckets, max_distance=far, causal=causal),
        formula,
    )
    assert_is_formula(
        drawn(posenc.T5Bias, 2, num_buckets=buckets, max_distance=far, causal=causal),
        formula,
        queries=2,
        keys=30,
    )


@pytest.mark.parametrize("causal", [False, True])
def test_every_distance_is_in_the_bucket_of_the_published_rule(causal):
    """The floor decides at 16, 32 and 64, where the logarithm is whole."""
    distance = torch.arange(-300, 301)
    wanted = [bucket(n, 32, 128, causal) for n in distance.tolist()]
    assert t5_buckets(distance, causal=causal).tolist() == wanted


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_the_layer_of_transformers_is_reproduced(kind, decoder):
    """Its weights load by their names, and its attention has the same output and gradient."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    width = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 1, "d_ff": 8, "vocab_size": 7}
    config = (transformers.T5Config if kind == "t5" else transformers.UMT5Config)(
        **width, dropout_rate=0.0, is_decoder=decoder
    )
    config._attn_implementation = "eager"
    if kind == "t5":
        from transformers.models.t5.modeling_t5 import T5Attention as Attention
    else:
        from transformers.models.umt5.modeling_umt5 import UMT5Attention as Attention
    layer = Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    torch.nn.init.normal_(layer.relative_attention_bias.weight)
    ours = torch.nn.Module()
    ours.relative_attention_bias = posenc.T5Bias.from_config(config, causal=decoder)
    key = "relative_attention_bias.weight"
    ours.load_state_dict({key: layer.state_dict()[key]})

    x, length = torch.randn(2, 150, 32), 150
    bias = ours.relative_attention_bias
    theirs = layer.compute_bias(length, length)
    seen = torch.ones(length, length).tril().bool() if decoder else torch.tensor(True)
    mine = bias.bias(length)
    assert torch.equal(mine.masked_fill(~seen, 0.0), theirs[0].masked_fill(~seen, 0.0))

    mask = torch.zeros(1, 1, length, length).masked_fill(~seen, float("-inf"))
    wanted = layer(x, mask=mask) if kind == "t5" else layer(x, attention_mask=mask)
    q, k, v = (
        each(x).unflatten(-1, (4, 8)).transpose(1, 2) for each in (layer.q, layer.k, layer.v)
    )
    got = layer.o(bias.attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(got, wanted[0], rtol=1e-4, atol=1e-5)
    (g,) = torch.autograd.grad(wanted[0].square().sum(), layer.relative_attention_bias.weight)
    (mine,) = torch.autograd.grad(got.square().sum(), bias.weight)
    torch.testing.assert_close(mine, g, rtol=1e-3, atol=1e-4 * g.abs().max().item())


def test_the_table_ends_where_the_last_bucket_begins():
    bias = drawn(posenc.T5Bias, 2, num_buckets=8, max_distance=20, causal=False)
    table = bias.table(1000)
    assert table.shape == (2, 41)
    assert torch.equal(bias.bias(60)[:, 59, 0], table[:, -1])
    assert torch.equal(bias.bias(60)[:, 0, 59], table[:, 0])


def test_the_scale_is_that_of_the_module_unless_a_call_names_another():
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    plain = posenc.T5Bias(2, causal=False)
    t5 = posenc.T5Bias.from_config({"model_type": "t5", "num_heads": 2}, causal=False)
    assert torch.equal(plain(q, k, v), t5(q, k, v, scale=8**-0.5))
    assert torch.equal(t5(q, k, v), plain(q, k, v, scale=1.0))
    assert not torch.allclose(t5(q, k, v), plain(q, k, v))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_buckets": 31}, "T5Bias: num_buckets must be even.*got 31"),
        ({"num_buckets": 2}, "T5Bias: num_buckets must be at least 4"),
        ({"max_distance": 8}, "T5Bias: max_distance must be above 8.*got 8"),
        ({"max_distance": 16, "causal": True}, "T5Bias: max_distance must be above 16.*got 16"),
        ({"num_heads": 0}, "T5Bias: num_heads must be at least 1"),
    ],
)
def test_buckets_without_a_meaning_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        posenc.T5Bias(**{"num_heads": 4, "causal": False, **arguments})


def test_configs_and_distances_of_other_kinds_are_refused():
    with pytest.raises(ValueError, match="'bloom' has ALiBi"):
        posenc.T5Bias.from_config({"model_type": "bloom", "n_head": 4}, causal=False)
    with pytest.raises(TypeError, match="t5_buckets: distance must be an integer tensor"):
        t5_buckets(torch.zeros(3))
