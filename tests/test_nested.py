"""Jagged nested tensors, which no encoding takes."""

import pytest
import torch

import posenc
from posenc import attention, functional

ROPE = posenc.RoPE(8, max_seq_len=16)
TABLES = (ROPE.cos_cached, ROPE.sin_cached)
ENCODINGS = {
    "RoPE": lambda q, x: ROPE(q, q),
    "RoPE.rotate": lambda q, x: ROPE.rotate(q),
    "RotaryPosEmbedding": lambda q, x: posenc.RotaryPosEmbedding()(q),
    "XPos": lambda q, x: posenc.XPos(8)(q, q),
    "MixedRoPE": lambda q, x: posenc.MixedRoPE(8, num_kv_heads=4, coordinates=1)(q, q),
    "SinusoidalPosEmbedding": lambda q, x: posenc.SinusoidalPosEmbedding()(x),
    "SinusoidalPE": lambda q, x: posenc.SinusoidalPE(16, 8)(x),
    "LearnedPosEmbedding": lambda q, x: posenc.LearnedPosEmbedding(16, 8)(x),
    "ALiBi": lambda q, x: posenc.ALiBi(4).add_bias(q),
    "ALiBi.attention": lambda q, x: posenc.ALiBi(4).attention(q, q, q),
    "bound_scores": lambda q, x: attention.bound_scores(q, q),
    "rotate": lambda q, x: functional.rotate(q, *TABLES),
    "rotate_qk": lambda q, x: functional.rotate_qk(q, q, *TABLES),
    "rotate_": lambda q, x: functional.rotate_(q, *TABLES),
    "rotary_pos_embedding": lambda q, x: functional.rotary_pos_embedding(q),
    "qk_norm_rope": lambda q, x: functional.qk_norm_rope(q, q, *torch.ones(2, 8), *TABLES),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_jagged_tensor_is_refused_with_the_way_out(name):
    """Its ragged length has no arithmetic, so that whatever came first would fail in torch."""
    x = torch.nested.nested_tensor([torch.randn(n, 8) for n in (3, 5)], layout=torch.jagged)
    heads = [torch.randn(n, 4, 8) for n in (3, 5)]
    q = torch.nested.nested_tensor(heads, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(TypeError, match="must be a dense tensor, got a nested tensor") as caught:
        ENCODINGS[name](q, x)
    assert "to_padded_tensor" in str(caught.value)
    assert "from_cu_seqlens" in str(caught.value)
