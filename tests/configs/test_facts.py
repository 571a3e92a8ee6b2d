"""Lengths, layers without rotation and softmax scales, against the models of transformers."""

import importlib
import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel

import posenc
from posenc import RoPE, configs
from support.hf_models import SMALL, knows_all_families

ALL_FULL = {"sliding_window": None, "layer_types": ["full_attention"] * 6}
SIZES = {"hidden_size": 64, "num_attention_heads": 4}
DEEP = {**SMALL, "num_hidden_layers": 6, "head_dim": 16}
FEW = {
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4}


@knows_all_families
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        pytest.param("smollm3", {}, id="smollm3"),
        pytest.param("smollm3", {"no_rope_layer_interval": 3}, id="smollm3-interval"),
        pytest.param("smollm3", {"no_rope_layers": [0, 1, 1, 0, 1, 0, 0]}, id="smollm3-flags"),
        pytest.param("llama4_text", {**FEW, "no_rope_layers": []}, id="llama4"),
        pytest.param("cohere2", {}, id="cohere2"),
        pytest.param("cohere2", {"sliding_window_pattern": 2}, id="cohere2-pattern"),
        pytest.param("exaone4", {"sliding_window": 4, "sliding_window_pattern": 3}, id="exaone4"),
        pytest.param("exaone4", ALL_FULL, id="exaone4-all"),
        pytest.param("afmoe", {**FEW, "global_attn_every_n_layers": 3}, id="afmoe"),
        pytest.param("beam", {**FEW, "n_group": 1, "topk_group": 1}, id="beam"),
        pytest.param("llama", {}, id="llama"),
        # Layers of linear attention, convolutions and recurrences.
        pytest.param("qwen3_next", {**FEW, **LINEAR}, id="qwen3-next"),
        pytest.param(
            "qwen3_next", {**FEW, **LINEAR, "full_attention_interval": 3}, id="qwen3-next-interval"
        ),
        pytest.param("qwen3_5_text", LINEAR, id="qwen3.5"),
        pytest.param("minimax", {**FEW, "block_size": 4}, id="minimax"),
        pytest.param("olmo_hybrid", LINEAR, id="olmo-hybrid"),
        pytest.param("lfm2", {"full_attn_idxs": [1, 4]}, id="lfm2"),
        pytest.param("bamba", {**MAMBA, "attn_layer_indices": [2, 3]}, id="bamba"),
        pytest.param(
            "recurrent_gemma",
            {"block_types": ["recurrent", "attention"], "lru_width": 64},
            id="recurrent-gemma",
        ),
    ],
)
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "published"])
@pytest.mark.filterwarnings("ignore")
def test_layers_without_rotation_are_those_that_call_none(kind, given, saved, monkeypatch):
    """A file that transformers saved lists them; one that was published may name the rule."""
    config = CONFIG_MAPPING[kind](**{**DEEP, **given})
    folder = kind.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    now, rotated = [None], set()
    for name in ("apply_rotary_pos_emb", "apply_rotary_emb"):
        plain = getattr(module, name, None)
        if plain is not None:

            def spy(*arguments, plain=plain, **keywords):
                rotated.add(now[0])
                return plain(*arguments, **keywords)

            monkeypatch.setattr(module, name, spy)
    model = AutoModel.from_config(config)
    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, i=index: now.__setitem__(0, i))
    model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    assert rotated

    published = {"model_type": kind, **DEEP, **given}
    if kind == "beam":
        published |= {key: getattr(config, key) for key in ("layer_types", "rope_parameters")}
    read = configs.read_positions(json.loads(config.to_json_string()) if saved else published)

    still = () if read.without_rope is None else read.without_rope[0]
    assert set(range(6)) - rotated == set(still)
    given = json.loads(config.to_json_string()) if saved else published
    layers = configs.read_layers(given)
    assert [i for i, each in enumerate(layers) if each is not None] == sorted(rotated)


