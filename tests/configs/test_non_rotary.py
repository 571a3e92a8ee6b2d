"""Positions that are not rotary, against the modules of transformers that hold them."""

import contextlib
import inspect
import warnings

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel

from posenc import ALiBi, DeBERTaBias, RelativeKeys, TransformerXLBias, configs
from posenc.functional import timestep_embedding
from support.hf_models import knows_all_families

LAYERS = "num_hidden_layers encoder_layers decoder_layers n_layer num_layers".split()


def built(kind):
    """A model of one layer and no memory, and its config as it would be saved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = CONFIG_MAPPING[kind]()
        for name in LAYERS:
            # ProphetNet's encoder and decoder are set one by one.
            with contextlib.suppress(NotImplementedError):
                if hasattr(config, name):
                    setattr(config, name, 1)
        saved = config.to_dict()
        with torch.device("meta"):
            return AutoModel.from_config(config), saved


def tables(model):
    names = ("position_embedding", "embed_positions", "wpe", "positions_embed", "pos_encoding")
    return {
        tuple(value.shape)
        for name, value in (*model.named_parameters(), *model.named_buffers())
        if any(each in name for each in names) and value.dim() == 2
    }


# Not built by AutoModel, or only with packages that are not here.
APART = {"blip_text_model", "layoutlmv2", "siglip_text_model", "trocr"}
KINDS = {
    kind: configs.model_defaults(kind)["positions"] for kind in configs.types_with("positions")
}
LEARNED = sorted(kind for kind, what in KINDS.items() if what == "learned")


@knows_all_families
@pytest.mark.parametrize("kind", [kind for kind in LEARNED if kind not in APART])
@pytest.mark.filterwarnings("ignore")
def test_a_learned_table_has_the_rows_and_the_width_of_the_model(kind):
    model, saved = built(kind)
    held = tables(model)
    for part in configs.read_positions(saved).parts:
        assert (part.max_len, part.embed_dim) in held


@pytest.mark.parametrize(
    ("kind", "sizes", "first"),
    [
        ("opt", {"hidden_size": 16, "num_attention_heads": 2, "ffn_dim": 16}, 2),
        ("roberta", {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}, 2),
        ("gpt2", {"n_embd": 16, "n_head": 2}, 0),
    ],
)
def test_the_first_position_has_the_row_of_the_offset(kind, sizes, first):
    """Its gradient is where the model looks."""
    config = CONFIG_MAPPING[kind](**sizes, num_hidden_layers=1, vocab_size=32)
    model = AutoModel.from_config(config)
    (part,) = configs.read_positions(config).parts
    ids = torch.tensor([[5, 6, 7]])
    model(input_ids=ids).last_hidden_state.square().sum().backward()
    seen = {
        tuple(value.grad.abs().sum(1).nonzero().flatten().tolist())
        for value in model.parameters()
        if value.shape == (part.max_len, part.embed_dim)
    }
    assert part.offset == first
    assert (first, first + 1, first + 2) in seen


def sinusoids(kind):
    """The model's own table, from its first position on."""
    folder = kind.replace("-", "_")
    module = __import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=["x"])
    if kind == "ctrl":
        return module.positional_encoding(16, 8, torch.float32)
    if kind == "whisper":
        return module.sinusoids(16, 8)
    ((_, made),) = inspect.getmembers(
        module,
        lambda each: (
            inspect.isclass(each) and each.__name__.endswith("SinusoidalPositionalEmbedding")
        ),
    )
    if kind == "pegasus_x":
        return made(8)(torch.zeros(1, 16, 8))[0]
    if kind in ("marian", "pegasus"):
        table = made(16, 8)
        if hasattr(table, "create_weight"):
            return table.create_weight()
        return table._init_weight()
    # Their rows count from padding_idx + 1.
    return made(20, 8, 1).weights[2:18]


