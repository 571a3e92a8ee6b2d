"""A program of a user, which `mypy --strict` checks: every module is called rightly and wrongly.

An ignored error that is none is itself an error, so each comment below claims one.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import posenc
from posenc.attention import Bias, biased_attention, relative_terms
from posenc.nn import RelativeBias

Rotated: TypeAlias = tuple[Tensor, Tensor]


def biased(bias: Bias | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return biased_attention(q, k, v, bias, causal=True)


def table(module: RelativeBias, q: Tensor) -> Tensor:
    assert_type(module(q, q, q), Tensor)
    assert_type(module.attention(q, q, q), Tensor)
    assert_type(module.as_bias(9), Bias)
    return module.table(9)


class Wider(posenc.RoPE):
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        *given: int | Tensor,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
        seq_len: int | Tensor | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        q, k = super().forward(
            q, k, *given, offset=offset, position_ids=position_ids, seq_len=seq_len
        )
        return q * scale, k


def calls(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    sinusoid = posenc.SinusoidalPosEmbedding()
    assert_type(sinusoid(x), Tensor)
    sinusoid(x, offsets=3)  # type: ignore[call-arg]
    fixed = posenc.SinusoidalPE(16, 8)
    assert_type(fixed(x), Tensor)
    fixed(x, offsets=3)  # type: ignore[call-arg]
    grid = posenc.SinusoidalGrid((2, 3), embed_dim=8)
    assert_type(grid(x), Tensor)
    grid(x, offset=3)  # type: ignore[call-arg]
    learned = posenc.LearnedPosEmbedding(16, 8)
    assert_type(learned(x), Tensor)
    learned(x, input_pos=x)  # type: ignore[call-arg]
    features = posenc.FourierFeatures(2, num_frequencies=4)
    assert_type(features(x), Tensor)
    features(x, device="cpu")  # type: ignore[call-arg]

    one = posenc.RotaryPosEmbedding()
    assert_type(one(q), Tensor)
    one(q, positions=x)  # type: ignore[call-arg]
    rope = posenc.RoPE(64)
    assert_type(rope(q, k), Rotated)
    assert_type(rope(q, k, 3, position_ids=None), Rotated)
    rope(q, k, position=3)  # type: ignore[call-arg]
    rope(q)  # type: ignore[call-arg]
    assert_type(Wider(64)(q, k, scale=2.0), Rotated)
    xpos = posenc.XPos(64)
    assert_type(xpos(q, k), Rotated)
    xpos(q, k, positions=x)  # type: ignore[call-arg]
    mixed = posenc.MixedRoPE(64, num_kv_heads=2)
    assert_type(mixed(q, k), Rotated)
    mixed(q, k, positions=x)  # type: ignore[call-arg]
    string = posenc.STRING(64, num_kv_heads=2)
    assert_type(string(q, k), Rotated)
    string(q, k, positions=x)  # type: ignore[call-arg]
    pope = posenc.PoPE(64, num_kv_heads=2)
    assert_type(pope(q, k), Rotated)
    assert_type(pope.attention(q, k, v), Tensor)
    pope(q, k, positions=x)  # type: ignore[call-arg]
    extend = posenc.SelfExtend(rope, group=2, window=4)
    assert_type(extend(q, k, v), Tensor)
    extend(q, k, v, causal=True)  # type: ignore[call-arg]
    chunks = posenc.DualChunk(rope, chunk=4, window=2)
    assert_type(chunks(q, k, v), Tensor)
    chunks(q, k, v, causal=True)  # type: ignore[call-arg]

    alibi = posenc.ALiBi(8)
    assert_type(alibi(q, k, v), Tensor)
    assert_type(alibi.attention(q, k, v), Tensor)
    alibi(q, k, v, is_causal=True)  # type: ignore[call-arg]
    alibi.attention(q, k, v, is_causal=True)  # type: ignore[call-arg]
    t5 = posenc.T5Bias(8, causal=False)
    assert_type(t5(q, k, v), Tensor)
    t5(q, k, v, mask=x)  # type: ignore[call-arg]
    numbers = posenc.LearnedBias(8, max_distance=4)
    assert_type(numbers(q, k, v), Tensor)
    numbers(q, k, v, mask=x)  # type: ignore[call-arg]
    kerple = posenc.KERPLE(8)
    assert_type(kerple(q, k, v), Tensor)
    kerple(q, k, v, mask=x)  # type: ignore[call-arg]
    sandwich = posenc.Sandwich(8)
    assert_type(sandwich(q, k, v), Tensor)
    sandwich(q, k, v, mask=x)  # type: ignore[call-arg]
    fire = posenc.FIRE(8)
    assert_type(fire(q, k, v), Tensor)
    fire(q, k, v, mask=x)  # type: ignore[call-arg]
    cells = posenc.GridBias(7, num_heads=8)
    assert_type(cells(q, k, v), Tensor)
    cells(q, k, v, mask=x)  # type: ignore[call-arg]
    gate = posenc.ForgetGate(8, embed_dim=512)
    assert_type(gate(q, k, v, x), Tensor)
    gate(q, k, v, x, sum=x)  # type: ignore[call-arg]
    cope = posenc.CoPE(64, max_pos=4)
    assert_type(cope(q, k, v), Tensor)
    cope(q, k, v, mask=x)  # type: ignore[call-arg]
    shaw = posenc.RelativeKeys(64, max_distance=4)
    assert_type(shaw(q, k, v), Tensor)
    shaw(q, k, v, mask=x)  # type: ignore[call-arg]
    xl = posenc.TransformerXLBias(8, embed_dim=512)
    assert_type(xl(q, k, v), Tensor)
    xl(q, k, v, mask=x)  # type: ignore[call-arg]
    deberta = posenc.DeBERTaBias(8, head_dim=64, causal=False)
    assert_type(deberta(q, k, v), Tensor)
    deberta(q, k, v, mask=x)  # type: ignore[call-arg]

    table(alibi, q)
    table(cope, q)  # type: ignore[arg-type]
    biased(alibi.as_bias(9), q, k, v)
    biased(relative_terms(q, k, torch.abs, for_queries=x, reach=(0, 1)), q, k, v)
    biased(x, q, k, v)  # type: ignore[arg-type]


def modules(rope: posenc.RoPE) -> nn.Module:
    """They are as ordinary for a type checker as for torch."""
    assert_type(rope.to("cpu"), posenc.RoPE)
    return nn.Sequential(posenc.SinusoidalPE(16, 8), nn.Linear(8, 8))


def names() -> None:
    """Some are found at first use; a name that does not exist is an error."""
    assert_type(posenc.__version__, str)
    assert_type(posenc.interop.ring.__name__, str)
    _ = posenc.RelativeBias  # type: ignore[attr-defined]
    _ = posenc.interop.rings  # type: ignore[attr-defined]
