import copy
import json
import os
import re

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from posenc import RoPE, axes, configs, scaling
from posenc.configs import reader

SIZES = {"hidden_size": 512, "num_attention_heads": 8}
LENGTH, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
DYNAMIC = {"type": "dynamic", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 2.0, ORIGINAL: 4096}
TYPES = sorted(CONFIG_MAPPING.keys())
CHOSEN = TYPES if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else TYPES[::9]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({"rope_theta": 5e5}, {"base": 5e5}, id="rope_theta"),
        pytest.param({}, {"base": 1e4, "head_dim": 64, "rotary_dim": 64}, id="llama-1"),
        pytest.param(
            {"rotary_emb_base": 2e4, "rotary_pct": 0.25},
            {"base": 2e4, "rotary_dim": 16},
            id="gpt-neox",
        ),
        pytest.param({"partial_rotary_factor": 0.5, "head_dim": 80}, {"rotary_dim": 40}, id="phi"),
        pytest.param(
            {
                "n_embd": 256,
                "n_head": 4,
                "rotary_dim": 32,
                "model_type": "gptj",
                "hidden_size": None,
            },
            {"head_dim": 64, "rotary_dim": 32, "interleaved": True},
            id="gptj",
        ),
        pytest.param(
            {"rope_scaling": {"type": "linear", "factor": 2}},
            {"scaling": scaling.Linear(2.0)},
            id="legacy-type",
        ),
        pytest.param(
            {"model_type": "llama", "posenc_rope_layout": "interleaved"},
            {"interleaved": True, "interleaved_out": None},
            id="converted",
        ),
        pytest.param(
            {
                "rope_theta": 1e5,
                "rope_interleaved": False,
                "use_rope_scaling": True,
                "rope_head_dim": 64,
                "partial_rotary_factors": [1.0],
                "rotary_embedding": True,
                "num_position_embeddings": 64,
                "max_2d_position_embeddings": 64,
            },
            {"base": 1e5, "rotary_dim": 64},
            id="keys-of-others",
        ),
        pytest.param(
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 2048},
            {"scaling": scaling.DynamicNTK(4.0, original_length=2048)},
            id="dynamic",
        ),
        pytest.param(
            {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32}},
            {"scaling": scaling.NTK(1000.0)},
            id="hunyuan-alpha",
        ),
        pytest.param(
            {
                "rope_scaling": {
                    "type": "su",
                    "short_factor": [1.0] * 32,
                    "long_factor": [2.0] * 32,
                },
                "original_max_position_embeddings": 4096,
                "max_position_embeddings": 131072,
            },
            {
                "scaling": scaling.LongRoPE(
                    (1.0,) * 32, long_factor=(2.0,) * 32, original_length=4096, factor=32.0
                )
            },
            id="phi3-su",
        ),
        pytest.param(
            {
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0] * 32,
                    "long_factor": [2.0] * 32,
                    "short_mscale": 1.2,
                    "long_mscale": 1.3,
                    "original_max_position_embeddings": 4096,
                },
                "max_position_embeddings": 131072,
            },
            {
                "scaling": scaling.LongRoPE(
                    (1.0,) * 32,
                    long_factor=(2.0,) * 32,
                    original_length=4096,
                    factor=32.0,
                    attention_factor=1.3,
                    short_attention_factor=1.2,
                )
            },
            id="phimoe-mscale",
        ),
        pytest.param(
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 4096,
                },
                "model_type": "deepseek_v3",
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 128,
            },
            {
                "scaling": scaling.YaRN(40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0),
                "head_dim": 64,
                "interleaved": True,
                "interleaved_out": False,
            },
            id="deepseek-v3",
        ),
        pytest.param(
            {
                "rope_parameters": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                }
            },
            {"scaling": scaling.Proportional(0.25), "rotary_dim": 64},
            id="gemma4",
        ),
        pytest.param(
            {
                "rope_scaling": {
                    "type": "mrope",
                    "rope_type": "default",
                    "mrope_section": [8, 12, 12],
                }
            },
            {"axes": axes.Sections((8, 12, 12)), "scaling": None},
            id="qwen2-vl",
        ),
        pytest.param(
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [12, 10, 10],
                    "mrope_interleaved": True,
                }
            },
            {"axes": axes.Sections((12, 10, 10), interleaved=True)},
            id="qwen3-vl",
        ),
        pytest.param({"model_type": "stablelm"}, {"rotary_dim": 16}, id="share-of-the-family"),
        pytest.param(
            {"model_type": "deepseek_v3", "rope_interleave": False},
            {"interleaved": False},
            id="rope_interleave",
        ),
    ],
)
def test_every_spelling_is_read(config, expected):
    recipe = configs.read({**SIZES, **config})
    assert {name: getattr(recipe, name) for name in expected} == expected
    assert RoPE.from_config({**SIZES, **config}).head_dim == recipe.head_dim


