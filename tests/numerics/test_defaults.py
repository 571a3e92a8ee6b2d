"""What configs leave out is what the classes of transformers fill in."""

import os
import warnings

import pytest
import transformers
from transformers import CONFIG_MAPPING

from posenc.numerics import _defaults, configs

# Widths that the class works out from others.
OTHER = {"dbrx", "gradium_phonon_tts", "pocket_tts", "zamba2"}
TYPES = sorted(set(CONFIG_MAPPING.keys()) - OTHER)
CHOSEN = TYPES if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else TYPES[::9]


def rotations(config):
    """By layer type, what is turned by; a text where it cannot be read."""
    try:
        types = configs.layer_types(config)
        found = [configs.read(config, layer_type=each) for each in types]
    except (TypeError, ValueError) as error:
        return str(error)
    keys = ("head_dim", "base", "rotary_dim", "interleaved", "interleaved_out", "scaling", "axes")
    return {
        each: [getattr(recipe, key) for key in keys]
        for each, recipe in zip(types, found, strict=True)
    }


def defaults():
    """Of every text model that rotates and can be read, the config with nothing left out."""
    for kind in CHOSEN:
        try:
            config = CONFIG_MAPPING[kind]().to_dict()
        except Exception:
            # Made of other configs, and of none by default.
            continue
        whole = configs.text_part(config)[0] is config and config.get("rope_parameters")
        if whole and not isinstance(rotations(config), str):
            yield pytest.param(config, id=kind)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    DEFAULTS = list(defaults())


@pytest.mark.parametrize("config", DEFAULTS)
def test_what_a_config_leaves_out_is_what_its_class_fills_in(config):
    wanted = rotations(config)
    sizes = ("model_type", "hidden_size", "num_attention_heads")
    got = rotations({key: config[key] for key in sizes if key in config})
    if isinstance(got, str):
        special = config["model_type"] in _defaults.SPECIAL
        assert special or "head_dim must be in the config" in got
    elif len(wanted) > len(got):
        # One for all layers, because they do not differ.
        (one,) = got.values()
        assert all(each == one for each in wanted.values())
    else:
        assert got == wanted


def test_every_type_named_is_one_that_transformers_knows():
    named = {
        *_defaults.BASES,
        *_defaults.WIDTHS,
        *_defaults.ROTATED_WIDTHS,
        *_defaults.SHARES,
        *_defaults.LOCAL_BASES,
    }
    named |= _defaults.SPECIAL | _defaults.INTERLEAVED | _defaults.INTERLEAVED_TO_HALVES
    assert named <= set(CONFIG_MAPPING.keys()) | {"EvollaModel", "kimi_k2"}, (
        transformers.__version__
    )


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
    with pytest.raises(ValueError, match="because layers of gemma3_text differ"):
        configs.read(config)
    with pytest.raises(ValueError, match="layer_type must be one of"):
        configs.read(config, layer_type="sliding")


def test_olmo_3_scales_its_full_layers_alone():
    text = {"model_type": "olmo3", "hidden_size": 512, "num_attention_heads": 8}
    scale = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    config = {**text, "rope_theta": 5e5, "rope_scaling": scale}
    full, local = (
        configs.read(config, layer_type=f"{each}_attention") for each in ("full", "sliding")
    )
    assert full.scaling is not None
    assert local.scaling is None
    assert full.base == local.base == 5e5
    assert configs.read(text).base == 5e5
