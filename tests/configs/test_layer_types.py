"""The types of layers that a file leaves out, and what attention sees in them, by transformers."""

import dataclasses
import importlib
import json
import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModel

import posenc
from posenc import RoPE, configs, rope_layers
from support.configs import GEMMA3, MODERNBERT
from support.hf_models import SMALL, knows_all_families

# Keys that older files have in place of layer_types, with a value that is nobody's default.
CHANGES = [
    {},
    {"sliding_window_pattern": 3},
    {"global_attn_every_n_layers": 2},
    {"full_attention_interval": 3},
    {"layer_group_size": 2},
    {"no_rope_layer_interval": 3},
    {"no_rope_layers": [1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1]},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    {"sliding_window": None},
]
# Layers of the first follow no cycle. The others have full attention alone, unless a file switches
# use_sliding_window on; then their windows go by rules of their own.
OWN = {
    "deepseek_v4", "dots3_note_text", "flint", "kimi_linear", "lfm3", "mimo_v2_flash",
    "muse_glimmer_text", "muse_spark_text",
}  # fmt: skip
SWITCHED = {"smollm3", "qwen2_moe", "deepseek_ocr2_encoder"}


def made(kind, given):
    """What the class makes of a file; None for a file that it cannot read."""
    try:
        return CONFIG_MAPPING[kind](**given)
    except (TypeError, ValueError, ZeroDivisionError, StrictDataclassError):
        return None


def typed():
    """The types that rotate and whose class names the types of its layers."""
    for kind in CONFIG_MAPPING:
        known = configs.model_defaults(kind)
        fields = {each.name for each in dataclasses.fields(CONFIG_MAPPING[kind])}
        if (
            "layer_types" in fields
            and known
            and not {"axial", "positions", "refused"} & known.keys()
        ):
            yield kind


@knows_all_families
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [1, 6, 13])
@pytest.mark.parametrize("given", CHANGES, ids=lambda given: next(iter(given), "plain"))
def test_layer_types_are_those_that_transformers_fills_in(given, count):
    """Hub files of Gemma 3, ModernBERT, Cohere 2 and others say a period, or nothing at all."""
    compared = set()
    for kind in typed():
        file = {"num_hidden_layers": count, **given}
        config = made(kind, file)
        wanted = getattr(config, "layer_types", None)
        if wanted is None or kind in OWN or (kind in SWITCHED and "use_sliding_window" in given):
            continue
        found = configs.open_config({"model_type": kind, **file}).top.get("layer_types")
        # A file that lists nothing is one of full attention, or of one type that is not known.
        assert list(found or wanted[:1] * count) == list(wanted), kind
        if found is None:
            assert wanted[0] != "sliding_attention" or file.get("sliding_window", 1) is None
        compared.add(kind)
    # Some classes refuse what others take.
    assert {"gemma3_text", "cohere2", "gpt_oss", "qwen2"} <= compared
    assert len(compared) > 40


def test_rotations_of_hub_files_follow_the_layers():
    """Neither file names layer_types: Gemma 3 says a period, ModernBERT another."""
    bases = [rope.base for rope in rope_layers(GEMMA3)]
    assert bases == [1e6 if i % 6 == 5 else 1e4 for i in range(26)]
    bases = [rope.base for rope in rope_layers(MODERNBERT)]
    assert bases == [1.6e5 if i % 3 == 0 else 1e4 for i in range(22)]


DEEP = {**SMALL, "num_hidden_layers": 6, "head_dim": 16}
FEW = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 8}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
BERT = {key: value for key, value in DEEP.items() if key not in ("head_dim", "num_key_value_heads")}


