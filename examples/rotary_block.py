"""A transformer block in the style of nanoGPT, with rotary positions and grouped key heads.

What it shows: rotate queries and keys after the projection and before attention; the same block
then serves any length, and moving a text along changes nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import posenc


class Block(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, width: int = 64, heads: int = 8, key_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = heads, key_heads, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * key_heads * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        # Half layout, as in checkpoints of the Hugging Face hub. Nothing of it is saved.
        self.rope = posenc.RoPE(self.head_dim, max_seq_len=4096, interleaved=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Read ``(B, L, width)`` whose first token is at ``start``."""
        h = self.norms[0](x)
        q = self.q(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2, self.key_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.rope(q, k, offset=start)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


if __name__ == "__main__":
    torch.manual_seed(0)
    block = Block()
    text = torch.randn(2, 100, 64)
    with torch.no_grad():
        here, there = block(text), block(text, start=3000)
    print(f"a block of {sum(p.numel() for p in block.parameters())} weights, none of them position")
    print(f"saved with it: {sorted({name.split('.')[0] for name in block.state_dict()})}")
    print(f"the same text 3000 positions later differs by {(here - there).abs().max():.1e} at most")

    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)
    for step in range(61):
        loss = F.mse_loss(block(text)[:, 1:], text[:, :-1])  # say what the token before was
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:2}: repeating the token before is off by {loss:.3f}")