def test_layer_types_may_have_different_rotations():
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 1e4}
    config = {**SIZES, "rope_parameters": {"full_attention": full, "sliding_attention": local}}
    assert reader.rotating_types(configs.open_config(config)) == (
        "full_attention",
        "sliding_attention",
    )
    assert configs.read(config, layer_type="full_attention").scaling == scaling.Linear(8.0)
    assert configs.read(config, layer_type="sliding_attention").base == 1e4
    with pytest.raises(ValueError, match="layer_type must be given"):
        configs.read(config)
    with pytest.raises(ValueError, match=r"layer_type must be one of .*full_attention"):
        configs.read(config, layer_type="global")
    config["rope_parameters"]["sliding_attention"] = None
    config["layer_types"] = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="layers with null do not rotate"):
        configs.read(config, layer_type="sliding_attention")


def test_files_folders_and_objects_are_read(tmp_path):
    config = {"text_config": {**SIZES, "rope_theta": 3e4}, "model_type": "some_vl"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))

    class Config:
        def to_dict(self):
            return config

    for source in (path, str(path), tmp_path, config, Config()):
        recipe = configs.read(source)
        assert recipe.base == 3e4
        assert recipe.sources["base"] == "text_config.rope_theta"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"rope_scaling": {"type": "cubic", "factor": 2.0}}, "rope_scaling.type must be one of"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor must be given"),
        ({"rope_scaling": {"rope_type": {}, "factor": 2.0}}, "rope_scaling.rope_type must be one"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor must be at le"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "must agree"),
        ({"rope_theta": 1e4, "rotary_emb_base": 1e5}, "rope_theta and rotary_emb_base"),
        ({"rope_scaling": {"factor": 2.0}, "rope_parameters": {"factor": 3.0}}, "must agree"),
        ({"rotary_dim": 32, "partial_rotary_factor": 0.25}, "rotary_dim and partial"),
        ({"partial_rotary_factor": 1.5}, "even number of 64"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "max_position_embeddings"),
        ({"hidden_size": None}, "head_dim must be in the config"),
        ({"head_dim": 2**20}, "at most"),
        ({"rope_scaling": {"mrope_section": [8, 8, 8]}}, "add up to 32"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.rope_type must be given"),
        ({"rope_scaling": {"type": "linear", "fator": 2.0}}, "Did you mean factor?"),
        ({"rope_tehta": 1e6}, "rope_tehta must be a known key.*\n.*rope_theta"),
        ({"posenc_rope_layout": "thirds"}, "'half' or 'interleaved'"),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {**DYNAMIC, LENGTH: 512}},
            f"rope_scaling.{LENGTH} and {LENGTH} must agree, got 512 and 4096",
        ),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {**DYNAMIC, ORIGINAL: 512}},
            f"rope_scaling.{ORIGINAL} and {LENGTH} must agree, got 512 and 4096",
        ),
        (
            {LENGTH: 4096, "rope_scaling": {"type": "yarn", LENGTH: 512, ORIGINAL: 256}},
            f"rope_scaling.{LENGTH} and {LENGTH} must agree",
        ),
        (
            {"rope_parameters": {"full_attention": PLAIN, "rope_theta": 5e5}},
            "rope_parameters.rope_theta must repeat that of a layer type",
        ),
        (
            {"rope_parameters": {"full_attention": PLAIN, "factor": 8.0}},
            "rope_parameters.factor must repeat that of a layer type",
        ),
        (
            {"rope_parameters": {"full_attention": PLAIN, "rope_type": "yarn"}},
            "rope_parameters.rope_type must repeat that of a layer type",
        ),
        (
            {"rope_parameters": {"full_attention": PLAIN, "rope_tehta": 5e5}},
            "rope_parameters.rope_tehta must be a known key.*\n.*Did you mean rope_theta",
        ),
        (
            {"rope_parameters": {"full_attention": {**PLAIN, "facter": 5e5}}},
            "rope_parameters.full_attention.facter must be a known key",
        ),
        (
            {"layer_types": ["full_attention"], "rope_parameters": {"full_atention": PLAIN}},
            "rope_parameters.full_atention must be a known key.*\n.*Did you mean full_attention",
        ),
        (
            {"layer_types": ["full_attention"], "rope_parameters": {"main": PLAIN}},
            "rope_parameters.main must be a known key.*\n.*name it in layer_types",
        ),
        ({"rope_parameters": {"extra": {}}}, "rope_parameters.extra must be a known key"),
        ({"rope_scaling": {"rope_type": "default", "factor": 8.0}}, "factor must be left out"),
        (
            {"rope_scaling": {"type": "linear", "factor": 8.0, "low_freq_factor": 4.0}},
            "low_freq_factor must be left out, because rope_scaling.type='linear' does not use it"
            ".*\n.*llama3",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 4.0}},
            "factor must be left out, because rope_scaling.type='dynamic' with alpha",
        ),
    ],
)
def test_unknown_and_contradictory_keys_are_named(config, text):
    with pytest.raises(ValueError, match=text):
        RoPE.from_config({**SIZES, **config})


