"""Every class of `posenc.__all__` in a small block, as a model would use it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import posenc

HEADS, DIM, TOKENS = 2, 4, 6
WIDTH = HEADS * DIM


def added(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return module(merged(q), **options)


def features(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return module(merged(q)[..., :2], dtype=q.dtype)


def rotated(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return merged(F.scaled_dot_product_attention(*module(q, k, **options), v, is_causal=True))


def attended(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return merged(module(q, k, v, **options))


def attended_by_method(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> Tensor:
    return merged(module.attention(q, k, v, **options))


def gated(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return merged(module(q, k, v, merged(q), **options))


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Use(NamedTuple):
    """How a module is built and called."""

    build: Callable[[], nn.Module]
    call: Callable[..., Tensor]


ROPE = {"head_dim": DIM, "max_seq_len": 16}
# A name is that of the class, and what distinguishes two modules of one class.
MODULES = {
    "SinusoidalPosEmbedding": Use(
        lambda: posenc.SinusoidalPosEmbedding(scale_input=True, learn_scale=True), added
    ),
    "SinusoidalPE": Use(lambda: posenc.SinusoidalPE(16, WIDTH, learn_scale=True), added),
    "SinusoidalPE, fixed": Use(lambda: posenc.SinusoidalPE(16, WIDTH), added),
    "SinusoidalGrid": Use(
        lambda: posenc.SinusoidalGrid((2, 3), embed_dim=WIDTH, learn_scale=True), added
    ),
    "LearnedPosEmbedding": Use(lambda: posenc.LearnedPosEmbedding(16, WIDTH), added),
    "FourierFeatures": Use(
        lambda: posenc.FourierFeatures(2, num_frequencies=WIDTH // 2, kind="learned"), features
    ),
    "FourierFeatures, random": Use(
        lambda: posenc.FourierFeatures(2, num_frequencies=WIDTH // 2), features
    ),
    "RotaryPosEmbedding": Use(lambda: posenc.RotaryPosEmbedding(), added),
    "RoPE": Use(lambda: posenc.RoPE(**ROPE), rotated),
    "RoPE, growing": Use(lambda: posenc.RoPE(DIM, None), rotated),
    "XPos": Use(lambda: posenc.XPos(**ROPE, scale_base=8.0), rotated),
    "MixedRoPE": Use(lambda: posenc.MixedRoPE(DIM, num_kv_heads=HEADS, coordinates=1), rotated),
    "STRING": Use(lambda: posenc.STRING(DIM, num_kv_heads=HEADS, coordinates=1), rotated),
    "PoPE": Use(lambda: posenc.PoPE(DIM, num_kv_heads=HEADS, max_seq_len=16), attended_by_method),
    "SelfExtend": Use(lambda: posenc.SelfExtend(posenc.RoPE(**ROPE), group=2, window=2), attended),
    "DualChunk": Use(lambda: posenc.DualChunk(posenc.RoPE(**ROPE), chunk=3, window=2), attended),
    "ALiBi": Use(lambda: posenc.ALiBi(HEADS), attended),
    "ALiBi, learned": Use(lambda: posenc.ALiBi(HEADS, learned=True), attended),
    "T5Bias": Use(
        lambda: posenc.T5Bias(HEADS, num_buckets=8, max_distance=16, causal=False), attended
    ),
    "LearnedBias": Use(lambda: posenc.LearnedBias(HEADS, max_distance=4), attended),
    "KERPLE": Use(lambda: posenc.KERPLE(HEADS), attended),
    "Sandwich": Use(lambda: posenc.Sandwich(HEADS, dim=16), attended),
    "FIRE": Use(lambda: posenc.FIRE(HEADS, hidden=3), attended),
    "FIRE, by rows": Use(lambda: posenc.FIRE(HEADS, hidden=3, threshold=2.0), attended),
    "GridBias": Use(lambda: posenc.GridBias((2, 3), num_heads=HEADS), attended),
    "GridBias, continuous": Use(
        lambda: posenc.GridBias((2, 3), num_heads=HEADS, continuous=True, hidden=3), attended
    ),
    "ForgetGate": Use(lambda: posenc.ForgetGate(HEADS, embed_dim=WIDTH), gated),
    "CoPE": Use(lambda: posenc.CoPE(DIM, max_pos=3), attended),
    "RelativeKeys": Use(lambda: posenc.RelativeKeys(DIM, max_distance=3), attended),
    "TransformerXLBias": Use(lambda: posenc.TransformerXLBias(HEADS, embed_dim=WIDTH), attended),
    "DeBERTaBias": Use(
        lambda: posenc.DeBERTaBias(HEADS, head_dim=DIM, max_relative_positions=4, causal=False),
        attended,
    ),
}
# Their parameters are multiplied by positions, and stay float32 in a model that is cast.
KEEP_FLOAT32 = (posenc.MixedRoPE, posenc.PoPE, posenc.FourierFeatures)


class Block(nn.Module):
    """A module between two linear layers, with parameters away from where they start."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.before, self.after = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.encoding = MODULES[name].build()
        draw = torch.Generator().manual_seed(len(name))
        with torch.no_grad():
            for p in self.parameters():
                if not p.is_meta:
                    # Between the ends of PoPE's phases.
                    p.copy_(torch.rand(p.shape, generator=draw).sub(1.0) * math.sqrt(0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Of ``(B, TOKENS, WIDTH)``, as much again."""
        q, k, v = self.before(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4).unbind()
        return self.after(MODULES[self.name].call(self.encoding, q, k, v))


class Everything(nn.Module):
    """A block of each, on the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(name) for name in MODULES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks])


def kept(model: nn.Module) -> set[str]:
    """The names of the parameters that stay float32 in a cast."""
    return {
        f"{name}.{own}".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, KEEP_FLOAT32)
        for own, _ in module.named_parameters()
    }


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()
