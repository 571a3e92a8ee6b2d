"""The configs of transformers' own models, against the rates their modules work out."""

import importlib
import inspect
import os
import re
from pathlib import Path

import pytest
import torch
import transformers

from posenc import RoPE
from posenc.numerics import configs

MODELS = Path(transformers.__file__).parent / "models"
# Their default config, or what they take of it, is not that of any checkpoint: odd widths, a
# config of several models in one, coordinates in place of positions, a rotary_dim nobody reads.
OTHER = {
    "Blt", "CohereCompass", "EfficientLoFTR", "EomtDinov3", "Ernie4_5_VLMoeText", "Glm4Moe",
    "Glm4vMoeText", "MLCD", "MiniMaxM3VL",
    "EsmFold2", "Moonshine", "MusicFlamingo", "NanoChat", "Nemotron3Diarization", "Qwen3OmniMoe",
    "Qwen3OmniMoeTalker", "Qwen3OmniMoeThinkerText", "Sam3ViT",
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


@pytest.mark.parametrize(("folder", "name"), CHOSEN, ids=[name for _, name in CHOSEN])
@pytest.mark.filterwarnings("ignore")
def test_rates_are_those_of_the_model(folder, name):
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    theirs = getattr(module, f"{name}RotaryEmbedding")
    config = inspect.signature(theirs.__init__).parameters["config"].annotation().get_text_config()
    made = theirs(config)
    for layer_type in configs.layer_types(config):
        prefix = "" if layer_type is None else f"{layer_type}_"
        rates = getattr(made, f"{prefix}inv_freq", None)
        if rates is None:
            continue
        rope = RoPE.from_config(config, layer_type=layer_type)
        assert torch.allclose(rope.inv_freq(), rates.double(), rtol=1e-5, atol=1e-12)
