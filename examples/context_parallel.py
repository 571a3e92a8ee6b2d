"""Four processes share each sequence and train to the losses of one process.

The sequence is cut zig-zag, so that causal attention costs every rank the same, and each rank
encodes its tokens by the positions they have in the whole. Keys and values go from rank to rank,
those of ALiBi only as far as they count.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import posenc
from posenc import positions
from posenc.attention import Slopes, biased_attention
from posenc.interop.ring import ring_attention

PROCESSES, LENGTH, BATCH, STEPS = 4, 64, 2, 20
WORDS, HEADS, WIDTH = 13, 4, 32


class Attention(nn.Module):
    """Causal attention over a sequence of which this rank may hold a part."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.rope = posenc.RoPE(WIDTH // HEADS) if encoding == "rope" else None
        self.bias = Slopes(posenc.functional.alibi_slopes(HEADS)) if encoding == "alibi" else None

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Tokens ``x`` at positions ``ids``: a whole sequence, or those of this rank."""
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        if self.rope is not None:
            q, k = self.rope(q, k, position_ids=ids)
        if dist.is_initialized():
            y = ring_attention(q, k, v, self.bias, causal=True, zigzag=True)
        else:
            y = biased_attention(q, k, v, self.bias, causal=True)
        return x + y.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Embedding, one layer of attention, and a head."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.attention = Attention(encoding)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, ids: Tensor) -> Tensor:
        """Scores of the word that follows each of ``words``."""
        return self.head(self.attention(self.tokens(words), ids))


def train(encoding: str, device: str) -> list[float]:
    """Losses of some steps; among several ranks, this one has its part of every sequence."""
    torch.manual_seed(0)
    model = Model(encoding).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    text = torch.randint(0, WORDS, (BATCH, LENGTH + 1)).to(device)
    ids = torch.arange(LENGTH, device=device)
    if dist.is_initialized():
        here = (LENGTH, dist.get_rank(), dist.get_world_size())
        ids = positions.context_parallel(*here, zigzag=True, device=device)
    for _ in range(STEPS):
        logits = model(text[:, ids], ids)
        following = text[:, ids + 1]
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
        loss = loss / (BATCH * LENGTH)
        loss.backward()
        loss = loss.detach()
        if dist.is_initialized():
            for total in (loss, *(p.grad for p in model.parameters())):
                dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def rank_main(rank: int, store: str, device: str) -> None:
    torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    if device == "cuda":
        torch.cuda.set_device(rank)
    losses = {encoding: train(encoding, device) for encoding in ("rope", "alibi")}
    if rank == 0:
        torch.save(losses, f"{store}-losses")
    dist.destroy_process_group()


def main() -> None:
    device = "cuda" if torch.cuda.device_count() >= PROCESSES else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        # A fork of a process that has not computed yet starts in no time; CUDA cannot be forked.
        method = "fork" if device == "cpu" and sys.platform == "linux" else "spawn"
        torch.multiprocessing.start_processes(
            rank_main, (store, device), nprocs=PROCESSES, start_method=method
        )
        four = torch.load(f"{store}-losses")
    one = {encoding: train(encoding, device) for encoding in ("rope", "alibi")}
    for name in one:
        print(f"{name}: {one[name][0]:.6f} at first, {one[name][-1]:.6f} after {STEPS} steps")
    apart = max(abs(a - b) for name in one for a, b in zip(one[name], four[name], strict=True))
    print(f"losses of four processes are those of one to {apart:.1e}")
    assert apart < 1e-5, "float32 sums in another order differ by less"


if __name__ == "__main__":
    main()
