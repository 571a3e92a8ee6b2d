"""Every encoding on real tensors, in half a minute: `python examples/tour.py -o out/tour.png`."""

import argparse
from pathlib import Path

import torch

import posenc
from posenc.lab.show import gallery


def tour() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 48, 64)  # a batch of two sentences of 48 tokens, 64 channels each
    sinusoidal = posenc.SinusoidalPE(max_seq_len=128, embed_dim=64)
    print(f"{sinusoidal}\n  {tuple(x.shape)} -> {tuple(sinusoidal(x).shape)}\n")

    learned = posenc.LearnedPosEmbedding(max_len=128, embed_dim=64)
    print(f"{learned}\n  {tuple(x.shape)} -> {tuple(learned(x, offset=8).shape)}\n")

    rope = posenc.RoPE(head_dim=64, max_seq_len=1_000_001)
    q, k = torch.randn(1, 8, 4, 64), torch.randn(1, 2, 4, 64)
    here, far = rope.apply(q, k, offset=0), rope.apply(q, k, offset=999_000)
    scores = [(a[:, :2] @ b.transpose(-1, -2))[0, 0] for a, b in (here, far)]
    print(f"{rope}\n  q·k depends on the distance alone. At positions 0..3 and at 999000..999003:")
    for near, away in zip(*scores, strict=True):
        print("   ", *(f"{v:8.4f}" for v in near), "   |", *(f"{v:8.4f}" for v in away))

    x16 = torch.randn(1, 4096, 64).bfloat16()
    exact = posenc.RotaryPosEmbedding()(x16.double())
    half = posenc.RotaryPosEmbedding().bfloat16()(x16).double()
    print(f"  bfloat16 at positions up to 4095: off by {(half - exact).abs().max():.4f} at most,")
    print("  the last rounding and nothing else\n")

    alibi = posenc.ALiBi(num_heads=8)
    print(f"{alibi}\n  head 4 adds to the scores of four queries, by key:")
    for row in alibi.get_bias(4)[4].tolist():
        print("   ", *(f"{v:8.4f}" for v in row))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("out/tour.png"))
    target = parser.parse_args().output
    tour()
    target.parent.mkdir(parents=True, exist_ok=True)
    gallery().savefig(target, dpi=120)
    print(f"picture: {target.resolve()}")
