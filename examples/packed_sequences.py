"""Several texts in one row, without padding: each counts from zero and sees itself alone.

What it shows: position_ids from the lengths, and a mask of one block for each text; the result is
the one of each text by itself.
"""

import torch
import torch.nn.functional as F

import posenc

HEADS, DIM = 4, 32
LENGTHS = [5, 17, 9]

torch.manual_seed(0)
rope = posenc.RoPE(DIM, max_seq_len=4096, interleaved=False)
total = sum(LENGTHS)
q, k, v = torch.randn(3, 1, HEADS, total, DIM).unbind()

text = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
ends = torch.tensor([0, *LENGTHS]).cumsum(0)
positions = posenc.positions.from_cu_seqlens(ends)
print("text     ", *text.tolist())
print("position ", *positions.tolist())

turned_q, turned_k = rope(q, k, position_ids=positions)
at = torch.arange(total)
mask = (text[:, None] == text) & (at[:, None] >= at)
packed = F.scaled_dot_product_attention(turned_q, turned_k, v, attn_mask=mask)

start = 0
for number, length in enumerate(LENGTHS):
    part = slice(start, start + length)
    one_q, one_k = rope(q[:, :, part], k[:, :, part])
    alone = F.scaled_dot_product_attention(one_q, one_k, v[:, :, part], is_causal=True)
    off = (packed[:, :, part] - alone).abs().max()
    print(f"text {number}, {length:2} tokens: packed and alone differ by {off:.1e} at most")
    start += length

wrong_q, wrong_k = rope(q, k)
off = (F.scaled_dot_product_attention(wrong_q, wrong_k, v, attn_mask=mask) - packed).abs().max()
print(f"for rotary, positions that run on are as good inside one text: they differ by {off:.1e}")
learned = posenc.LearnedPosEmbedding(max_len=64, embed_dim=DIM)
x = torch.randn(1, total, DIM)
off = (learned(x) - learned(x, position_ids=positions)).abs().max()
print(f"for a learned table they are not: it adds other rows, off by {off:.1f}")
