"""The configs of transformers' own models, against the rates their modules work out."""

import importlib
import inspect
import os
import re
from pathlib import Path

import pytest
import torch
import transformers

from posenc import RoPE, configs
from posenc.configs.reader import rotating_types
from posenc.interop.huggingface.recognition import recognise, rotates

MODELS = Path(transformers.__file__).parent / "models"
# Their default config, or what they take of it, is not that of any checkpoint: odd widths, a
# config of several models in one, coordinates in place of positions, a rotary_dim nobody reads; or
# they are refused.
OTHER = {
    "Blt", "CohereCompass", "EfficientLoFTR", "EomtDinov3", "Ernie4_5_VLMoeText", "Glm4Moe",
    "Glm4vMoeText", "MLCD", "MiniMaxM3VL",
    "EsmFold2", "HunYuanVL", "Moonshine", "MusicFlamingo", "NanoChat", "Nemotron3Diarization",
    "Qwen3OmniMoe", "Qwen3OmniMoeTalker", "Qwen3OmniMoeThinkerText", "Sam3ViT",
}  # fmt: skip


def classes():
    for folder in sorted(os.listdir(MODELS)):
        path = MODELS / folder / f"modeling_{folder}.py"
        if path.exists():
            for name in re.findall(r"^class (\w+)RotaryEmbedding\(", path.read_text(), re.M):
                if name not in OTHER and "Vision" not in name and "Audio" not in name:
                    yield folder, name


ALL = sorted(classes())
CHOSEN = ALL if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else ALL[::9]


def made_by(folder, name):
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    theirs = getattr(module, f"{name}RotaryEmbedding")
    config = inspect.signature(theirs.__init__).parameters["config"].annotation().get_text_config()
    # As in the checkpoints that rotate.
    for key, value in (("position_embedding_type", "rope"), ("use_mem_rope", True)):
        if hasattr(config, key):
            setattr(config, key, value)
    return module, theirs, config


@pytest.mark.parametrize(("folder", "name"), CHOSEN, ids=[name for _, name in CHOSEN])
@pytest.mark.filterwarnings("ignore")
def test_rates_are_those_of_the_model(folder, name):
    _, theirs, config = made_by(folder, name)
    made = theirs(config)
    for layer_type in rotating_types(configs.open_config(config)):
        prefix = "" if layer_type is None else f"{layer_type}_"
        rates = getattr(made, f"{prefix}inv_freq", None)
        if rates is None:
            continue
        rope = RoPE.from_config(config, layer_type=layer_type)
        assert torch.allclose(rope.scaled_inv_freq(), rates.double(), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize(("folder", "name"), CHOSEN, ids=[name for _, name in CHOSEN])
@pytest.mark.filterwarnings("ignore")
def test_pairs_are_those_of_the_model(folder, name):
    """Its functions are tried, and what they do is what its config is read as."""
    module, _, config = made_by(folder, name)
    tried = [
        recognise(function)
        for called, function in vars(module).items()
        if inspect.isfunction(function) and rotates(called) and "vision" not in called
    ]
    layouts = {known.layout for known in tried if known is not None}
    for layer_type in rotating_types(configs.open_config(config)) if layouts else ():
        if layer_type is not None and config.rope_parameters.get(layer_type) is None:
            continue
        rope = RoPE.from_config(config, layer_type=layer_type)
        layout = "interleaved" if rope.interleaved else "half"
        if rope.interleaved and rope.interleaved_out is False:
            layout = "interleaved to half"
        assert layout in layouts


SECTIONS = ["cosmos3_edge", "glm_image", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl"]


@pytest.mark.parametrize("folder", SECTIONS)
@pytest.mark.filterwarnings("ignore")
def test_coordinates_are_mixed_as_by_the_model(folder):
    (name,) = (each for where, each in ALL if where == folder)
    module, theirs, config = made_by(folder, name)
    pairs = theirs(config).inv_freq.numel()
    sizes = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    config.rope_parameters = {**config.rope_parameters, "mrope_section": sizes}
    rope, at = RoPE.from_config(config), torch.randint(0, 50, (3, 2, 7))
    q = torch.randn(2, 2, 7, rope.head_dim)
    wanted = module.apply_rotary_pos_emb(q, q, *theirs(config)(q, at))[0]
    torch.testing.assert_close(rope.rotate(q, position_ids=at), wanted, rtol=0, atol=1e-4)
