"""Train a decoder with any encoding on any mesh: FSDP2, tensor and context parallel, compile.

    python examples/train.py
    torchrun --nproc-per-node 8 examples/train.py --tp 2 --cp 2 --encoding T5Bias --compile

Every mesh starts from the same parameters and reads the same batches, so it has the losses of one
process. With --checkpoint, the same command goes on where it stopped, also on another mesh.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import posenc
from posenc import positions
from posenc.attention import biased_attention
from posenc.interop.ring import ring_attention

WORDS = 256  # a word is a byte


class Encoding(NamedTuple):
    build: Callable[[argparse.Namespace], nn.Module | None]
    # Where it acts: on the "input", on queries and keys ("rotation"), on scores by a bias of
    # "distance", or as the whole "attention".
    acts: str = "input"
    # The modes that it cannot be trained in, and why.
    refuses: tuple[str, ...] = ()
    reason: str = ""


def per_head(build: Callable[[argparse.Namespace], nn.Module]) -> Encoding:
    reason = "it rotates each head by learned numbers of that head, and must see all heads"
    return Encoding(build, "rotation", ("tp",), reason)


def of_content(build: Callable[[argparse.Namespace], nn.Module]) -> Encoding:
    reason = "its bias depends on the content of the tokens, and must see all heads and keys"
    return Encoding(build, "attention", ("tp", "cp"), reason)


ENCODINGS = {
    "NoPE": Encoding(lambda a: None),
    "SinusoidalPosEmbedding": Encoding(lambda a: posenc.SinusoidalPosEmbedding()),
    "LearnedPosEmbedding": Encoding(lambda a: posenc.LearnedPosEmbedding(a.length, a.width)),
    "RoPE": Encoding(lambda a: posenc.RoPE(a.dim, a.length, interleaved=False), "rotation"),
    "XPos": Encoding(lambda a: posenc.XPos(a.dim, max_seq_len=a.length), "rotation"),
    "MixedRoPE": per_head(lambda a: posenc.MixedRoPE(a.dim, num_kv_heads=a.heads, coordinates=1)),
    "STRING": per_head(lambda a: posenc.STRING(a.dim, num_kv_heads=a.heads, coordinates=1)),
    "PoPE": per_head(lambda a: posenc.PoPE(a.dim, num_kv_heads=a.heads, max_seq_len=a.length)),
    "ALiBi": Encoding(lambda a: posenc.ALiBi(a.heads), "distance"),
    "T5Bias": Encoding(lambda a: posenc.T5Bias(a.heads, causal=True), "distance"),
    "LearnedBias": Encoding(lambda a: posenc.LearnedBias(a.heads, max_distance=64), "distance"),
    "KERPLE": Encoding(lambda a: posenc.KERPLE(a.heads), "distance"),
    "Sandwich": Encoding(lambda a: posenc.Sandwich(a.heads, dim=a.dim), "distance"),
    # Up to a threshold that is not learned, it is a function of the distance only.
    "FIRE": Encoding(
        lambda a: posenc.FIRE(a.heads, threshold=a.length, learn_threshold=False), "distance"
    ),
    "CoPE": of_content(lambda a: posenc.CoPE(a.dim, max_pos=64)),
    "RelativeKeys": of_content(lambda a: posenc.RelativeKeys(a.dim, max_distance=64)),
    "TransformerXLBias": of_content(lambda a: posenc.TransformerXLBias(a.heads, embed_dim=a.width)),
}


class Mesh:
    """Ranks by what they share: ``tp`` a layer, ``cp`` a sequence, and ``dp`` nothing.

    Neighbours share a layer, because they exchange the most. Parameters are
    sharded over ``shards``, which are ``dp`` and ``cp`` together: ranks with other tokens.
    """

    def __init__(self, device: str, dp: int, cp: int, tp: int) -> None:
        two = init_device_mesh(device, (dp * cp, tp), mesh_dim_names=("shards", "tp"))
        three = init_device_mesh(device, (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
        self.device, self.shards, self.tp = device, two["shards"], two["tp"]
        self.dp, self.cp = three["dp"], three["cp"]


class Block(nn.Module):
    """Attention and a feed-forward layer. Linear layers have this rank's heads and channels."""

    def __init__(self, args: argparse.Namespace, mesh: Mesh) -> None:
        super().__init__()
        self.dim, self.mesh, self.encoding = args.dim, mesh, None
        self.acts = ENCODINGS[args.encoding].acts
        if self.acts != "input":
            # FSDP2 moves parameters to the device, and not the tables of an encoding.
            self.encoding = ENCODINGS[args.encoding].build(args).to(mesh.device)
        if mesh.cp.size() > 1:
            # Messages between ranks are no part of a compiled graph.
            self.attend = torch.compiler.disable(self.attend)
        self.norm1, self.norm2 = nn.RMSNorm(args.width), nn.RMSNorm(args.width)
        self.qkv = nn.Linear(args.width, 3 * args.width, bias=False)
        self.out = nn.Linear(args.width, args.width, bias=False)
        self.up = nn.Linear(args.width, 4 * args.width, bias=False)
        self.down = nn.Linear(4 * args.width, args.width, bias=False)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        """Tokens ``x``, which are at positions ``at`` of their sequence."""
        # Heads come first, so that a rank's part of the rows of qkv is some heads' q, k and v.
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.dim)).transpose(1, 2).unbind(3)
        y = self.attend(q, k, v, at)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        cp, bias, scale = self.mesh.cp, None, self.dim**-0.5
        if self.acts == "attention":
            return self.encoding(q, k, v, scale=scale)
        if self.acts == "rotation":
            q, k = self.encoding(q, k, position_ids=at)
        elif self.acts == "distance":
            wide = torch.promote_types(q.dtype, torch.float32)
            bias = self.encoding.as_bias(k.shape[2] * cp.size(), dtype=wide)
            bias = bias._replace(values=own_heads(bias.values, self.mesh.tp))
        if cp.size() == 1:
            return biased_attention(q, k, v, bias, causal=True, scale=scale)
        return ring_attention(
            q, k, v, bias, causal=True, group=cp.get_group(), zigzag=True, scale=scale
        )


