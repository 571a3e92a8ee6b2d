"""The tests that the seed documents ask for by name; their examples are in docs."""

import math

import torch

import posenc


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
