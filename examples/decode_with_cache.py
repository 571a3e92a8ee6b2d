"""Token by token with a cache of keys and values, for two texts of different lengths at once.

What it shows: keys are rotated once, when they enter the cache; `offset` is how many came before,
a number or one for each text; and the result is the one of reading all at once.
"""

import torch
import torch.nn.functional as F

import posenc

BATCH, HEADS, KEY_HEADS, DIM, LONGEST = 2, 8, 2, 64, 40

torch.manual_seed(0)
rope = posenc.RoPE(DIM, max_seq_len=4096, interleaved=False)
q = torch.randn(BATCH, HEADS, LONGEST, DIM)
k = torch.randn(BATCH, KEY_HEADS, LONGEST, DIM)
v = torch.randn(BATCH, KEY_HEADS, LONGEST, DIM)

turned_q, turned_k = rope(q, k)
whole = F.scaled_dot_product_attention(turned_q, turned_k, v, is_causal=True, enable_gqa=True)

# The prompts have 12 and 7 tokens: each text has its own place in the cache.
lengths = torch.tensor([12, 7])
keys, values = torch.zeros_like(k), torch.zeros_like(v)
for text, length in enumerate(lengths.tolist()):
    _, prompt = rope(q[text : text + 1, :, :length], k[text : text + 1, :, :length])
    keys[text, :, :length], values[text, :, :length] = prompt[0], v[text, :, :length]

rows = torch.arange(BATCH)
worst = 0.0
for _ in range(20):
    # One token of each text, at its own position.
    now_q, now_k = q[rows, :, lengths][:, :, None], k[rows, :, lengths][:, :, None]
    now_q, now_k = rope(now_q, now_k, offset=lengths)
    keys[rows, :, lengths] = now_k[:, :, 0]
    values[rows, :, lengths] = v[rows, :, lengths]
    seen = torch.arange(LONGEST) <= lengths[:, None]
    got = F.scaled_dot_product_attention(
        now_q, keys, values, attn_mask=seen[:, None, None], enable_gqa=True
    )
    worst = max(worst, (got[:, :, 0] - whole[rows, :, lengths]).abs().max().item())
    lengths = lengths + 1

print(f"decoded 20 tokens of {BATCH} texts, now at positions {(lengths - 1).tolist()}")
print(f"off from reading all at once by {worst:.1e} at most")

# A window that slides: keys move 5 places back without being computed again.
_, moved = rope(q[:, :, 5:30], k[:, :, 5:30], offset=5)
moved = rope.shift(moved, -5)
_, fresh = rope(q[:, :, 5:30], k[:, :, 5:30])
print(f"keys shifted by -5 are those of new positions, to {(moved - fresh).abs().max():.1e}")
