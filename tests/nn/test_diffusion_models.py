"""The recipes of the manual for diffusion models, against the modules of diffusers."""

import pytest
import torch

from posenc import RoPE, positions
from posenc.axes import Axial

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("diffusers")
FRAMES, HEIGHT, WIDTH = 3, 5, 4


def flux():
    from diffusers.models.transformers.transformer_flux import FluxPosEmbed

    at = positions.grid(1, HEIGHT, WIDTH, prefix=7)
    return Axial((16, 56, 56)), 1e4, at, FluxPosEmbed(10_000, [16, 56, 56])(at.T)


def wan():
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

    at = positions.grid(FRAMES, HEIGHT, WIDTH)
    made = WanRotaryPosEmbed(128, (1, 2, 2), 1024)
    tables = made(torch.empty(1, 1, FRAMES, 2 * HEIGHT, 2 * WIDTH))
    return Axial((44, 42, 42)), 1e4, at, [table[0, :, 0] for table in tables]


def hunyuan_video():
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoRotaryPosEmbed

    at = positions.grid(FRAMES, HEIGHT, WIDTH)
    made = HunyuanVideoRotaryPosEmbed(2, 1, [16, 56, 56], 256.0)
    return Axial((16, 56, 56)), 256.0, at, made(torch.empty(1, 1, FRAMES, 2 * HEIGHT, 2 * WIDTH))


def qwen_image():
    from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope

    made = QwenEmbedRope(10_000, [16, 56, 56], scale_rope=True)
    image, text = made([(1, HEIGHT, WIDTH)], torch.device("cpu"), 6)
    start = (0, HEIGHT // 2 - HEIGHT, WIDTH // 2 - WIDTH)
    words = positions.from_offset(6, max(HEIGHT // 2, WIDTH // 2)).expand(3, 6)
    at = torch.cat((words, positions.grid(1, HEIGHT, WIDTH, start=start)), dim=1)
    both = torch.cat((text, image)).repeat_interleave(2, dim=1)
    return Axial((16, 56, 56)), 1e4, at, (both.real, both.imag)


def cogvideox():
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    at = positions.grid(FRAMES, HEIGHT, WIDTH)
    crop = ((0, 0), (HEIGHT, WIDTH))
    return Axial((16, 24, 24)), 1e4, at, get_3d_rotary_pos_embed(64, crop, (HEIGHT, WIDTH), FRAMES)


@pytest.mark.parametrize("model", [flux, wan, hunyuan_video, qwen_image, cogvideox])
def test_tables_are_those_of_the_model(model):
    """They are float32 of float64 or float32 angles below 8: two roundings of half an ulp."""
    how, base, at, tables = model()
    dim = sum(how.coordinates)
    rope = RoPE(dim, None, base, axes=how)
    for got, wanted in zip(rope.tables(at), tables, strict=True):
        assert wanted.shape == (at.shape[1], dim)
        assert (got.repeat_interleave(2, dim=1) - wanted).abs().max() < 2 * 2.0**-22
    prefix = 7 if model is flux else 0
    x = torch.randn(1, 2, at.shape[1], dim)
    assert torch.equal(rope.rotate(x, position_ids=at)[:, :, :prefix], x[:, :, :prefix])
