"""Models with the modules of the seeds, and with every way to call the rotation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import posenc
from posenc import axes, scaling
from support.rules import LONG


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96, bias=False)
        self.rope = posenc.RoPE(8, 64)
        self.alibi = posenc.ALiBi(4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, dim=1)
        q, k = self.rope(q, k)
        scores = self.alibi.add_bias(q @ k.transpose(-1, -2) / 8**0.5)
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """The modules of the seeds, around one block of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 32)
        self.learned = posenc.LearnedPosEmbedding(48, 32)
        self.fixed = posenc.SinusoidalPE(64, 32)
        self.growing = posenc.SinusoidalPosEmbedding()
        self.rotary = posenc.RotaryPosEmbedding(32, 64)
        self.block = Block()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.growing(self.fixed(self.learned(self.tokens(ids))))
        return self.block(self.rotary(x)) @ self.tokens.weight.T


class Rotations(nn.Module):
    """``q`` rotated by every kind of `RoPE`, or by ``kinds``, wherever its tokens are."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.plain = nn.ModuleDict(
            {
                "interleaved": posenc.RoPE(8, 64),
                "halves": posenc.RoPE(8, 64, interleaved=False),
                "partial": posenc.RoPE(8, 64, rotary_dim=4),
                "partial-halves": posenc.RoPE(8, 64, rotary_dim=4, interleaved=False),
                "last": posenc.RoPE(8, 64, rotary_dim=4, last=True),
                "growing": posenc.RoPE(8, None),
                "yarn": posenc.RoPE(8, None, scaling=scaling.YaRN(4.0, original_length=16)),
                "dynamic": posenc.RoPE(
                    8, None, scaling=scaling.DynamicNTK(2.0, original_length=16)
                ),
                "longrope": posenc.RoPE(8, None, scaling=LONG),
                "halves-out": posenc.RoPE(8, 64, interleaved_out=False),
            }
        )
        for name in set(self.plain) - set(kinds or self.plain):
            del self.plain[name]
        self.mrope = posenc.RoPE(8, None, axes=axes.Sections((2, 1, 1)))

    def forward(self, q: Tensor, ids: Tensor, offsets: Tensor) -> dict[str, Tensor]:
        rotated = {name: rope.rotate(q) for name, rope in self.plain.items()}
        fixed = self.plain["interleaved"]
        rotated["offset"] = fixed.rotate(q, 5)
        rotated["offsets"] = fixed.rotate(q, offsets)
        rotated["ids"] = fixed.rotate(q, position_ids=ids)
        if "growing" in self.plain:
            rotated["ids-growing"] = self.plain["growing"].rotate(q, position_ids=ids)
        rotated["undone"] = fixed.unrotate(q, 5)
        coordinates = torch.stack((ids, ids + 1, ids))
        rotated["coordinates"] = self.mrope.rotate(q, position_ids=coordinates)
        return rotated


def rotations_at(batch: int, length: int) -> tuple[Tensor, ...]:
    """Arguments of `Rotations`."""
    g = torch.Generator().manual_seed(length)
    q = torch.randn(batch, 4, length, 8, generator=g)
    ids = torch.randint(0, 60, (batch, length), generator=g)
    return q, ids, torch.randint(0, 64 - length, (batch,), generator=g)


def dynamic_rotations() -> tuple[dict[int, torch.export.Dim], ...]:
    """Shapes of `Rotations` that may differ."""
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=59)
    return {0: batch, 2: length}, {0: batch, 1: length}, {0: batch}
