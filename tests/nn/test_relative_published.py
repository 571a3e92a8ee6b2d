"""Relative keys, Transformer-XL's and DeBERTa's terms equal the attention of published models.

All in float64, with random weights. Sinusoids are given, exact, to the published layers, which
would make them in float32.
"""

import importlib

import pytest
import torch

import oracles
import posenc
from support.biases import drawn

pytest.importorskip("transformers")
B, L, H, D = 2, 23, 4, 12
E = H * D
# Sums of up to 48 products and 23 weights, all near one.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def drawn_double(layer):
    torch.manual_seed(1)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape) * 0.3)
    return layer.double().eval()


def heads(x):
    return x.unflatten(-1, (H, D)).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).flatten(2)


def hidden_states():
    return torch.randn(B, L, E, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


# Of each model of speech, the classes of its attention, and the key of the heads.
SPEECH = {
    "wav2vec2-bert": ("Wav2Vec2Bert", "SelfAttention", "num_attention_heads"),
    "wav2vec2-conformer": ("Wav2Vec2Conformer", "SelfAttention", "num_attention_heads"),
    "seamless_m4t": ("SeamlessM4TConformer", "SelfAttention", "speech_encoder_attention_heads"),
    "seamless_m4t_v2": (
        "SeamlessM4Tv2Conformer", "SelfAttention", "speech_encoder_attention_heads",
    ),
    "parakeet_encoder": ("ParakeetEncoder", "Attention", "num_attention_heads"),
    "fastspeech2_conformer": ("FastSpeech2Conformer", "Attention", "encoder_num_attention_heads"),
    "speecht5": ("SpeechT5", "Attention", "encoder_attention_heads"),
}  # fmt: skip


def speech(name, **given):
    """A small config of a model of speech, its module, and an attention layer of it, eager."""
    from transformers import CONFIG_MAPPING

    prefix, suffix, heads = SPEECH[name]
    config = CONFIG_MAPPING[name](**{heads: H, "hidden_size": E}, **given)
    config._attn_implementation = "eager"
    where = type(config).__module__.replace("configuration_", "modeling_")
    module = importlib.import_module(where)
    arguments = {
        "parakeet_encoder": (config, 0),
        "fastspeech2_conformer": (config, getattr(config, "encoder_config", None)),
        "speecht5": (E, H),
    }.get(name, (config,))
    return config, module, drawn_double(getattr(module, prefix + suffix)(*arguments))


PARTS = ("linear_q", "linear_k", "linear_v", "linear_out")


def projected(layer, x):
    return [heads(getattr(layer, part)(x)) for part in PARTS[:3]]


def sinusoids(first, last, *, concatenated):
    """The rows of distances from ``first`` down to ``last``."""
    rows = oracles.sinusoid(range(first, last - 1, -1), E)
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1) if concatenated else rows


@pytest.mark.parametrize("name", ["wav2vec2-bert", "seamless_m4t_v2"])
def test_relative_keys_are_those_of_w2v_bert(name):
    ends = {"left_max_position_embeddings": 7, "right_max_position_embeddings": 3}
    config, _, layer = speech(name, **ends)
    x, ours = hidden_states(), posenc.RelativeKeys.from_config(config, dtype=torch.float64)
    ours.load_state_dict({"weight": layer.distance_embedding.weight})
    wanted, _ = layer(x)
    got = layer.linear_out(merged(ours.attention(*projected(layer, x))))
    torch.testing.assert_close(got, wanted, **CLOSE)


