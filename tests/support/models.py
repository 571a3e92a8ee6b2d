"""Models that use every module of the library, and every way to call the rotation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import posenc
from posenc import axes, scaling


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96, bias=False)
        self.rope = posenc.RoPE(8, 64)
        self.alibi = posenc.ALiBi(4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, dim=1)
        q, k = self.rope(q, k)
        scores = self.alibi(q @ k.transpose(-1, -2) / 8**0.5)
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Every module of the library, around one block of attention."""

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
                "yarn": posenc.RoPE(8, None, scaling=scaling.YaRN(4.0, 16)),
                "dynamic": posenc.RoPE(8, None, scaling=scaling.DynamicNTK(2.0, 16)),
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


class Everything(nn.Module):
    """One of every module of the library, with a linear layer that says what was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.added = nn.ModuleDict(
            {
                "sinusoidal": posenc.SinusoidalPosEmbedding(),
                "fixed": posenc.SinusoidalPE(16, 8),
                "learned": posenc.LearnedPosEmbedding(16, 8),
                "rotary": posenc.RotaryPosEmbedding(),
                "rotary-fixed": posenc.RotaryPosEmbedding(8, 16, False),
            }
        )
        self.rotated = nn.ModuleDict(
            {
                "rope": posenc.RoPE(8, 16),
                "growing": posenc.RoPE(8, None),
                "freqs": posenc.RoPE(8, 16, freqs=(1.0, 0.3, 0.1, 0.0)),
                "yarn": posenc.RoPE(8, 16, scaling=scaling.YaRN(4.0, 4)),
                "xpos": posenc.XPos(8, 16, scale_base=8.0),
            }
        )
        self.mixed = posenc.MixedRoPE(8, 3, coordinates=1)
        self.alibi = posenc.ALiBi(3)

    def forward(self, x: Tensor) -> Tensor:
        """Of ``(B, 3, L, 8)``, what each makes of it, one after the other."""
        x = self.linear(x)
        made = [module(x[:, 0]) for module in self.added.values()]
        made += [module(x, x)[0] for module in self.rotated.values()]
        made.append(self.mixed(x, x, torch.arange(x.shape[2]))[0])
        made.append(self.alibi(x @ x.transpose(-1, -2)).exp())
        return torch.cat([each.flatten() for each in made])


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