def own_heads(values: Tensor, tp: DeviceMesh) -> Tensor:
    """The part for this rank's heads, which are the first axis; gradients of all are gathered."""
    if tp.size() == 1:
        return values
    whole = DTensor.from_local(values, tp, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


class Decoder(nn.Module):
    def __init__(self, args: argparse.Namespace, mesh: Mesh) -> None:
        super().__init__()
        encoding = ENCODINGS[args.encoding]
        self.embed = nn.Embedding(WORDS, args.width)
        self.added = encoding.build(args) if encoding.acts == "input" else None
        self.blocks = nn.ModuleList(Block(args, mesh) for _ in range(args.layers))
        self.norm, self.head = nn.RMSNorm(args.width), nn.Linear(args.width, WORDS, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor, at: Tensor) -> Tensor:
        """The mean loss of tokens at positions ``at``, each of which predicts its target."""
        # A copy: torch 2.13 loses the gradient of a sum over ranks that enters a compiled block.
        x = self.embed(tokens).clone()
        if self.added is not None:
            x = self.added(x, position_ids=at)
        for block in self.blocks:
            x = block(x, at)
        logits = self.head(self.norm(x)).flatten(0, 1).to(torch.get_default_dtype())
        return F.cross_entropy(logits, targets.flatten())


def build(args: argparse.Namespace, mesh: Mesh) -> Decoder:
    """The model on this mesh. It is whole in host memory first: the same numbers on every mesh."""
    torch.manual_seed(args.seed)
    model = Decoder(args, mesh)
    if mesh.tp.size() > 1:
        # Between these layers, a token has the same numbers on all ranks of tp.
        ends = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh.tp, ends)
        for block in model.blocks:
            inside = {"qkv": ColwiseParallel(), "up": ColwiseParallel()}
            inside |= {"out": RowwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh.tp, inside)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if args.bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        if isinstance(block.encoding, (posenc.MixedRoPE, posenc.PoPE)):
            # Numbers that are multiplied by positions stay float32.
            fully_shard(block.encoding, mesh=mesh.shards)
        if args.compile:
            block.compile(backend=args.compile)
        fully_shard(block, mesh=mesh.shards, mp_policy=policy)
    return fully_shard(model, mesh=mesh.shards, mp_policy=policy)


def read_text(args: argparse.Namespace) -> Tensor:
    """The bytes of a file, or of some thousand sums."""
    if args.text:
        content = Path(args.text).read_bytes()
    else:
        draw = torch.Generator().manual_seed(0)
        pairs = torch.randint(1000, (4000, 2), generator=draw).tolist()
        content = "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs).encode()
    if len(content) <= args.length:
        sys.exit(f"--text must have more than --length bytes, {args.length}, got {len(content)}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def read_batch(text: Tensor, step: int, at: Tensor, args: argparse.Namespace, mesh: Mesh) -> Tensor:
    """This rank's tokens, and those that follow them, from the batch that all ranks draw."""
    draw = torch.Generator().manual_seed(args.seed + step)
    first = torch.randint(len(text) - args.length, (args.batch,), generator=draw)
    first = first.chunk(mesh.dp.size())[mesh.dp.get_local_rank()]
    index = first[:, None] + at.cpu()
    return torch.stack((text[index], text[index + 1])).to(mesh.device)


def snapshot(model: Decoder, optimizer: torch.optim.Optimizer, step: int) -> dict:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "step": step}


