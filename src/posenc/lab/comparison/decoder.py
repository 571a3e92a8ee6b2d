"""A small causal transformer whose sense of position is the one thing that varies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posenc import nn as encodings
from posenc.numerics.scaling import Rule


class Decoder(nn.Module):
    """Embedding, pre-norm blocks of attention and a squared-ReLU MLP, and an untied head.

    Weights that all encodings share are drawn first, so they are the same for one seed.

    Args:
        encoding: ``none``, ``sinusoidal``, ``learned``, ``rope`` or ``alibi``.
        symbols: Distinct tokens.
        width: Channels; a multiple of twice the heads.
        layers: Blocks.
        heads: Attention heads.
        longest: Positions it must be able to take.
        base: Of RoPE and of the sinusoid.
        seed: Of the weights.
    """

    def __init__(
        self,
        encoding: str,
        *,
        symbols: int,
        width: int,
        layers: int,
        heads: int,
        longest: int,
        base: float,
        seed: int,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(symbols, width)
            self.blocks = nn.ModuleList(_Block(encoding, width, heads) for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, symbols, bias=False)
            for weight in (p for p in (*self.blocks.parameters(), self.head.weight) if p.dim() > 1):
                nn.init.normal_(weight, std=0.02)
            self.position: nn.Module = nn.Identity()
            if encoding == "sinusoidal":
                self.position = encodings.SinusoidalPE(longest, width, base=base)
            elif encoding == "learned":
                self.position = encodings.LearnedPosEmbedding(longest, width)
        self.encoding, self.longest, self.base = encoding, longest, base
        self.head_dim = width // heads
        self.stretch(None)

    def stretch(self, rule: Rule | None) -> None:
        """Rotate by the rates of ``rule`` from now on; encodings other than RoPE ignore it."""
        if self.encoding == "rope":
            rope = encodings.RoPE(
                self.head_dim, self.longest, self.base, interleaved=False, scaling=rule
            )
            for part in self.modules():
                if isinstance(part, _Attention):
                    part.rope = rope

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of each next token, ``(B, L, symbols)`` for tokens ``(B, L)``."""
        x = self.position(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def weight_groups(self, decay: float) -> list[dict[str, object]]:
        """Parameters for an optimizer: decay for matrices, none for vectors and for tables.

        A learned row that no gradient reaches must stay as it was made.
        """
        tables = {id(p) for part in (self.embedding, self.position) for p in part.parameters()}
        matrices = [p for p in self.parameters() if p.dim() > 1 and id(p) not in tables]
        others = [p for p in self.parameters() if p.dim() == 1 or id(p) in tables]
        return [
            {"params": matrices, "weight_decay": decay},
            {"params": others, "weight_decay": 0.0},
        ]


class _Block(nn.Module):
    def __init__(self, encoding: str, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(encoding, width, heads)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.down(F.relu(self.up(self.before_mlp(x))).square())  # type: ignore[no-any-return]


class _Attention(nn.Module):
    rope: nn.Module | None

    def __init__(self, encoding: str, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.alibi = encodings.ALiBi(heads) if encoding == "alibi" else None
        self.rope = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        if self.rope is not None:
            q, k = self.rope(q, k)
        if self.alibi is not None:
            y = self.alibi.attention(q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
