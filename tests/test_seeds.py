"""The tests that the seed documents ask for by name, and the examples they print."""

import math

import torch

import posenc
import posenc.nn as nn
import posenc.nn.functional as F


def test_phase_09_sinusoidal_shape():
    assert posenc.SinusoidalPE(10, 64).get_encoding(10).shape == (10, 64)


def test_phase_09_sinusoidal_values():
    """At position 0 every sine is 0 and every cosine 1; at position 1 the closed form."""
    table = posenc.SinusoidalPE(10, 64).get_encoding(2)
    assert table[0].tolist() == [0.0, 1.0] * 32
    for i in range(32):
        phi = 1 / 10000 ** (2 * i / 64)
        assert abs(table[1, 2 * i] - math.sin(phi)) < 1e-7
        assert abs(table[1, 2 * i + 1] - math.cos(phi)) < 1e-7


def test_phase_09_rope_shape():
    q, k = torch.randn(2, 8, 16, 64), torch.randn(2, 8, 16, 64)
    rotated_q, rotated_k = posenc.RoPE(64).apply(q, k)
    assert rotated_q.shape == q.shape
    assert rotated_k.shape == k.shape


def test_phase_09_rope_rotation():
    """(1, 0) and (0, 1) at position 3 are the columns of the rotation by 3 and by 0.03."""
    q = torch.tensor([1.0, 0.0, 0.0, 1.0]).view(1, 1, 1, 4)
    got, _ = posenc.RoPE(4).apply(q, q, offset=3)
    wanted = [math.cos(3), math.sin(3), -math.sin(0.03), math.cos(0.03)]
    torch.testing.assert_close(got.flatten(), torch.tensor(wanted), rtol=0, atol=6e-8)


def test_phase_09_alibi_shape():
    assert posenc.ALiBi(8).get_bias(16).shape == (8, 16, 16)


def test_phase_09_alibi_slopes():
    assert posenc.ALiBi(8).slopes.tolist() == [2.0**-h for h in range(1, 9)]


def test_seed_000_examples():
    x = torch.randn(2, 8, 64)
    assert nn.SinusoidalPosEmbedding()(x).shape == (2, 8, 64)
    assert nn.SinusoidalPosEmbedding(seq_len=8, embed_dim=64)(x).shape == (2, 8, 64)


def test_seed_001_examples():
    pe = F.sinusoidal_pos_embedding(seq_len=4, embed_dim=8)
    assert pe.shape == (4, 8)
    assert (torch.randn(2, 4, 8) + pe.unsqueeze(0)).shape == (2, 4, 8)


def test_seed_002_examples():
    pos, x = nn.LearnedPosEmbedding(max_len=512, embed_dim=64), torch.randn(2, 16, 64)
    assert pos(x).shape == (2, 16, 64)
    assert pos(x, offset=32).shape == (2, 16, 64)


def test_seed_003_examples():
    rope, x = nn.RotaryPosEmbedding(embed_dim=64, max_seq_len=2048), torch.randn(2, 16, 64)
    assert rope(x).shape == (2, 16, 64)
    assert rope(x, position_ids=torch.arange(16)).shape == (2, 16, 64)
    torch.testing.assert_close(rope(x), F.rotary_pos_embedding(x), rtol=0, atol=0)


def test_seed_003_relative_scores():
    """q_m · k_n depends on n - m alone."""
    rope, q, k = nn.RotaryPosEmbedding(), torch.randn(1, 64), torch.randn(1, 64)
    scores = [
        (rope(q, torch.tensor([m])) * rope(k, torch.tensor([m + 5]))).sum() for m in (0, 3, 1000)
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[0], scores[2], rtol=1e-5, atol=1e-5)