@knows_all_families
@pytest.mark.parametrize(
    "kind", sorted(kind for kind, what in KINDS.items() if what == "sinusoidal")
)
def test_sinusoids_are_those_of_the_model(kind):
    config = {"model_type": kind, "d_model": 8, "pad_token_id": 1}
    config |= dict.fromkeys(("max_position_embeddings", "max_source_positions"), 16)
    part = configs.read_positions({**config, "max_target_positions": 16}).parts[0]
    at = torch.arange(part.offset, part.offset + 16)
    made = timestep_embedding(
        at, part.embed_dim, downscale_freq_shift=part.downscale_freq_shift, dtype=torch.float64
    )
    torch.testing.assert_close(made, sinusoids(kind).double(), rtol=0, atol=1e-5)


@knows_all_families
@pytest.mark.parametrize("kind", ["longt5", "mt5", "switch_transformers", "t5", "umt5"])
def test_buckets_are_those_of_the_model(kind):
    model, saved = built(kind)
    (part,) = configs.read_positions(saved).parts
    biases = {
        tuple(value.shape)
        for name, value in model.named_parameters()
        if "relative_attention_bias" in name
    }
    assert biases == {(part.num_buckets, part.num_heads)}
    config = CONFIG_MAPPING[kind]()
    assert part.max_distance == config.relative_attention_max_distance
    # T5's own files leave the distance out.
    del saved["relative_attention_max_distance"]
    assert configs.read_positions(saved).parts[0] == part


BLOOM = {"model_type": "bloom", "n_head": 12}
MPT = {"model_type": "mpt", "n_heads": 12, "d_model": 768}
FALCON = {"model_type": "falcon", "alibi": True, "num_attention_heads": 12, "hidden_size": 768}


@pytest.mark.parametrize("config", [BLOOM, MPT, FALCON], ids=["bloom", "mpt", "falcon"])
def test_slopes_are_those_of_the_model(config):
    """The model's own bias of 50 keys, one mask for all, divided by the distance."""
    mask, folder = torch.ones(1, 50, dtype=torch.long), config["model_type"]
    name = "build_mpt_alibi_tensor" if folder == "mpt" else "build_alibi_tensor"
    module = __import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=["x"])
    build = getattr(module, name)
    bias = build(12, 50) if folder == "mpt" else build(mask, 12, torch.float32)
    bias = bias.reshape(12, 50).double()
    # MPT counts up to zero, the others from it.
    slopes = bias[:, -1] - bias[:, -2] if folder == "mpt" else bias[:, 1] - bias[:, 0]
    if folder == "falcon":
        # It adds the bias before the scores are divided by the root of 768 / 12.
        slopes = slopes / 8
    alibi = ALiBi.from_config(config)
    torch.testing.assert_close(alibi.slopes.double(), slopes, rtol=1e-6, atol=0)
    made = transformers.CONFIG_MAPPING[folder].from_dict(config)
    assert torch.equal(ALiBi.from_config(made).slopes, alibi.slopes)


def test_slopes_follow_the_config_and_keywords_win(tmp_path):
    half = {**MPT, "attn_config": {"alibi": True, "alibi_bias_max": 4}}
    assert torch.equal(ALiBi.from_config(half).slopes, ALiBi(12, bias_max=4.0).slopes)
    assert ALiBi.from_config(half, bias_max=6.0).bias_max == 6.0
    assert ALiBi.from_config(BLOOM, causal=False).causal is False
    few = ALiBi.from_config(FALCON, num_heads=4)
    assert torch.equal(few.slopes, ALiBi.from_model("falcon", 4, head_dim=64).slopes)
    (tmp_path / "config.json").write_text('{"model_type": "bloom", "n_head": 8}')
    for source in (tmp_path, tmp_path / "config.json"):
        assert ALiBi.from_config(source).num_heads == 8
    within = {"model_type": "some_vl", "text_config": BLOOM}
    assert ALiBi.from_config(within).num_heads == 12


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "llama"}, "'llama' has rotary embeddings.\n  Use RoPE.from_config"),
        ({"model_type": "gpt2", "n_positions": 8, "n_embd": 8}, "'gpt2' has a learned table"),
        ({**FALCON, "alibi": False}, "'falcon' has rotary embeddings"),
        ({**MPT, "max_seq_len": 64, "attn_config": {"alibi": False}}, "ALiBi switched off"),
        ({"model_type": "my_own"}, "has no known ALiBi; bloom, mpt and falcon"),
        ({"model_type": ["bloom"]}, "has no known ALiBi; bloom, mpt and falcon"),
        ({"model_type": "bloom"}, "num_attention_heads or n_head"),
        ({**BLOOM, "n_head": 5 * 10**8}, "n_head must be at most 4096"),
    ],
)
def test_a_model_without_alibi_is_refused_by_name(config, text):
    with pytest.raises(ValueError, match=text):
        ALiBi.from_config(config)