def resume(folder: str, model: Decoder, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint; the number of steps that it has seen, 0 without one."""
    # .metadata is written last: without it, the run was stopped while it saved.
    complete = [path.parent for path in Path(folder).glob("step-*/.metadata")]
    if not complete:
        return 0
    newest = max(complete, key=lambda path: int(path.name.removeprefix("step-")))
    state = snapshot(model, optimizer, 0)
    dcp.load(state, checkpoint_id=newest)
    parameters, moments = state["model"], state["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    return state["step"]


def train(args: argparse.Namespace) -> tuple[Decoder, list[float]]:
    """The trained model, and the loss of every step; all ranks call it."""
    mesh = Mesh(args.device, args.dp, args.cp, args.tp)
    model, text = build(args, mesh), read_text(args)
    # One parameter at a time: with tp, linear layers and norms are on different meshes.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
    ranks = mesh.cp.get_local_rank(), mesh.cp.size()
    at = positions.context_parallel(args.length, *ranks, zigzag=True, device=args.device)
    losses, start = [], resume(args.checkpoint, model, optimizer) if args.checkpoint else 0
    for step in range(start, args.steps):
        tokens, targets = read_batch(text, step, at, args, mesh)
        loss = model(tokens, targets, at)
        # FSDP2 averages gradients over the shards, which all have as many tokens.
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / mesh.shards.size()
        dist.all_reduce(mean, group=mesh.shards.get_group())
        losses.append(mean.item())
        done = step + 1 == args.steps
        if dist.get_rank() == 0 and (step % args.every == 0 or done):
            print(f"step {step} loss {losses[-1]:.6f}", flush=True)
        if args.checkpoint and ((step + 1) % args.save_every == 0 or done):
            path = Path(args.checkpoint, f"step-{step + 1}")
            dcp.save(snapshot(model, optimizer, step + 1), checkpoint_id=path)
    return model, losses


def parse(arguments: list[str] | None = None, ranks: int = 1) -> argparse.Namespace:
    """The arguments for this number of ranks, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--encoding", choices=ENCODINGS, default="RoPE", metavar="NAME", help=", ".join(ENCODINGS))
    add("--dp", type=int, help="ranks with other sequences (default: all that are left)")
    add("--tp", type=int, default=1, help="ranks that share every layer")
    add("--cp", type=int, default=1, help="ranks that share every sequence")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="use torch.compile")
    add("--bf16", action="store_true", help="compute in bfloat16, with float32 parameters")
    add("--checkpoint", metavar="FOLDER", help="save here, and go on from the newest one here")
    add("--save-every", type=int, default=100, metavar="STEPS")
    add("--text", metavar="FILE", help="train on its bytes (default: sums of two numbers)")
    for name, default in {"steps": 100, "every": 10, "batch": 8, "length": 128}.items():
        add(f"--{name}", type=int, default=default)
    for name, default in {"width": 128, "heads": 4, "layers": 2, "seed": 0}.items():
        add(f"--{name}", type=int, default=default)
    add("--lr", type=float, default=3e-3)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    args.dp = args.dp or max(1, ranks // (args.tp * args.cp))
    args.dim = args.width // args.heads
    size = args.dp * args.tp * args.cp
    if size != ranks:
        parser.error(f"--dp x --tp x --cp must be the number of ranks, {ranks}, got {size}")
    for name, parts, of in (
        ("batch", args.dp, "--dp"),
        ("heads", args.tp, "--tp"),
        ("width", args.heads, "--heads"),
        ("length", 2 * args.cp, "2 x --cp"),
    ):
        if getattr(args, name) % parts:
            got = getattr(args, name)
            parser.error(f"--{name} must be a multiple of {of}, {parts}, got {got}")
    encoding = ENCODINGS[args.encoding]
    for mode in encoding.refuses:
        if getattr(args, mode) > 1:
            parser.error(f"--{mode} must be 1 for {args.encoding}: {encoding.reason}; use --dp")
    return args


def main() -> None:
    # torchrun tells each process its rank; without it, there is one process.
    args = parse(ranks=int(os.environ.get("WORLD_SIZE", 1)))
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", **alone)
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