@pytest.mark.parametrize(
    ("file", "still", "source"),
    [
        pytest.param(
            {"attn_type_list": [0, 0, 1, 0]}, (0, 1, 3), "attn_type_list", id="minimax-01"
        ),
        pytest.param(
            {"layer_types": ["mamba", "attention"] * 2}, (0, 2), "layer_types", id="mamba"
        ),
        pytest.param(
            {"layers_block_type": ["mamba", "hybrid", "mlp", "attention"]},
            (0, 2),
            "layers_block_type",
            id="blocks",
        ),
        pytest.param(
            {"layer_types": ["conv", "full_attention"] * 2, "no_rope_layers": [1, 0, 1, 1]},
            (0, 1, 2),
            "no_rope_layers, layer_types",
            id="two-reasons",
        ),
    ],
)
def test_layers_without_attention_have_no_rotation(file, still, source):
    """Files of models that transformers does not have, and keys that it has renamed."""
    file = {**SIZES, "num_hidden_layers": 4, "rope_theta": 1e4, **file}
    layers = posenc.rope_layers(file)
    assert tuple(i for i, each in enumerate(layers) if each is None) == still
    assert configs.read_positions(file).without_rope == (still, source)
    with pytest.raises(ValueError, match="layer_type must be one of"):
        RoPE.from_config(file, layer_type="linear_attention")


@knows_all_families
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "longcat_flash", "minicpm3"])
@pytest.mark.parametrize("factor", [1.0, 40.0])
@pytest.mark.parametrize("all_dim", [0, 0.7], ids=["plain", "mscale_all_dim"])
@pytest.mark.filterwarnings("ignore")
def test_the_softmax_scale_is_that_of_the_attention(kind, factor, all_dim):
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 64}
    rope |= {"mscale": 0.7, "mscale_all_dim": all_dim, "rope_theta": 1e4}
    sizes = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "rope_parameters": rope}
    config = CONFIG_MAPPING[kind](**sizes)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    scales = {each.scaling for each in model.modules() if hasattr(each, "kv_b_proj")}
    found = configs.read_positions(config).softmax_scale
    assert list(scales) == [pytest.approx(found[0], rel=1e-12)]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA_3_2 = {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192,
             "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "trained", "longest"),
    [
        pytest.param(
            {"max_position_embeddings": 4096},
            (4096, "max_position_embeddings"),
            (4096, "max_position_embeddings"),
            id="plain",
        ),
        pytest.param(
            {"rope_scaling": YARN, "max_position_embeddings": 131072},
            (32768, "original_max_position_embeddings"),
            (131072, "max_position_embeddings"),
            id="yarn",
        ),
        pytest.param(
            {"rope_scaling": YARN, "max_position_embeddings": 32768},
            (32768, "max_position_embeddings"),
            (131072, "factor * max_position_embeddings"),
            id="yarn-named-before",
        ),
        pytest.param(
            {"rope_scaling": LLAMA_3_2, "max_position_embeddings": 131072},
            (8192, "original_max_position_embeddings"),
            (131072, "max_position_embeddings"),
            id="llama-3.2-names-less-than-its-factor",
        ),
        pytest.param(
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 4096},
            None,
            (4096, "max_position_embeddings"),
            id="linear-does-not-say",
        ),
        pytest.param({}, None, None, id="nothing"),
        pytest.param(
            {"model_type": "opt", "max_position_embeddings": 2048},
            (2048, "max_position_embeddings"),
            (2048, "max_position_embeddings"),
            id="rows-that-are-no-positions",
        ),
        pytest.param(
            {"model_type": "mpt", "n_heads": 4, "max_seq_len": 2048},
            (2048, "max_seq_len"),
            None,
            id="a-bias-has-no-end",
        ),
    ],
)
def test_the_trained_and_the_maximal_length(config, trained, longest):
    found = configs.read_positions({**SIZES, **config})
    assert (found.trained_length, found.max_length) == (trained, longest)


@pytest.mark.parametrize("kind", ["llama", "smollm3", "cohere2"])
def test_a_count_of_layers_that_no_model_has_is_refused(kind):
    """A file of a few bytes may name any number, and a list of so many layers is never built."""
    config = {**SIZES, "model_type": kind, "num_hidden_layers": 10**9}
    with pytest.raises(ValueError, match="num_hidden_layers must be at most 4096"):
        configs.read_positions(config)