@pytest.mark.parametrize(
    ("rope", "layer_type"),
    [
        # Laguna XS.2 has the length beside its layer types; transformers before 5.17 wrote the
        # class's base and the default type there, for models of other authors.
        pytest.param({"full_attention": YARN, ORIGINAL: 4096}, "full_attention", id="laguna"),
        pytest.param(
            {
                "full_attention": {**PLAIN, "rope_theta": 1e6},
                "sliding_attention": PLAIN,
                "rope_theta": 1e4,
                "rope_type": "default",
                "partial_rotary_factor": None,
            },
            "full_attention",
            id="written-by-transformers",
        ),
        pytest.param({"rope_type": "default", "factor": 1.0}, None, id="minicpm-sala"),
        pytest.param({"type": "linear", "factor": 4.0, ORIGINAL: 512}, None, id="linear"),
        pytest.param({**YARN, "max_position_embeddings": 16384}, None, id="ministral3"),
        pytest.param({**YARN, "finetuned": True, "type": "yarn"}, None, id="yarn-llama-2"),
        pytest.param({**PLAIN, "attention_factor": None}, None, id="null"),
    ],
)
def test_keys_of_real_files_that_change_nothing_are_read(rope, layer_type):
    config = {**SIZES, "max_position_embeddings": 8192, "rope_parameters": rope}
    assert RoPE.from_config(config, layer_type=layer_type).head_dim == 64


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param(None, id="none"),
        pytest.param({"rope_type": "linear", "factor": 2.0}, id="linear"),
        pytest.param({"rope_type": "dynamic", "factor": 2.0}, id="dynamic"),
        pytest.param(YARN, id="yarn"),
        pytest.param(
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            id="llama3",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_transformers_writes_has_no_key_too_many(rope):
    """A class writes keys of its own beside those it was given, and they are no mistakes."""
    tried = 0
    for kind in CHOSEN:
        given = {} if rope is None else {"rope_scaling": copy.deepcopy(rope)}
        try:
            config = json.loads(CONFIG_MAPPING[kind](**given).to_json_string())
        except (AttributeError, KeyError, TypeError, ValueError, StrictDataclassError):
            # A class that refuses the rule, or that is made of two others.
            continue
        try:
            configs.read_positions(config)
        except (TypeError, ValueError) as error:
            words = str(error)
            assert not re.search(
                "a known key|must be left out|must repeat|embeddings must agree", words
            ), kind
        tried += 1
    assert tried > 10  # how many take the rule differs from release to release


def test_a_dict_in_place_of_a_number_is_no_layer_type():
    with pytest.raises(TypeError, match="factor must be a number"):
        RoPE.from_config({**SIZES, "rope_scaling": {"type": "linear", "factor": {}}})
    with pytest.raises(TypeError, match="rope_theta must be a number"):
        RoPE.from_config({**SIZES, "rope_parameters": {"rope_theta": {}, "factor": 32.0}})


def test_an_object_that_is_no_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot read"):
        RoPE.from_config(tmp_path / "none.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        RoPE.from_config(tmp_path)
    for wrong in (3, None, [SIZES]):
        with pytest.raises(TypeError, match="config must be a dict"):
            RoPE.from_config(wrong)
