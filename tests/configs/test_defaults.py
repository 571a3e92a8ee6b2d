"""Configs as they are published: what they leave out, and where they say it."""

import os

import pytest
import transformers
from transformers import CONFIG_MAPPING

from posenc import configs
from posenc.configs import reader
from support.hf_models import knows_all_families

SIZES = {"hidden_size": 512, "num_attention_heads": 8}
# Widths that the class works out from others; and configs that have no default.
OTHER = {"dbrx", "gradium_phonon_tts", "pocket_tts", "zamba2", "gemma4_assistant", "nougat"}
TYPES = sorted(set(CONFIG_MAPPING.keys()) - OTHER)
# Types that older releases lack.
SINCE_5_23 = {"lfm3", "internlm3", "iquestcoder", "granite_docling_text"}
SINCE_5_23 |= {"dots3_note", "dots3_note_text", "dots3_note_audio_encoder"}
SINCE_5_23 |= {"dots3_note_vision_encoder", "inkling2_vision", "lfm3_vl_vision"}
CHOSEN = TYPES if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else TYPES[::9]


def rotations(config):
    """The arguments of the rotation by layer type; a text where it cannot be read."""
    try:
        types = reader.rotating_types(configs.open_config(config))
        found = [configs.read(config, layer_type=each) for each in types]
    except (TypeError, ValueError) as error:
        return str(error)
    keys = ("head_dim", "base", "rotary_dim", "interleaved", "interleaved_out", "scaling", "axes")
    return {
        each: [getattr(recipe, key) for key in keys]
        for each, recipe in zip(types, found, strict=True)
    }


def default_configs():
    """The type, whole config and rotations of every text model that rotates and can be read."""
    for kind in CHOSEN:
        try:
            config = CONFIG_MAPPING[kind]().to_dict()
        except ValueError:
            # One that is made of two others has no default.
            continue
        whole = configs.text_part(config)[0] is config and config.get("rope_parameters")
        wanted = rotations(config)
        if whole and not isinstance(wanted, str):
            yield kind, config, wanted


@pytest.mark.filterwarnings("ignore")
def test_defaults_are_those_of_the_config_class():
    sizes = ("model_type", "hidden_size", "num_attention_heads")
    tried = 0
    for kind, config, wanted in default_configs():
        got = rotations({key: config[key] for key in sizes if key in config})
        if isinstance(got, str):
            special = "rope_parameters" in configs.model_defaults(config["model_type"])
            assert special or "head_dim must be in the config" in got, kind
        elif len(wanted) > len(got):
            # One for all layers, because they do not differ.
            (one,) = got.values()
            assert all(each == one for each in wanted.values()), kind
        else:
            assert got == wanted, kind
        tried += 1
    assert tried > 10


def test_types_that_rotate_nothing_have_no_rotation_in_their_configs():
    for kind in configs.types_with("positions") & set(TYPES):
        keys = CONFIG_MAPPING[kind]().to_dict()
        assert not [key for key in keys if "rope" in key or "rotary" in key], kind


@knows_all_families
def test_every_type_named_is_one_that_transformers_knows():
    keys = ("rope_theta", "rope_parameters", "head_dim", "qk_rope_head_dim", "layout")
    named = frozenset().union(*map(configs.types_with, (*keys, "rope_interleave")))
    unknown = named - set(CONFIG_MAPPING.keys())
    newer = set() if "lfm3" in CONFIG_MAPPING else SINCE_5_23
    assert unknown == {"kimi_k2"} | newer, transformers.__version__


def test_parts_of_one_model_may_have_different_layouts():
    """The text of dots3_note interleaves; its audio encoder, in the same file, does not."""
    text = {**SIZES, "model_type": "dots3_note_text", "rope_parameters": {"rope_theta": 8e7}}
    whole = {"model_type": "dots3_note", "text_config": text, "vision_config": {}}
    for recipe in map(configs.read, (text, whole)):
        assert (recipe.head_dim, recipe.interleaved, recipe.interleaved_out) == (64, True, False)
    audio = configs.read({**SIZES, "model_type": "dots3_note_audio_encoder"})
    assert (audio.rotary_dim, audio.interleaved, audio.interleaved_out) == (32, False, None)


