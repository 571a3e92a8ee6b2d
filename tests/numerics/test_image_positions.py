"""Coordinates of patches: counted, and between -1 and 1 as DINOv3, timm and others have them."""

import math
from fractions import Fraction

import pytest
import torch

import posenc
from posenc import axes, positions


@pytest.mark.parametrize(
    "sizes", [(3, 5), (4, 4), (1, 7), (2, 3, 5), (6,), (0, 3), (1, 1)], ids=str
)
@pytest.mark.parametrize("normalize", ["separate", "max", "min"])
@pytest.mark.parametrize("corners", [False, True], ids=["centres", "corners"])
def test_normalised_coordinates_are_rounded_once(sizes, normalize, corners):
    """Against fractions, which float() rounds correctly."""
    got = positions.normalized_grid(*sizes, normalize=normalize, align_corners=corners)
    assert got.dtype == torch.float64
    cells = positions.grid(*sizes)
    for axis, count in enumerate(sizes):
        n = {"separate": count, "max": max(sizes), "min": min(sizes)}[normalize]
        for i, x in zip(cells[axis].tolist(), got[axis].tolist(), strict=True):
            if corners:
                wanted = Fraction(2 * i, n - 1) - 1 if n > 1 else Fraction(2 * i - 1)
            else:
                wanted = Fraction(2 * i + 1, n) - 1
            assert x == float(wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [(3, 4), (7, 7)], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_dinov3_of_transformers(size, training):
    """Its angles are float32: an ulp at 2 pi is 4.8e-7, and four roundings come before it."""
    from transformers.models.dinov3_vit import DINOv3ViTConfig, modeling_dinov3_vit

    augment = {"shift": 0.3, "jitter": 1.5, "rescale": 2.0} if training else {}
    named = {f"pos_embed_{name}": value for name, value in augment.items()}
    config = DINOv3ViTConfig(hidden_size=64, num_attention_heads=2, patch_size=4, **named)
    made = modeling_dinov3_vit.DINOv3ViTRopePositionEmbedding(config).train(training)
    torch.manual_seed(1)
    cos, sin = made(torch.empty(1, 3, 4 * size[0], 4 * size[1]))

    rope = posenc.RoPE(32, None, 100.0, axes=axes.Axial(2), interleaved=False)
    torch.manual_seed(1)
    at = math.tau * positions.normalized_grid(*size, prefix=5, **augment)
    most = 4 * 2.0**-22 * at.abs().max() / math.tau
    for got, wanted in zip(rope.tables(at), (cos, sin), strict=True):
        assert (got[5:].repeat(1, 2) - wanted).abs().max() < most
    count = 5 + size[0] * size[1]
    q, k = torch.randn(2, 2, count, 32), torch.randn(2, 2, count, 32)
    theirs = modeling_dinov3_vit.apply_rotary_pos_emb(q, k, cos, sin)
    for got, wanted, x in zip(rope(q, k, position_ids=at), theirs, (q, k), strict=True):
        assert torch.allclose(got, wanted, atol=8 * float(most))
        assert torch.equal(got[:, :, :5], x[:, :, :5])


def test_augmentations_stay_in_their_ranges():
    plain = positions.normalized_grid(4, 6)
    source = torch.Generator().manual_seed(0)
    for _ in range(50):
        moved = positions.normalized_grid(4, 6, shift=0.25, generator=source) - plain
        assert (moved.abs() <= 0.25).all()
        assert torch.allclose(moved, moved[:, :1])
        by = positions.normalized_grid(4, 6, jitter=1.5, generator=source) / plain
        assert ((by >= 1 / 1.5 - 1e-7) & (by <= 1.5 + 1e-7)).all()
        assert torch.allclose(by, by[:, :1])
        by = positions.normalized_grid(4, 6, rescale=2.0, generator=source) / plain
        assert torch.allclose(by, by[:1, :1])
    one, same = (
        positions.normalized_grid(4, 6, shift=1.0, generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    )
    assert torch.equal(one, same)


def test_a_prefix_is_not_rotated_at_all():
    x = torch.randn(2, 3, 15, 16)
    rope = posenc.RoPE(16, axes=axes.Axial(2))
    for at in (
        positions.grid(3, 4, prefix=3),
        positions.grid(3, 4, start=-2, prefix=3),
        positions.normalized_grid(3, 4, prefix=3, shift=0.5, jitter=2.0),
    ):
        assert at.shape == (2, 15)
        y = rope.rotate(x, position_ids=at)
        assert torch.equal(y[:, :, :3], x[:, :, :3])
        assert not torch.equal(y[:, :, 3:], x[:, :, 3:])


def test_a_grid_begins_at_start():
    """Qwen-Image: rows and columns from the middle, the image's number as the first coordinate."""
    at = positions.grid(1, 2, 3, start=(4, -1, -2))
    assert at.tolist() == [[4] * 6, [-1] * 3 + [0] * 3, [-2, -1, 0] * 2]
    assert torch.equal(positions.grid(2, 3, start=5), positions.grid(2, 3) + 5)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: positions.normalized_grid(), ValueError, "one or more ints"),
        (lambda: positions.normalized_grid(2, normalize="mean"), ValueError, "'separate' or 'max'"),
        (lambda: positions.normalized_grid(2, jitter=0.5), ValueError, "jitter must be at least 1"),
        (lambda: positions.normalized_grid(2, shift=-1.0), ValueError, "shift must be finite and"),
        (lambda: positions.normalized_grid(2, align_corners=1), TypeError, "True or False"),
        (lambda: positions.normalized_grid(2, prefix=-1), ValueError, "prefix must be at least 0"),
        (lambda: positions.grid(2, 2, start=(1,)), ValueError, "one for each of the 2 axes"),
        (lambda: positions.grid(2, 2, start=0.5), TypeError, "start must be"),
        (lambda: positions.grid(2, 2, prefix=1.0), TypeError, "prefix must be an int"),
    ],
)
def test_bad_input_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
