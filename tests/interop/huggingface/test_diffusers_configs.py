"""`RoPE.from_config` against the tables that the models of diffusers compute and rotate by."""

import math

import pytest
import torch

import posenc
from posenc.axes import Axial, Sections
from posenc.interop.huggingface import patched, rotation
from posenc.positions import grid

diffusers = pytest.importorskip("diffusers")

from support.diffusion import OWN_WARNINGS, tiny  # noqa: E402

pytestmark = OWN_WARNINGS

TEXT, IMAGE, VIDEO = torch.arange(7), grid(1, 4, 5), grid(3, 4, 6)


def scaled(coordinates, *factors):
    return coordinates * torch.tensor(factors, dtype=torch.float64)[:, None]


# The positions of the tokens that each tiny model rotates, as docs/diffusers.md shows them.
FLUX = [grid(1, 4, 5, prefix=7)]
CAPTION, AFTER_IT = torch.stack((TEXT, 0 * TEXT, 0 * TEXT)), grid(1, 4, 6, start=(7, 0, 0))
POSITIONS = {
    "FluxTransformer2DModel": FLUX,
    "Flux2Transformer2DModel": [
        torch.cat((torch.stack((0 * TEXT, 0 * TEXT, 0 * TEXT, TEXT)), grid(1, 4, 5, 1)), dim=1)
    ],
    "Flux3Transformer2DModel": [
        torch.cat((torch.stack((0 * TEXT, 0 * TEXT, 0 * TEXT, TEXT)), grid(1, 4, 5, 1)), dim=1)
    ],
    "ChromaTransformer2DModel": FLUX,
    "BriaTransformer2DModel": FLUX,
    "BriaFiboTransformer2DModel": FLUX,
    "LongCatImageTransformer2DModel": FLUX,
    "OvisImageTransformer2DModel": FLUX,
    "Krea2Transformer2DModel": FLUX,
    "HiDreamImageTransformer2DModel": [grid(1, 8, 8)],
    "HunyuanVideoTransformer3DModel": [VIDEO],
    "HunyuanVideo15Transformer3DModel": [VIDEO],
    "HunyuanImageTransformer2DModel": [grid(4, 6)],
    "MotifVideoTransformer3DModel": [VIDEO],
    "WanTransformer3DModel": [VIDEO],
    "WanVACETransformer3DModel": [VIDEO],
    "SkyReelsV2Transformer3DModel": [VIDEO],
    "ChronoEditTransformer3DModel": [VIDEO],
    "SanaVideoTransformer3DModel": [VIDEO],
    "AnyFlowTransformer3DModel": [VIDEO],
    "HeliosTransformer3DModel": [VIDEO],
    # An even or odd grid around zero, and text from its far corner on.
    "QwenImageTransformer2DModel": [grid(1, 4, 5, start=(0, -2, -3)), (TEXT + 2).expand(3, -1)],
    "NucleusMoEImageTransformer2DModel": [grid(1, 4, 5, start=(0, -2, -3))],
    "QwenImage21Transformer2DModel": [
        torch.cat((TEXT.expand(3, -1), grid(1, 4, 4, start=(7, -2, -2))), dim=1)
    ],
    "ZImageTransformer2DModel": [
        grid(1, 4, 6, start=(33, 0, 0)),
        grid(7, 1, 1, start=(1, 0, 0)),
    ],
    "BriaFibo2Transformer2DModel": [grid(1, 4, 6, start=(9, 0, 0))],
    # A grid of 30 by 45 cells, whatever the size of the video.
    "EasyAnimateTransformer3DModel": [scaled(VIDEO, 1, 30 / 4, 45 / 6)],
    "CogView4Transformer2DModel": [
        (grid(4, 6) * 256) // torch.tensor([[4], [6]])
    ],
    "GlmImageTransformer2DModel": [grid(4, 6)],
    "Lumina2Transformer2DModel": [CAPTION, AFTER_IT, torch.cat((CAPTION, AFTER_IT), dim=1)],
    # 30 frames a second, where 24 are usual.
    "CosmosTransformer3DModel": [scaled(VIDEO, 24 / 30, 1, 1)],
    "Kandinsky5Transformer3DModel": [VIDEO],
    "Kandinsky6Transformer3DModel": [VIDEO],
    "PRXTransformer2DModel": [grid(4, 6)],
    "JoyImageEditTransformer3DModel": [VIDEO],
}  # fmt: skip
QUICK = ("FluxTransformer2DModel", "WanTransformer3DModel", "CosmosTransformer3DModel")


def rotations_of(model, given, monkeypatch):
    """Tables that a model rotates by, a row for each token, and the layouts."""
    seen = []

    def spy(xs, cos, sin, layout="half", **others):
        seen.append((_rows(cos), _rows(sin), layout))
        return ours(xs, cos, sin, layout, **others)

    ours = rotation.rotate_all
    with patched(model), torch.no_grad():
        monkeypatch.setattr(rotation, "rotate_all", spy)
        model(**given)
    return seen