def test_gemma_3_as_it_is_published():
    """Its files name neither the width of a head nor a base."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "num_attention_heads": 16,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    made = transformers.Gemma3TextConfig(**{**text, "model_type": "gemma3_text"})
    config = {"model_type": "gemma3", "text_config": text}
    assert rotations(config) == rotations(made)
    full = configs.read(config, layer_type="full_attention")
    assert full.sources["base"] == full.sources["head_dim"] == "text_config.model_type"
    with pytest.raises(ValueError, match="because layers differ by model_type"):
        configs.read(config)
    with pytest.raises(ValueError, match="layer_type must be one of"):
        configs.read(config, layer_type="sliding")


@pytest.mark.parametrize("kind", ["gptj", "codegen"])
def test_channels_that_rotate_are_those_of_the_class(kind):
    config = {"model_type": kind, "n_embd": 512, "n_head": 4}
    recipe = configs.read(config)
    assert recipe.rotary_dim == CONFIG_MAPPING[kind]().rotary_dim == 64
    assert recipe.sources["rotary_dim"] == "model_type"
    assert configs.read({**config, "rotary_dim": None}).rotary_dim == 128
    assert configs.read({**config, "partial_rotary_factor": 0.25}).rotary_dim == 32


# Types that rotate, with nothing of it in their configs.
SILENT = {"clvp_decoder", "clvp_encoder", "codegen", "gptj", "roformer"}


@knows_all_families
@pytest.mark.slow
def test_a_model_type_without_a_word_of_rotation_has_no_rope():
    others = ("positions", "position_embeddings_type", "refused")
    for kind in set(TYPES) - SILENT.union(*map(configs.types_with, others)):
        try:
            config = CONFIG_MAPPING[kind]().to_dict()
        except ValueError:
            continue
        if configs.text_part(config)[0] is not config or reader.mentions_rotation(config):
            continue
        with pytest.raises(ValueError, match=r"not known to rotate|must say that positions are"):
            configs.read({**SIZES, "model_type": kind})


@pytest.mark.parametrize(
    ("config", "base"),
    [
        ({"llm_config": {**SIZES, "rope_theta": 3e4}}, "llm_config.rope_theta"),
        (
            {"thinker_config": {"text_config": {**SIZES, "rope_theta": 3e4}, "audio_config": {}}},
            "thinker_config.text_config.rope_theta",
        ),
        # PaliGemma repeats its width above.
        (
            {"hidden_size": 64, "text_config": {**SIZES, "rope_theta": 3e4}},
            "text_config.rope_theta",
        ),
        ({**SIZES, "rope_theta": 3e4, "text_config": {"vocab_size": 8}}, "rope_theta"),
    ],
)
def test_the_text_model_is_found_wherever_it_is_described(config, base):
    recipe = configs.read(config)
    assert (recipe.head_dim, recipe.base) == (64, 3e4)
    assert recipe.sources["base"] == base


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "gpt2"}, "'gpt2' has no rotary embedding. It has a learned table"),
        ({"model_type": "whisper"}, "has no rotary embedding. It has sinusoidal positions"),
        ({"position_embeddings_type": "relative_key"}, r"must say.*\n  Use RelativeKeys"),
        ({"model_type": "bloom"}, "It has ALiBi.\n  Use ALiBi.from_config"),
        ({"model_type": "my_own", "alibi": True}, r"alibi must say.*\n  Use ALiBi\(num_heads\)"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type must say"),
        ({"model_type": "esm"}, "position_embedding_type must say"),
        ({"model_type": "zamba2", "use_mem_rope": False}, "use_mem_rope must say"),
        ({"model_type": "hunyuan_vl_text"}, "channels of a pair"),
        ({"model_type": "gpt_oss"}, "rope_parameters must be given for model_type 'gpt_oss'"),
        ({"model_type": "kimi_linear", "qk_rope_head_dim": 64}, "not known to rotate"),
        ({"model_type": "timesfm"}, "rope_theta must be given, because timesfm"),
        ({"model_type": "pixtral", "rope_theta": 1e4}, r"Axial\(2, rates='shared'\)"),
        (
            {"architecture": "vit_base_patch14_dinov2"},
            "config is one of timm, .*\n.*a page on timm",
        ),
    ],
)
def test_configs_that_no_rope_can_follow_are_refused(config, text):
    with pytest.raises(ValueError, match=text):
        configs.read({**SIZES, **config})


def test_a_config_that_names_a_rotation_overrides_its_model_type():
    """Jina's embeddings are published as XLM-RoBERTa, which has learned positions."""
    config = {**SIZES, "model_type": "xlm-roberta", "position_embedding_type": "rotary"}
    assert configs.read({**config, "rotary_emb_base": 2e4}).base == 2e4
    with pytest.raises(ValueError, match="has no rotary embedding"):
        configs.read({**config, "position_embedding_type": "absolute"})


def test_rotary_configs_with_keys_of_other_kinds_are_read():
    assert configs.read({**SIZES, "model_type": "falcon", "alibi": False}).base == 1e4
    for kind in ("rope", "rotary", None):
        assert configs.read({**SIZES, "position_embedding_type": kind}).base == 1e4
    assert configs.read({**SIZES, "rope_pct": 0.25}).rotary_dim == 16
    told = {**SIZES, "model_type": "modernbert", "position_embedding_type": "absolute"}
    assert configs.read(told, layer_type="full_attention").base == 1.6e5
    assert configs.read({"hidden_size": 512, "n_head": 8}).head_dim == 64
    assert (
        configs.read({"model_type": "llava", "text_config": {"model_type": "llama"}}).head_dim
        == 128
    )
    kimi = configs.read({**SIZES, "model_type": "kimi_k2", "qk_rope_head_dim": 64})
    assert (kimi.interleaved, kimi.interleaved_out) == (True, False)
    plain = {**SIZES, "model_type": "deepseek_v2", "use_mla": False, "qk_rope_head_dim": 0}
    assert (configs.read(plain).head_dim, configs.read(plain).interleaved) == (64, False)
    for key in ("rope_embedding_base", "rotary_emb_base"):
        assert configs.read({**SIZES, key: 1e6}).base == 1e6
    inner = configs.read({**SIZES, "model_type": "dbrx", "attn_config": {"rope_theta": 5e5}})
    assert (inner.base, inner.sources["base"]) == (5e5, "attn_config.rope_theta")
    own = {**SIZES, "model_type": "my_own"}
    for key, value in {"rotary_pct": 0.25, "position_embedding_type": "rotary"}.items():
        assert configs.read({**own, key: value}).base == 1e4
    assert configs.read(own, base=5e5).base == 5e5
    # A key that is there and says nothing.
    config = {**SIZES, "rope_theta": 5e5, "global_rope_theta": None}
    assert configs.read(config).base == 5e5