@knows_all_families
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        pytest.param("gemma2", {**DEEP, "sliding_window": 5}, id="gemma2"),
        pytest.param("gemma3_text", {**DEEP, "sliding_window": 5}, id="gemma3"),
        pytest.param(
            "gemma3_text",
            {**DEEP, "sliding_window": 8, "use_bidirectional_attention": True},
            id="embedding-gemma",
        ),
        pytest.param(
            "gpt_oss", {**DEEP, **FEW, "sliding_window": 3, "rope_parameters": PLAIN}, id="gpt-oss"
        ),
        pytest.param("modernbert", {**BERT, "local_attention": 6}, id="modernbert"),
        pytest.param("modernbert-decoder", {**BERT, "local_attention": 6}, id="modernbert-decoder"),
        pytest.param("mistral", {**DEEP, "sliding_window": 4}, id="mistral"),
        pytest.param("mistral", {**DEEP, "sliding_window": None}, id="mistral-without"),
        pytest.param("phi3", {**BERT, "sliding_window": 7}, id="phi3"),
        pytest.param(
            "qwen2",
            {**DEEP, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
            id="qwen2",
        ),
        pytest.param("qwen2", {**DEEP, "sliding_window": 4}, id="qwen2-without"),
        pytest.param("llama", {**DEEP, "sliding_window": 4}, id="llama"),
        pytest.param("llama4_text", {**DEEP, **FEW, "attention_chunk_size": 4}, id="llama4"),
    ],
)
def test_windows_and_chunks_are_those_of_the_models_masks(kind, given):
    """Every layer's own mask, read off the model as it runs."""
    config = CONFIG_MAPPING[kind](**given)
    config._attn_implementation = "eager"
    model, seen, length = AutoModel.from_config(config).eval(), [], 16
    for layer in model.layers:
        layer.register_forward_pre_hook(
            lambda _, args, kw: seen.append(kw["attention_mask"]), with_kwargs=True
        )
    with torch.no_grad():
        model(input_ids=torch.full((1, length), 5))

    found = configs.read_positions({"model_type": kind, **given})
    types = ["full_attention"] * 6 if found.layer_types is None else found.layer_types[0]
    if found.window is not None and found.layer_types is None:
        types = ["sliding_attention"] * 6
    i, j = torch.arange(length)[:, None], torch.arange(length)
    causal = kind != "modernbert" and not given.get("use_bidirectional_attention")
    for name, mask in zip(types, seen, strict=True):
        wanted = j <= i if causal else torch.ones(length, length, dtype=torch.bool)
        if name == "sliding_attention":
            before, after = found.window[0]
            wanted = wanted & (i - j <= before) & (j - i <= after)
        elif name == "chunked_attention":
            wanted = wanted & (i // found.chunk[0] == j // found.chunk[0])
        visible = wanted.new_ones(length, length) if mask is None else mask[0, 0] == 0
        assert torch.equal(visible, wanted)


@knows_all_families
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama4_text", "ministral3"])
def test_the_scale_of_queries_is_that_of_the_attention(kind):
    """One token many times: Llama 4's queries without rotation, and Mistral's function."""
    at = torch.arange(40)[None]
    if kind == "ministral3":
        from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 3}
        file = {"model_type": kind, "rope_parameters": {**rope, "llama_4_scaling_beta": 0.3}}
        wanted = get_llama_4_attn_scale(at, 0.3, 3).flatten()
    else:
        from transformers import AttentionInterface

        given = {**DEEP, **FEW, "floor_scale": 3, "attn_scale": 0.3}
        config, seen = CONFIG_MAPPING[kind](**given), []

        def attend(module, query, *_, **__):
            seen.append(query)
            return torch.zeros_like(query).transpose(1, 2), None

        AttentionInterface.register("posenc-scale", attend)
        config._attn_implementation = "posenc-scale"
        model, file = AutoModel.from_config(config).eval(), {"model_type": kind, **given}
        with torch.no_grad():
            model(input_ids=torch.full((1, 40), 5), use_cache=False)
        wanted = (seen[3][0, 0] / seen[3][0, 0, :1]).mean(-1)

    text, where = configs.read_positions(file).query_scale[0].split(" at position p")

    assert where == (", in layers without RoPE" if kind == "llama4_text" else "")
    found = torch.tensor([eval(text, {"log": math.log, "p": int(p)}) for p in at[0]])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "given",
    [
        {"chunk_size": 16},
        {"chunk_size": 16, "local_size": 8},
        {"chunk_size": "16", "local_size": 4},
        {"chunk_size": 16, "local_size": 4, "original_max_position_embeddings": -1},
    ],
)
def test_chunks_that_cannot_be_are_an_error(given):
    file = {"head_dim": 64, "dual_chunk_attention_config": given}
    with pytest.raises((ValueError, TypeError), match=r"from_config: .*(chunk_size|embeddings)"):
        configs.read_positions(file)


@knows_all_families
@pytest.mark.parametrize("kind", ["dinov3_vit", "eomt_dinov3", "sapiens2"])
def test_an_image_of_dinov3_is_rotated_as_by_the_model(kind):
    """Angles of transformers are float32, of up to 2 pi: a few roundings are 1e-6 of a vector."""
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    config = CONFIG_MAPPING[kind](hidden_size=128, num_attention_heads=2, num_register_tokens=3)
    (name,) = (
        each for each in vars(module) if each.endswith(("RopePositionEmbedding", "RotaryEmbedding"))
    )
    tables, size = getattr(module, name)(config).eval(), config.patch_size
    cos, sin = tables(torch.zeros(1, 3, 3 * size, 5 * size))
    q = torch.randn(1, 2, 4 + 15, 64, generator=torch.Generator().manual_seed(0))
    wanted = module.apply_rotary_pos_emb(q, q, cos, sin)[0]

    file = json.loads(config.to_json_string())
    rope, found = RoPE.from_config(file), configs.read_positions(file)

    names = {"math": math, "posenc": posenc, "rows": 3, "columns": 5}
    at = eval(found.position_ids[0], names)
    torch.testing.assert_close(rope.rotate(q, position_ids=at), wanted, rtol=0, atol=1e-5)
