"""A small causal transformer whose positional encoding is the one thing that varies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.plan import Plan

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Decoder(nn.Module):
    """Embedding, pre-norm blocks of attention and a squared-ReLU MLP, and an untied head.

    The plan has the sizes, except ``symbols``, the number of distinct tokens. Weights that all
    encodings share are drawn first, so they are the same for one seed.
    """

    def __init__(self, encoding: str, plan: Plan, *, symbols: int, seed: int) -> None:
        super().__init__()
        self.plan = plan
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(symbols, plan.width)
            self.blocks = nn.ModuleList(_Block(plan.width, plan.heads) for _ in range(plan.layers))
            self.norm = nn.LayerNorm(plan.width)
            self.head = nn.Linear(plan.width, symbols, bias=False)
            for weight in self._matrices():
                nn.init.normal_(weight, std=0.02)
            self.use(encoding, plan.train_length)

    def use(self, encoding: str, length: int) -> None:
        """Take a new module of ``encoding``, made for sequences of ``length``."""
        self.encoding = ENCODINGS[encoding]
        self.position = self.encoding.build(self.plan, length).to(self.embedding.weight.device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of each next token, ``(B, L, symbols)`` for tokens ``(B, L)``."""
        x = self.embedding(tokens)
        if self.encoding.acts_on == "input":
            x = self.position(x)
        for layer, block in enumerate(self.blocks):
            attend = self._attend if self.encoding.acts_in(layer) else _attend_plainly
            x = block(x, attend)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def _attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention for queries, keys and values that were made from ``x``."""
        acts_on, scale = self.encoding.acts_on, q.shape[-1] ** -0.5
        if acts_on in ("scores", "gates"):
            given = (x,) if acts_on == "gates" else ()
            # Named, because T5's own scale is another, and the encoding alone should vary.
            return self.position(q, k, v, *given, scale=scale)  # type: ignore[no-any-return]
        if acts_on == "queries and keys":
            q, k = self.position(q, k)
        # Named here too: an encoding may make queries and keys wider.
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    def weight_groups(self, decay: float) -> list[dict[str, object]]:
        """Parameters for an optimizer: decay for matrices, none for vectors and for tables.

        A learned row that no gradient reaches must keep its initial value.
        """
        matrices = self._matrices()
        others = [p for p in self.parameters() if all(p is not matrix for matrix in matrices)]
        return [
            {"params": matrices, "weight_decay": decay},
            {"params": others, "weight_decay": 0.0},
        ]

    def _matrices(self) -> list[Tensor]:
        return [p for p in (*self.blocks.parameters(), self.head.weight) if p.dim() > 1]


def _attend_plainly(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = x + self._attention(self.before_attention(x), attend)
        return x + self.down(F.relu(self.up(self.before_mlp(x))).square())  # type: ignore[no-any-return]

    def _attention(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        return self.out(attend(x, q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
