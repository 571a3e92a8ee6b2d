"""Every family the converter knows, built tiny from its config class and run before and after.

The suite takes `FORMS` and one in eighteen; ``HYPOTHESIS_PROFILE=thorough`` takes them all.
"""

import contextlib
import importlib
import inspect
import os

import pytest
import torch
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from posenc import configs
from posenc.interop.checkpoints import convert, families

# The older spelling of a family whose newer one is here.
ALIASES = {"qwen2_vl", "qwen2_5_vl"}
KNOWN = sorted(families.CONVERTED - ALIASES)
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "vocab_size"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "eos_token_id"), 2),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "pad_token_id": 0,
}
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
AXIAL = {"rope_parameters": AXES}
PARTIAL_AXES = {**AXES, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
NO_GROUPS = {"num_key_value_heads": None, "head_dim": None}
GPTJ = {**NO_GROUPS, "rotary_dim": 8}
# What a family needs in addition to the sizes; None leaves one out.
MORE = {
    **dict.fromkeys(("cosmos3_edge_text", "qwen2_vl_text", "qwen2_5_vl_text"), AXIAL),
    **dict.fromkeys(("glm4v_text", "glm_ocr_text", "glm_image_text"), AXIAL),
    "glm4v_moe_text": {"rope_parameters": PARTIAL_AXES},
    **dict.fromkeys(("gpt_neox", "gpt_neox_japanese", "persimmon"), NO_GROUPS),
    **dict.fromkeys(("codegen", "gptj"), GPTJ),
    "lfm2_moe": {"layer_types": ["full_attention"] * 4},
    "bamba": {
        "attn_layer_indices": [0, 2],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "esm": {"position_embedding_type": "rotary"},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 64,
        "laurel_rank": 8,
    },
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"},
    "youtu": {"tie_word_embeddings": False},
}
# Families and keys that change which rows move, which the suite always takes.
FORMS = [
    pytest.param("llama", {}, id="grouped-queries"),
    pytest.param("qwen2", {}, id="biases"),
    pytest.param("qwen3", {}, id="norms-of-heads"),
    pytest.param("olmo2", {}, id="norms-of-all-heads"),
    pytest.param("gpt_neox", {}, id="fused-by-head-partial"),
    pytest.param("falcon", {}, id="one-key-head"),
    pytest.param("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, id="by-group"),
    pytest.param("phi3", {}, id="fused"),
    pytest.param("glm", {}, id="partial"),
    pytest.param("cohere", {"use_qk_norm": True}, id="norms-of-each-head"),
    pytest.param("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}, id="latent-keys"),
]
CHOSEN = KNOWN if THOROUGH else KNOWN[::18]
# Their tables have one column for a pair.
NOT_DOUBLED = {"codegen", "gpt_oss", "gptj", "openai_privacy_filter"}
ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_emb")


def build(family, more):
    torch.manual_seed(0)
    kind = CONFIG_MAPPING[family]
    fields = {*inspect.signature(kind.__init__).parameters, *kind.__dataclass_fields__}
    latent = {"num_key_value_heads": 4, "head_dim": None} if "kv_lora_rank" in fields else {}
    sizes = {key: value for key, value in SIZES.items() if key in fields}
    sizes |= latent | MORE.get(family, {}) | more
    config = kind(**{key: value for key, value in sizes.items() if value is not None})
    config._attn_implementation = "eager"
    maps = ("CAUSAL_LM", "MASKED_LM")
    found = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING").get(kind, None) for name in maps]
    found.append(modeling_auto.MODEL_MAPPING.get(kind, None))
    model = next(each for each in found if each is not None)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.dim() == 1 else 0.0
            parameter.normal_(centre, 0.2)
    return model


def run(model):
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=tokens)[0]


def relay(x, width, to):
    """The first channels of a head in the other layout."""
    grid = (2, width // 2) if to == "interleaved" else (width // 2, 2)
    turned = x[..., :width].unflatten(-1, grid).mT.flatten(-2)
    return torch.cat((turned, x[..., width:]), dim=-1)


def pairing(rotate, x, width):
    """Which channels the family's own rotation mixes, seen from unit vectors."""

    def reached(channel):
        unit = torch.zeros_like(x)
        unit[..., channel] = 1
        return set(rotate(unit).abs().flatten(0, -2).amax(0).nonzero().flatten().tolist())

    first = reached(0)
    assert len(first) == 2
    same = [name for name, at in (("interleaved", 1), ("half", width // 2)) if reached(at) == first]
    assert len(same) == 1
    return same[0]


@contextlib.contextmanager
def rotation_in_other_layout(monkeypatch, family, model, native):
    """The family's own rotation, with queries and keys brought to its layout and back."""
    other = "half" if native == "interleaved" else "interleaved"
    module = importlib.import_module(type(model).__module__)
    calls = []

    def wrap(original):
        def apply(q, k, *tables, **more):
            # Some take queries and keys, and some take one tensor and its angles.
            both = bool(tables) and k.dim() == q.dim() and k.shape[-1] == q.shape[-1]
            angles = tables[0] if both else k
            twice = angles.is_complex() or family in NOT_DOUBLED
            width = angles.shape[-1] * (2 if twice else 1)

            def rotate(x):
                y = original(x, x if both else k, *tables, **more)
                return y[0] if both else y

            if not calls:
                calls.append(pairing(rotate, q, width))
            mine = [relay(x, width, native) for x in ((q, k) if both else (q,))]
            out = original(*mine, *tables, **more) if both else original(*mine, k, *tables, **more)
            if isinstance(out, tuple):
                return tuple(relay(y, width, other) for y in out)
            return relay(out, width, other)

        return apply

    with monkeypatch.context() as patch:
        for name in ROTATIONS:
            if hasattr(module, name):
                patch.setattr(module, name, wrap(getattr(module, name)))
        yield calls


@pytest.mark.parametrize(
    ("family", "more"), [*FORMS, *(pytest.param(name, {}, id=name) for name in CHOSEN)]
)
@pytest.mark.filterwarnings("default")
def test_a_converted_model_keeps_its_logits_and_comes_back(family, more, tmp_path, monkeypatch):
    """It rotates as the family does, in the other layout; the way back gives the same bytes."""
    model = build(family, more)
    before = run(model)
    model.save_pretrained(tmp_path / "old")
    config = CONFIG_MAPPING[family].from_pretrained(tmp_path / "old").to_dict()
    native = families.from_config(config).layout
    other = "half" if native == "interleaved" else "interleaved"

    report = convert(tmp_path / "old", tmp_path / "new", to=other)

    assert report.marked == (family not in families.SWITCHED)
    converted = type(model).from_pretrained(tmp_path / "new", attn_implementation="eager").eval()
    if family in families.SWITCHED:
        after = run(converted)
    else:
        confused = run(converted)
        assert (confused - before).abs().max() > 1e-3 * before.abs().max()
        with rotation_in_other_layout(monkeypatch, family, converted, native) as calls:
            after = run(converted)
        assert calls == [native]
    assert (after - before).abs().max() <= 2e-5 * before.abs().max()
    convert(tmp_path / "new", tmp_path / "back", to=native)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "old" / name).read_bytes()


@pytest.mark.parametrize("family", configs.types_with("num_attention_heads"))
def test_heads_that_a_file_leaves_out_are_those_of_its_class(family):
    made = CONFIG_MAPPING[family]()
    text = {"model_type": family, "hidden_size": 2560}
    for config in (text, {"model_type": "of several", "text_config": text, "vision_config": {}}):
        heads = families.from_config(config).heads(0)
        assert heads.num_heads == made.num_attention_heads
        assert heads.num_kv_heads == made.num_key_value_heads
        assert heads.head_dim == made.head_dim
    wide = families.from_config({**text, "num_attention_heads": 16, "num_key_value_heads": 8})
    assert (wide.heads(0).num_heads, wide.heads(0).num_kv_heads) == (16, 8)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"kv_channels": 32}, id="width-of-megatron"),
        pytest.param({"rotary_emb_fraction": 0.5}, id="share-of-nomic"),
        pytest.param({"rotary_pct": 0.25}, id="share-of-neox"),
        pytest.param({"model_type": "stablelm"}, id="share-of-the-family"),
        pytest.param(
            {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.25}},
            id="proportional",
        ),
    ],
)
def test_rows_are_divided_as_the_rotation_reads_them(more):
    """A spelling that only one of the two knew would move rows that do not rotate."""
    config = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, **more}
    heads, recipe = families.from_config(config).heads(0), configs.read(config)
    assert (heads.head_dim, heads.rotated) == (recipe.head_dim, recipe.rotary_dim)


def test_a_width_that_the_heads_cannot_share_is_asked_for():
    """transformers rounds it down, and its weights then have rows that belong to no head."""
    config = {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3}
    words = r"hidden_size must be a multiple of the 3 heads.*\n.*--head-dim"
    with pytest.raises(ValueError, match=words):
        families.from_config(config).heads(0)
