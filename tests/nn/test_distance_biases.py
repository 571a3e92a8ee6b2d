"""Biases by distance and their formulas: T5, learned numbers, KERPLE, Sandwich and FIRE."""

import copy
import math

import mpmath
import pytest
import torch

import posenc
from posenc.attention import DistanceTable
from posenc.functional import t5_buckets
from posenc.ops.attention.biases import FireNetwork
from posenc.ops.attention.biases.fire import network_rows
from support.biases import assert_is_formula, drawn, qkv


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
def test_t5_is_the_formula(causal, buckets, far):
    def formula(given, h, i, j):
        return given["weight"][bucket(i - j, buckets, far, causal), h]

    bias = drawn(posenc.T5Bias, 3, num_buckets=buckets, max_distance=far, causal=causal)
    assert_is_formula(bias, formula)
    assert_is_formula(bias, formula, queries=2, keys=30)


@pytest.mark.parametrize("causal", [False, True])
def test_every_distance_is_in_the_bucket_of_the_published_rule(causal):
    """The floor decides at 16, 32 and 64, where the logarithm is whole."""
    distance = torch.arange(-300, 301)
    wanted = [bucket(n, 32, 128, causal) for n in distance.tolist()]
    assert t5_buckets(distance, causal=causal).tolist() == wanted


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_t5_is_the_layer_of_transformers(kind, decoder):
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


def test_the_table_of_t5_ends_where_the_last_bucket_begins():
    bias = drawn(posenc.T5Bias, 2, num_buckets=8, max_distance=20, causal=False)
    table = bias.table(1000)
    assert table.shape == (2, 41)
    assert torch.equal(bias.bias(60)[:, 59, 0], table[:, -1])
    assert torch.equal(bias.bias(60)[:, 0, 59], table[:, 0])


def test_the_scale_of_t5_is_that_of_the_module_unless_a_call_names_another():
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    plain = posenc.T5Bias(2, causal=False)
    t5 = posenc.T5Bias.from_config({"model_type": "t5", "num_heads": 2}, causal=False)
    assert torch.equal(plain(q, k, v), t5(q, k, v, scale=8**-0.5))
    assert torch.equal(t5(q, k, v), plain(q, k, v, scale=1.0))
    assert not torch.allclose(t5(q, k, v), plain(q, k, v))


@pytest.mark.parametrize("most", [0, 3, 50])
@pytest.mark.parametrize("causal", [True, False])
def test_a_learned_bias_is_the_formula(causal, most):
    bias = drawn(posenc.LearnedBias, 4, max_distance=most, causal=causal)

    def formula(given, h, i, j):
        distance = max(min(i - j, most), -most)
        return given["weight"][h, distance if causal else distance + most]

    assert_is_formula(bias, formula, kv_heads=2)
    assert_is_formula(bias, formula, queries=1, keys=9)


def test_a_learned_bias_starts_at_zero():
    assert not posenc.LearnedBias(2, max_distance=3, causal=False).bias(5).any()


def log_decay(given, h, i, j):
    r1, r2 = given["raw_r1"][h].exp(), given["raw_r2"][h].exp()
    return -r1 * torch.log(1 + r2 * abs(i - j))


def power_decay(given, h, i, j):
    if i == j:
        return given["raw_r1"][h] * 0
    r1, r2 = given["raw_r1"][h].exp(), 2 / (1 + torch.exp(-given["raw_r2"][h]))
    return -r1 * torch.tensor(float(abs(i - j)), dtype=torch.float64) ** r2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["log", "power"])
def test_kerple_is_the_formula(kind, causal):
    torch.manual_seed(0)
    bias = posenc.KERPLE(4, kind=kind, causal=causal)
    formula = log_decay if kind == "log" else power_decay
    assert_is_formula(bias, formula, kv_heads=2)
    assert_is_formula(bias, formula, queries=1, keys=20)