def _rows(table):
    """``[T, P]`` of a table with axes for sequences and heads."""
    table = table.squeeze(-2) if table.dim() > 2 and table.shape[-2] == 1 else table
    return table.reshape(-1, *table.shape[-2:])[0]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in POSITIONS],
)
def test_a_model_rotates_by_the_tables_of_its_config(name, monkeypatch):
    model, given = tiny(name)
    rope = posenc.RoPE.from_config(model)
    rotations = rotations_of(model, given, monkeypatch)
    for position_ids in POSITIONS[name]:
        cos, sin = rope.tables(position_ids)
        # Rates in float32 are powers, off by ln(base) roundings or so.
        error = 2**-24 + position_ids.abs().max().item() * (2 + math.log(rope.base)) * 2**-24
        near = [
            max((c[: len(cos)] - cos).abs().max(), (s[: len(sin)] - sin).abs().max()) <= error
            for c, s, _ in rotations
            if len(c) >= len(cos) and c.shape[-1] == cos.shape[-1]
        ]
        assert any(near), "the model has no such table"
    layouts = {layout for _, _, layout in rotations}
    assert layouts == {"interleaved" if rope.interleaved else "half"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "axes"),
    [
        (
            "Ideogram4MRoPE",
            {
                "_class_name": "Ideogram4Transformer2DModel", "attention_head_dim": 16,
                "rope_theta": 5e6, "mrope_section": [4, 2, 2],
            },
            Sections((4, 2, 2), interleaved=True),
        ),
        (
            "Cosmos3VLTextRotaryEmbedding",
            {
                "_class_name": "Cosmos3OmniTransformer", "head_dim": 16, "rope_theta": 1e4,
                "rope_axes_dim": [4, 2, 2],
            },
            Sections((4, 2, 2), interleaved=True),
        ),
    ],
    ids=["Ideogram 4", "Cosmos 3"],
)  # fmt: skip
def test_sections_are_those_of_the_rotary_module(name, config, axes):
    folder = {"I": "ideogram4", "C": "cosmos3"}[name[0]]
    module = getattr(
        __import__(f"diffusers.models.transformers.transformer_{folder}", fromlist=[name]), name
    )(16, config["rope_theta"], tuple(axes.sizes))
    rope = posenc.RoPE.from_config(config)
    if folder == "ideogram4":
        cos, sin = module(VIDEO.T[None])
    else:
        cos, sin = module(VIDEO[:, None], "cpu", torch.float32)

    assert rope.axes == axes
    assert not rope.interleaved
    for ours, theirs in zip(rope.tables(VIDEO), (cos, sin), strict=True):
        error = 2**-24 + 5 * (2 + math.log(rope.base)) * 2**-24
        assert (theirs[0, :, :8] - ours).abs().max() <= error


@pytest.mark.slow
def test_cogvideox_and_hunyuan_dit_get_their_tables_from_the_pipeline():
    """CogVideoX stretches a crop of the grid; Hunyuan-DiT has the width first."""
    from diffusers.models.embeddings import get_2d_rotary_pos_embed, get_3d_rotary_pos_embed

    rope = posenc.RoPE.from_config(tiny("CogVideoXTransformer3DModel")[0])
    cos, sin = get_3d_rotary_pos_embed(16, ((0, 0), (30, 45)), (4, 6), 3)
    ours = rope.tables(scaled(VIDEO, 1, 30 / 4, 45 / 6))
    error = 2**-24 + 40 * (2 + math.log(1e4)) * 2**-24
    assert max((a[:, ::2] - b).abs().max() for a, b in zip((cos, sin), ours, strict=True)) <= error

    rope = posenc.RoPE.from_config(tiny("HunyuanDiT2DModel")[0])
    cos, sin = get_2d_rotary_pos_embed(16, ((0, 0), (32, 48)), (4, 6))
    ours = rope.tables(scaled(grid(4, 6), 8, 8).flip(0))
    assert max((a[:, ::2] - b).abs().max() for a, b in zip((cos, sin), ours, strict=True)) <= error


@pytest.mark.slow
def test_framepack_counts_frames_as_it_is_told():
    model, _ = tiny("HunyuanVideoFramepackTransformer3DModel")
    frames = torch.tensor([0.0, 4.0, 9.0])
    cos, sin = model.rope(frames, 8, 12, torch.device("cpu"))
    where = VIDEO.clone()
    where[0] = frames.long()[VIDEO[0]]
    ours = posenc.RoPE.from_config(model).tables(where)
    error = 2**-24 + 9 * (2 + math.log(256)) * 2**-24
    assert max((a[:, ::2] - b).abs().max() for a, b in zip((cos, sin), ours, strict=True)) <= error


def test_a_model_its_files_and_its_loaded_config_agree(tmp_path):
    model, _ = tiny("FluxTransformer2DModel")
    with pytest.raises(ValueError, match=r"_class_name must be .*\n  Pass the model"):
        posenc.RoPE.from_config(model.config)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)

    for config in (model, tmp_path, loaded.config):
        assert posenc.RoPE.from_config(config).axes == Axial((4, 4, 8))
