"""Four processes share each sequence and train to the losses of one process.

The sequence is cut zig-zag, so that causal attention costs every rank the same, and each rank
encodes its tokens by the positions they have in the whole. RoPE is attended through PyTorch's ring
attention where that runs (CUDA, four devices). On the CPU, and for ALiBi, whose bias the ring does
not take, keys and values are gathered and queries stay where they are.
"""

import sys
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel

import posenc
from posenc import positions

PROCESSES, LENGTH, BATCH, STEPS = 4, 64, 2, 20
WORDS, HEADS, WIDTH = 13, 4, 32


class Attention(nn.Module):
    """Causal attention over a sequence of which this rank may hold a part."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.rope = posenc.RoPE(WIDTH // HEADS) if encoding == "rope" else None
        self.alibi = posenc.ALiBi(HEADS) if encoding == "alibi" else None

    def forward(self, x: Tensor, ids: Tensor, mesh: DeviceMesh | None, ring: bool) -> Tensor:
        """Tokens ``x`` at positions ``ids``; with a mesh, those of this rank."""
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        if self.rope is not None:
            q, k = self.rope(q, k, position_ids=ids)
        if mesh is None or ring:
            y = self.attend(q, k, v)
        else:
            # Two runs of tokens, one from the front and one from the back: each sees the keys up
            # to its own last token.
            k, v = (whole(t, mesh) for t in (k, v))
            ends = [int(run[-1]) + 1 for run in ids.chunk(2)]
            runs = zip(q.chunk(2, dim=2), ends, strict=True)
            parts = [self.attend(run, k[:, :, :end], v[:, :, :end]) for run, end in runs]
            y = torch.cat(parts, dim=2)
        return x + y.transpose(1, 2).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of queries that are the last of the keys."""
        if self.alibi is not None:
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            return self.alibi(scores).softmax(-1) @ v
        if q.shape[2] == k.shape[2]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        seen = seen.tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def whole(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Keys or values of all ranks, by position; their gradients find the way back."""
    gathered = DTensor.from_local(x, mesh, [Shard(2)]).redistribute(placements=[Replicate()])
    order = [
        positions.context_parallel(LENGTH, rank, mesh.size(), zigzag=True)
        for rank in range(mesh.size())
    ]
    back = torch.cat(order).argsort().to(x.device)
    return gathered.to_local(grad_placements=[Partial()])[:, :, back]


class Model(nn.Module):
    """Embedding, one layer of attention, and a head."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.attention = Attention(encoding)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, ids: Tensor, mesh: DeviceMesh | None, ring: bool) -> Tensor:
        """Scores of the word that follows each of ``words``."""
        return self.head(self.attention(self.tokens(words), ids, mesh, ring))


def train(encoding: str, mesh: DeviceMesh | None, device: str) -> list[float]:
    """Losses of some steps; with a mesh, this rank has its part of every sequence."""
    torch.manual_seed(0)
    model = Model(encoding).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ring = encoding == "rope" and mesh is not None and device == "cuda"
    losses = []
    text = torch.randint(0, WORDS, (BATCH, LENGTH + 1))
    for _ in range(STEPS):
        ids, words, following = torch.arange(LENGTH), text[:, :-1], text[:, 1:]
        ids, words, following = (t.contiguous().to(device) for t in (ids, words, following))
        shared = nullcontext()
        if ring:
            # PyTorch cuts the buffers zig-zag itself, the positions with the rest.
            buffers = [words, following, ids]
            shared = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0])
        elif mesh is not None:
            here = (LENGTH, mesh.get_local_rank(), mesh.size())
            ids = positions.context_parallel(*here, zigzag=True, device=device)
            words, following = words[:, ids], following[:, ids]
        with shared:
            logits = model(words, ids, mesh, ring)
            loss = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
            loss = loss / (BATCH * LENGTH)
            loss.backward()
        loss = loss.detach()
        if mesh is not None:
            for total in (loss, *(p.grad for p in model.parameters())):
                dist.all_reduce(total, group=mesh.get_group())
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
    mesh = init_device_mesh(device, (PROCESSES,))
    losses = {encoding: train(encoding, mesh, device) for encoding in ("rope", "alibi")}
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
    one = {encoding: train(encoding, None, device) for encoding in ("rope", "alibi")}
    for name in one:
        print(f"{name}: {one[name][0]:.6f} at first, {one[name][-1]:.6f} after {STEPS} steps")
    apart = max(abs(a - b) for name in one for a, b in zip(one[name], four[name], strict=True))
    print(f"losses of four processes are those of one to {apart:.1e}")
    assert apart < 1e-5, "float32 sums in another order differ by less"


if __name__ == "__main__":
    main()
