"""ALiBi at a length far past any training, and what a bias matrix would have cost.

What it shows: `ALiBi.attention` gives what the bias matrix gives, without the matrix.
"""

import torch
import torch.nn.functional as F

import posenc

HEADS, DIM = 8, 32

torch.manual_seed(0)
alibi = posenc.ALiBi(HEADS)
print("slopes:", *(f"1/{round(1 / slope)}" for slope in alibi.slopes.tolist()))

q, k, v = torch.randn(3, 1, HEADS, 512, DIM).unbind()
exact = F.scaled_dot_product_attention(q, k, v, attn_mask=alibi.get_bias(512)[None])
got = alibi.attention(q, k, v)
print(f"512 tokens: off from the bias matrix by {(got - exact).abs().max():.1e} at most")

length = 8_192
q, k, v = torch.randn(3, 1, HEADS, length, DIM).unbind()
with torch.no_grad():
    got = alibi.attention(q, k, v)
matrix = HEADS * length * length * 4 / 1e9
print(f"{length} tokens: {tuple(got.shape)}, where the matrix alone would be {matrix:.1f} GB")

one = alibi.attention(q[:, :, -1:], k, v)
print(f"the last token alone, as in decoding: off by {(one - got[:, :, -1:]).abs().max():.1e}")
