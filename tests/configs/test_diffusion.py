"""Configs of diffusers' transformers; tests/interop/huggingface compares them with the models."""

import json

import pytest
import torch

import posenc
from posenc.axes import Axial
from posenc.lab.explain import explain

# What the published files say of their rotations.
FLUX = {
    "_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.30.0.dev0",
    "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56], "guidance_embeds": True,
    "in_channels": 64, "num_attention_heads": 24, "num_layers": 19, "patch_size": 1,
}  # fmt: skip
WAN = {
    "_class_name": "WanTransformer3DModel", "attention_head_dim": 128, "num_attention_heads": 40,
    "patch_size": [1, 2, 2], "rope_max_seq_len": 1024, "qk_norm": "rms_norm_across_heads",
}  # fmt: skip
HUNYUAN = {
    "_class_name": "HunyuanVideoTransformer3DModel", "attention_head_dim": 128,
    "rope_axes_dim": [16, 56, 56], "rope_theta": 256.0,
}  # fmt: skip
COG = {
    "_class_name": "CogVideoXTransformer3DModel", "attention_head_dim": 64,
    "use_rotary_positional_embeddings": True,
}  # fmt: skip
COSMOS = {
    "_class_name": "CosmosTransformer3DModel", "attention_head_dim": 128,
    "rope_scale": [2.0, 1.0, 1.0],
}  # fmt: skip
Z = {
    "_class_name": "ZImageTransformer2DModel", "dim": 3840, "n_heads": 30, "rope_theta": 256.0,
    "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "head_dim", "widths", "base"),
    [
        pytest.param(FLUX, 128, (16, 56, 56), 10_000.0, id="flux"),
        pytest.param(WAN, 128, (44, 42, 42), 10_000.0, id="wan"),
        pytest.param(HUNYUAN, 128, (16, 56, 56), 256.0, id="hunyuan-video"),
        pytest.param(COG, 64, (16, 24, 24), 10_000.0, id="cogvideox"),
        pytest.param(Z, 128, (32, 48, 48), 256.0, id="z-image"),
    ],
)
def test_a_published_config_gives_its_rotation(config, head_dim, widths, base):
    rope = posenc.RoPE.from_config(config)

    assert rope.head_dim == head_dim
    assert rope.axes == Axial(widths)
    assert rope.base == base
    assert rope.interleaved


def test_cosmos_scales_the_base_of_its_frames():
    """NTK: the base of d channels grows by s^(d / (d - 2)): the slowest pair is s times slower."""
    rope = posenc.RoPE.from_config(COSMOS)

    assert rope.axes == Axial((44, 42, 42))
    assert not rope.interleaved
    rates = torch.tensor(rope.inv_freq, dtype=torch.float64)
    plain = torch.tensor([1e4 ** (-2 * i / 44) for i in range(22)], dtype=torch.float64)
    assert rates[21] == pytest.approx(plain[21].item() / 2, rel=1e-12)
    assert rates[22 + 20] == pytest.approx(1e4 ** (-40 / 42), rel=1e-12)


def test_a_coordinate_without_channels_is_left_out():
    """Bria's ids have a first coordinate that turns nothing."""
    config = {
        "_class_name": "BriaTransformer2DModel", "attention_head_dim": 128,
        "axes_dims_rope": [0, 56, 72], "rope_theta": 10_000, "time_theta": 10_000,
    }  # fmt: skip
    assert posenc.RoPE.from_config(config).axes == Axial((56, 72))


def test_a_file_its_folder_and_explain_agree(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HUNYUAN))

    assert posenc.RoPE.from_config(tmp_path).axes == Axial((16, 56, 56))
    report = explain(tmp_path / "config.json")
    arguments = report.parts[0].arguments
    assert arguments["base"] == (256.0, "rope_theta")
    assert arguments["axes"] == (Axial((16, 56, 56)), "rope_axes_dim")
    assert arguments["interleaved"] == (True, "_class_name")
    built = {}
    exec(report.python(), built)
    assert torch.equal(
        built["positions"].scaled_inv_freq(), posenc.RoPE.from_config(HUNYUAN).scaled_inv_freq()
    )


def test_keywords_override_the_config():
    assert posenc.RoPE.from_config(FLUX, base=500.0, seq_dim=1).base == 500.0


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**FLUX, "_class_name": "UNet2DConditionModel"}, "_class_name must be a transformer of"),
        ({**FLUX, "rope_theta": 500.0}, "rope_theta must be a key of FluxTransformer2DModel"),
        ({**FLUX, "axes_dims_rope": None}, "axes_dims_rope must be in the config of Flux"),
        ({**FLUX, "axes_dims_rope": 128}, "axes_dims_rope must be a list"),
        ({**FLUX, "axes_dims_rope": [16, 56, 40]}, "must add up to the 128 rotated channels"),
        ({**FLUX, "attention_head_dim": None}, "attention_head_dim must be in the config"),
        ({**COG, "use_rotary_positional_embeddings": False}, "must be true, got False"),
        ({**COSMOS, "rope_scale": [2.0]}, "rope_scale must have a number for each of 3 axes"),
        ({**HUNYUAN, "rope_theta": -1.0}, "rope_theta must be"),
        ({"_class_name": "MochiTransformer3DModel"}, "rotates unlike RoPE: its rates are learned"),
    ],
)
def test_keys_that_are_not_understood_are_named(config, said):
    with pytest.raises(ValueError, match=said):
        posenc.RoPE.from_config(config)


def test_layers_rotate_alike():
    with pytest.raises(ValueError, match="layer_type must be None for a model of diffusers"):
        posenc.RoPE.from_config(FLUX, layer_type="full_attention")