SMALL = {"hidden_size": 48, "num_attention_heads": 4}
DEBERTA = {
    **SMALL,
    "model_type": "deberta-v2",
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "max_relative_positions": -1,
    "max_position_embeddings": 128,
    "position_buckets": 32,
}


def test_keywords_win_and_files_of_old_are_read(tmp_path):
    """DeBERTa's own files write its terms as one string, and -1 for the length of the model."""
    made = DeBERTaBias.from_config(DEBERTA)
    assert (made.max_relative_positions, made.position_buckets) == (128, 32)
    assert (made.num_heads, made.head_dim, made.causal) == (4, 12, False)
    assert DeBERTaBias.from_config(DEBERTA, causal=True).causal
    first = {**DEBERTA, "model_type": "deberta", "max_relative_positions": 16}
    made = DeBERTaBias.from_config(first)
    assert (made.max_relative_positions, made.position_buckets) == (16, None)
    (tmp_path / "config.json").write_text(
        '{"model_type": "transfo-xl", "d_model": 48, "n_head": 4}'
    )
    made = TransformerXLBias.from_config(tmp_path, max_distance=9)
    assert (made.causal, made.concatenated, made.max_distance) == (True, True, 9)
    xlnet = {"model_type": "xlnet", "d_model": 48, "n_head": 4, "clamp_len": 7, "attn_type": "bi"}
    made = TransformerXLBias.from_config(xlnet)
    assert (made.causal, made.max_distance) == (False, 7)
    made = RelativeKeys.from_config({**SMALL, "model_type": "wav2vec2-bert"})
    assert (made.max_distance, made.max_later, made.causal) == (64, 8, False)


@pytest.mark.parametrize(
    ("module", "config", "text"),
    [
        (DeBERTaBias, {"model_type": "t5"}, "T5's relative bias.*\n  Use T5Bias.from_config"),
        (RelativeKeys, {"model_type": "bloom"}, "'bloom' has ALiBi"),
        (TransformerXLBias, {"model_type": "llama"}, "rotary embeddings.\n  Use RoPE.from_config"),
        (TransformerXLBias, {"model_type": "my_own"}, "xlnet and wav2vec2-conformer have them"),
        (RelativeKeys, {"model_type": "my_own"}, "speecht5 and wav2vec2-bert have them"),
        (
            RelativeKeys,
            {**SMALL, "model_type": "wav2vec2-bert", "position_embeddings_type": "relative"},
            "Transformer-XL's terms.\n  Use TransformerXLBias.from_config",
        ),
        (
            RelativeKeys,
            {**SMALL, "model_type": "wav2vec2-bert", "position_embeddings_type": "rotary"},
            "rotary embeddings.\n  Use RoPE.from_config",
        ),
        (
            TransformerXLBias,
            {**SMALL, "model_type": "wav2vec2-conformer", "position_embeddings_type": None},
            "no positional encoding",
        ),
        (DeBERTaBias, {**DEBERTA, "relative_attention": False}, "relative attention switched off"),
        (DeBERTaBias, {**DEBERTA, "pos_att_type": ["c2p"]}, "pos_att_type must be c2p and p2c"),
        (DeBERTaBias, {**DEBERTA, "num_attention_heads": 5}, "hidden_size must be a multiple of"),
        (
            TransformerXLBias,
            {"model_type": "xlnet", "d_model": 48, "n_head": 4, "d_head": 16},
            "d_head must be d_model / n_head, 12",
        ),
        (
            TransformerXLBias,
            {"model_type": "xlnet", "d_model": 48, "n_head": 4, "bi_data": True},
            "bi_data must be false",
        ),
    ],
)
def test_a_config_of_another_bias_is_refused_with_its_module(module, config, text):
    with pytest.raises(ValueError, match=text):
        module.from_config(config)