def test_parameters_of_kerple_stay_in_their_range_whatever_the_optimizer_does():
    bias = posenc.KERPLE(2, kind="power")
    with torch.no_grad():
        for raw, r2 in ((30.0, 2.0), (-30.0, 0.0)):
            bias.raw_r1.fill_(raw)
            bias.raw_r2.fill_(raw)
            assert (bias.r1 > 0).all()
            assert (bias.r2 > 0).all()
            assert (bias.r2 <= 2).all()
            torch.testing.assert_close(bias.r2, torch.full((2,), r2).double(), rtol=0, atol=1e-12)


def test_second_derivatives_of_kerple_are_finite():
    """The power of distance zero has none by the usual rule."""
    bias = posenc.KERPLE(2, kind="power")
    (g,) = torch.autograd.grad(bias.table(5).sum(), bias.raw_r2, create_graph=True)
    (second,) = torch.autograd.grad(g.sum(), bias.raw_r2)
    assert second.isfinite().all()


def sandwich(dim, heads, h, distance):
    angles = [mpmath.mpf(distance) / mpmath.mpf(10000) ** (mpmath.mpf(2 * k) / dim)
              for k in range(dim // 2)]  # fmt: skip
    return sum(map(mpmath.cos, angles)) * heads / (8 * (h + 1))


@pytest.mark.parametrize("causal", [True, False])
def test_sandwich_is_the_formula(causal):
    def formula(given, h, i, j):
        return torch.tensor(float(sandwich(12, 4, h, i - j)), dtype=torch.float64)

    assert_is_formula(posenc.Sandwich(4, dim=12, causal=causal), formula, kv_heads=2)


def test_a_far_number_of_sandwich_is_rounded_once():
    """Angles of far distances lose digits unless they are exact."""
    numbers = [float(sandwich(128, 2, h, 20_000)) for h in range(2)]
    wanted = torch.tensor(numbers, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        got = posenc.Sandwich(2).table(20_001, dtype=dtype)[:, 20_000]
        assert torch.equal(got, wanted.to(dtype))


def test_nothing_of_sandwich_is_learned_and_a_cast_changes_nothing():
    bias = posenc.Sandwich(2)
    before = bias.table(50)
    assert not list(bias.parameters())
    assert not bias.state_dict()
    assert torch.equal(bias.half().table(50), before)


def fire(threshold, *, learned=True):
    def formula(given, h, i, j):
        c = given["c"].abs()
        most = torch.tensor(threshold, dtype=torch.float64)
        most = given["L_multiplier"].abs() * most if learned else most
        scale = torch.maximum(most, torch.tensor(i, dtype=torch.float64))
        ratio = torch.log(c * abs(i - j) + 1) / torch.log(c * scale + 1)
        hidden = torch.relu(given["mlp.0.weight"][:, 0] * ratio + given["mlp.0.bias"])
        return given["mlp.2.weight"][h] @ hidden + given["mlp.2.bias"][h]

    return formula


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("threshold", [512.0, 3.7, 0.5], ids=["table", "rows", "all-rows"])
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "fixed"])
def test_fire_is_the_formula(threshold, learned, causal):
    torch.manual_seed(0)
    keywords = {"init_c": 0.3, "threshold": threshold, "learn_threshold": learned}
    bias = posenc.FIRE(4, hidden=5, causal=causal, **keywords)
    kind = DistanceTable if threshold == 512.0 else FireNetwork
    assert isinstance(bias.as_bias(7), kind)
    assert_is_formula(bias, fire(threshold, learned=learned), kv_heads=2)
    assert_is_formula(bias, fire(threshold, learned=learned), queries=1, keys=9)


def test_the_learned_threshold_of_fire_decides_between_table_and_rows():
    """The last query is at index 10: past a threshold of 9.9."""
    bias = posenc.FIRE(2, threshold=20.0)
    with torch.no_grad():
        bias.L_multiplier.fill_(-0.495)
    assert isinstance(bias.as_bias(10), DistanceTable)
    assert isinstance(bias.as_bias(11), FireNetwork)


def test_fire_counts_positions_from_the_beginning_of_a_document():
    """A packed document has the bias that it has alone."""
    bias = posenc.FIRE(2, threshold=2.0)
    ids = torch.tensor([[0] * 6 + [1] * 5, [-1] * 3 + [7] * 8])
    q, k, v = (x.detach() for x in qkv(2, 11, 11))
    got = bias.attention(q, k, v, document_ids=ids)
    for row, part in ((0, slice(6)), (0, slice(6, 11)), (1, slice(3, 11))):
        alone = bias.attention(*(x[row : row + 1, :, part] for x in (q, k, v)))
        torch.testing.assert_close(got[row, :, part], alone[0], rtol=1e-10, atol=1e-10)
    whole = bias.bias(11, document_ids=ids)
    torch.testing.assert_close(whole[0, :, 6:, 6:], bias.bias(5))


def test_the_network_of_fire_has_heads_before_keys_in_memory():
    """Heads last, Inductor of torch 2.11 would write past the end of a tensor."""
    bias = posenc.FIRE(2, hidden=3, threshold=2.0).as_bias(9)
    own = torch.arange(9).repeat(2, 1)
    assert network_rows(bias, None, own, torch.arange(9)).is_contiguous()


def test_fire_has_no_table_past_its_threshold():
    bias = posenc.FIRE(2, threshold=5.0)
    assert bias.table(6).shape == (2, 6)
    with pytest.raises(ValueError, match="FIRE: the bias must be a function of the distance"):
        bias.table(8)
    with pytest.raises(TypeError, match="relative_score_mod: bias must be Slopes, Dist"):
        bias.score_mod(8, 8)


@pytest.mark.parametrize("name", ["c", "L_multiplier"])
@pytest.mark.parametrize("keys", [9, 40], ids=["table", "rows"])
def test_a_factor_of_zero_of_fire_is_the_limit(name, keys):
    """With c towards 0 the ratio tends to (i - j) / max(L, i); with L at 0 the scale is i."""
    module = drawn(posenc.FIRE, 2, hidden=3, threshold=20.0)
    near = copy.deepcopy(module)
    with torch.no_grad():
        getattr(module, name).zero_()
        getattr(near, name).fill_(1e-6)
    got, wanted = (each.bias(keys, dtype=torch.float64) for each in (module, near))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    q, k, v = qkv(2, keys, keys)
    module(q, k, v).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def test_a_checkpoint_of_fire_may_have_its_numbers_without_an_axis():
    """FSDP2 shards no parameter of shape (), so ours have one axis; older ones had none."""
    module = drawn(posenc.FIRE, 2, hidden=3)
    state = {
        name: x.reshape(()) if x.numel() == 1 else x for name, x in module.state_dict().items()
    }
    other = posenc.FIRE(2, hidden=3)
    other.load_state_dict(state)
    assert other.c.shape == other.L_multiplier.shape == (1,)
    assert torch.equal(other.bias(9), module.bias(9))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: posenc.T5Bias(0, causal=False), "T5Bias: num_heads must be at least 1"),
        (lambda: posenc.T5Bias(4, num_buckets=31, causal=False), "num_buckets must be even.*31"),
        (lambda: posenc.T5Bias(4, num_buckets=2, causal=False), "num_buckets must be at least 4"),
        (lambda: posenc.T5Bias(4, max_distance=8, causal=False), "max_distance must be above 8"),
        (lambda: posenc.T5Bias(4, max_distance=16, causal=True), "max_distance must be above 16"),
        (
            lambda: posenc.T5Bias.from_config({"model_type": "bloom", "n_head": 4}, causal=False),
            "'bloom' has ALiBi",
        ),
        (lambda: posenc.KERPLE(2, kind="exp"), "kind must be 'log' or 'power', got 'exp'"),
        (lambda: posenc.KERPLE(2).table(-1), "KERPLE: k_len must be at least 0"),
        (lambda: posenc.LearnedBias(2, max_distance=-1), "max_distance must be at least 0"),
        (lambda: posenc.Sandwich(2, dim=7), "Sandwich: dim must be even"),
        (lambda: posenc.FIRE(2, threshold=0.0), "threshold must be finite and above zero"),
        (lambda: posenc.FIRE(2, init_c=-1.0), "init_c must be finite and above zero"),
    ],
)
def test_bad_arguments_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_distances_of_buckets_are_integers():
    with pytest.raises(TypeError, match="t5_buckets: distance must be an integer tensor"):
        t5_buckets(torch.zeros(3))