def test_relative_keys_are_those_of_speecht5():
    """Its rows begin with the farthest later key."""
    config, module, layer = speech("speecht5", encoder_max_relative_position=6)
    x, ours = hidden_states(), posenc.RelativeKeys.from_config(config, dtype=torch.float64)
    vectors = drawn_double(module.SpeechT5RelativePositionalEncoding(D, 6))
    ours.load_state_dict({"weight": vectors.pe_k.weight.flip(0)})
    wanted = layer(x, position_bias=vectors(x))[0]
    q, k, v = (heads(part(x)) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    got = layer.out_proj(merged(ours.attention(q, k, v)))
    torch.testing.assert_close(got, wanted, **CLOSE)


def test_relative_keys_are_those_of_bert():
    """Of transformers 4, whose formula this is: `explain` names these calls."""
    vectors = torch.randn(2 * L - 1, D, dtype=torch.float64)
    q, k, v = torch.randn(3, B, H, L, D, dtype=torch.float64)
    at = torch.arange(L)
    rows = vectors[at[:, None] - at + L - 1]
    scores = q @ k.mT + torch.einsum("bhld,lrd->bhlr", q, rows)
    ours = posenc.RelativeKeys(D, max_distance=L - 1, causal=False, dtype=torch.float64)
    ours.load_state_dict({"weight": vectors.flip(0)})
    torch.testing.assert_close(ours(q, k, v), (scores / D**0.5).softmax(-1) @ v, **CLOSE)

    # relative_key_query
    scores += torch.einsum("bhrd,lrd->bhlr", k, rows)
    both = {"for_queries": vectors, "for_keys": vectors}
    bias = posenc.attention.relative_terms(q, k, lambda distance: distance + L - 1, **both)
    got = posenc.attention.biased_attention(q, k, v, bias, causal=False)
    torch.testing.assert_close(got, (scores / D**0.5).softmax(-1) @ v, **CLOSE)


CONFORMERS = [
    pytest.param(name, id=name, marks=[pytest.mark.slow] * (name == "wav2vec2-bert"))
    for name in SPEECH
    if name not in ("seamless_m4t_v2", "speecht5")
]
OF_PARAKEET = {
    "linear_pos.weight": "relative_k_proj.weight",
    "pos_bias_u": "bias_u",
    "pos_bias_v": "bias_v",
}


@pytest.mark.parametrize("name", CONFORMERS)
def test_transformer_xl_is_the_attention_of_conformers(name):
    """Their sinusoids, and the softmax of Parakeet, are float32: 1e-5 from exact ones."""
    kind = {"position_embeddings_type": "relative"} if name.startswith("wav2vec2") else {}
    config, module, layer = speech(name, **kind)
    x, ours = hidden_states(), posenc.TransformerXLBias.from_config(config, dtype=torch.float64)
    state, parakeet = layer.state_dict(), name == "parakeet_encoder"
    names = {key: OF_PARAKEET[key] if parakeet else key for key in ours.state_dict()}
    ours.load_state_dict({key: state[own] for key, own in names.items()})
    r = sinusoids(L - 1, 1 - L, concatenated=False)[None]
    words = "RelPositionalEncoding" if parakeet or "speech2" in name else "RelPositionalEmbedding"
    extra = (config.encoder_config,) if "speech2" in name else ()
    made = getattr(module, SPEECH[name][0] + words)(config, *extra).eval()(x.float())
    made = made[1] if "speech2" in name else made
    torch.testing.assert_close(made[:1].double(), r, rtol=0, atol=1e-5)
    called = "position_embeddings" if parakeet else "relative_position_embeddings"
    called = "pos_emb" if "speech2" in name else called
    wanted, _ = layer(x, **{called: r.expand(B, -1, -1) if parakeet else r})
    parts = ("q_proj", "k_proj", "v_proj", "o_proj") if parakeet else PARTS
    to_q, to_k, to_v, out = (getattr(layer, part) for part in parts)
    got = out(merged(ours.attention(heads(to_q(x)), heads(to_k(x)), heads(to_v(x)))))
    torch.testing.assert_close(got, wanted, **({"rtol": 0, "atol": 1e-5} if parakeet else CLOSE))


@pytest.mark.parametrize("causal", [True, False], ids=["uni", "bi"])
@pytest.mark.parametrize("memory", [pytest.param(0, marks=pytest.mark.slow), 9])
def test_transformer_xl_is_the_attention_of_xlnet(causal, memory):
    """A memory is keys before the queries."""
    from transformers import XLNetConfig
    from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

    config = XLNetConfig(d_model=E, n_head=H, d_inner=8, attn_type="uni" if causal else "bi")
    layer = drawn_double(XLNetRelativeAttention(config))
    ours = posenc.TransformerXLBias.from_config(config, dtype=torch.float64)
    state = {"pos_bias_u": layer.r_w_bias, "pos_bias_v": layer.r_r_bias}
    ours.load_state_dict(state | {"linear_pos.weight": layer.r.flatten(1).T})
    x = hidden_states()
    q, k, v = (
        torch.einsum("blh,hnd->bnld", part, w)
        for part, w in ((x[:, memory:], layer.q), (x, layer.k), (x, layer.v))
    )
    by_place = [part.permute(2, 0, 1, 3) for part in (q, k, v)]
    r = sinusoids(L, memory - L, concatenated=True)
    r = torch.einsum("ih,hnd->ind", r, layer.r)[:, None].expand(-1, B, -1, -1)
    later = torch.ones(L - memory, L, dtype=torch.float64).triu(memory + 1)[..., None, None]
    wanted = layer.rel_attn_core(*by_place, r, attn_mask=later if causal else None)
    torch.testing.assert_close(ours.attention(q, k, v).permute(2, 0, 1, 3), wanted, **CLOSE)


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("buckets", [-1, 6])
@pytest.mark.parametrize("shared", [True, False], ids=["v3", "v2-without-sharing"])
def test_deberta_v2_is_the_layer_of_transformers(shared, buckets, padded):
    """Scores are over √(3 D), here 6: the layer makes the root in float32."""
    from transformers import DebertaV2Config
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

    config = DebertaV2Config(
        hidden_size=E,
        num_attention_heads=H,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        share_att_key=shared,
        position_buckets=buckets,
        max_relative_positions=10,
    )
    layer = drawn_double(DisentangledSelfAttention(config))
    span = layer.pos_ebd_size
    rel = torch.randn(2 * span, E, dtype=torch.float64)
    to_key = layer.key_proj if shared else layer.pos_key_proj
    to_query = layer.query_proj if shared else layer.pos_query_proj
    ours = posenc.DeBERTaBias.from_config(config, dtype=torch.float64)
    vectors = {"pos_key": to_key(rel), "pos_query": to_query(rel)}
    ours.load_state_dict({name: x.view(2 * span, H, D) for name, x in vectors.items()})
    x = hidden_states()
    real = torch.ones(B, L, dtype=torch.bool)
    real[0, 15:] = not padded
    wanted, _ = layer(x, real[:, None, :, None] & real[:, None, None], rel_embeddings=rel)
    q, k, v = (heads(part(x)) for part in (layer.query_proj, layer.key_proj, layer.value_proj))
    got = merged(ours.attention(q, k, v, document_ids=torch.where(real, 0, -1)))
    torch.testing.assert_close(got[real], wanted[real], **CLOSE)


@pytest.mark.parametrize("most", [10, 40], ids=["clipped", "not-clipped"])
def test_deberta_is_the_layer_of_transformers(most):
    from transformers import DebertaConfig
    from transformers.models.deberta import modeling_deberta as deberta

    config = DebertaConfig(
        hidden_size=E,
        num_attention_heads=H,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=most,
    )
    layer, x = drawn_double(deberta.DisentangledSelfAttention(config)), hidden_states()
    rel = torch.randn(2 * most, E, dtype=torch.float64)
    q, k, v = layer.transpose_for_scores(layer.in_proj(x)).chunk(3, -1)
    q, v = q + heads(layer.q_bias[None, None]), v + heads(layer.v_bias[None, None])
    ours = posenc.DeBERTaBias.from_config(config, dtype=torch.float64)
    vectors = {"pos_key": layer.pos_proj(rel), "pos_query": layer.pos_q_proj(rel)}
    ours.load_state_dict({name: y.view(2 * most, H, D) for name, y in vectors.items()})
    place = deberta.build_relative_position(q, k)
    wanted, _ = layer(x, torch.ones(B, 1, L, L), relative_pos=place, rel_embeddings=rel)
    torch.testing.assert_close(merged(ours.attention(q, k, v)), wanted, **CLOSE)


@pytest.mark.parametrize("sizes", [(256, 512), (8, 20), (6, 100), (2, 4), (128, 4096)], ids=str)
def test_buckets_are_the_published_ones(sizes):
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    buckets, most = sizes
    distance = torch.arange(-5 * most, 5 * most)
    wanted = make_log_bucket_position(distance, buckets, most).long() + buckets
    got = drawn(
        posenc.DeBERTaBias,
        1,
        head_dim=1,
        max_relative_positions=most,
        position_buckets=buckets,
        causal=False,
    ).distance_rows(distance)
    assert torch.equal(got, wanted.clamp(0, 2 * buckets - 1))
