"""Time and memory of ALiBi attention: `python benchmarks/alibi.py --device cuda --json FILE`.

Right first: a contestant whose output is off in float64 is not timed. All run in one process, a
round times each of them once, and medians are shown. Peak memory is what a call needs beside its
inputs and its result: on CUDA by the allocator, on the CPU by the high-water mark of a process
that makes this one call.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import timing
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import posenc
from posenc.lab import machine

CASES = {  # heads, width, dtype, lengths
    "cuda": (32, 128, torch.bfloat16, (8192, 32768)),
    "cpu": (8, 64, torch.float32, (8192,)),
}
REFERENCE = "SDPA causal, no ALiBi"


def inputs(heads: int, length: int, width: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Random normal q, k and v, ``(1, H, L, D)``."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, heads, length, width)
    return [torch.randn(shape, generator=generator, dtype=dtype, device=device) for _ in range(3)]


def contestants(alibi: posenc.ALiBi, length: int, device: str, dtype: torch.dtype):
    """Name of each, and what makes it: a function of q, k and v."""
    found: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "posenc": lambda: alibi.attention,
        "posenc, not pruned": lambda: lambda q, k, v: alibi.attention(q, k, v, prune=False),
        REFERENCE: lambda: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    if device == "cuda":
        found["FlexAttention + ALiBi"] = lambda: flex(alibi, length)
    if length <= 8192:
        found["SDPA + bias matrix"] = lambda: matrix(alibi, length, dtype, device)
    return found


def flex(alibi: posenc.ALiBi, length: int) -> Callable[..., Tensor]:
    """FlexAttention as its documentation has ALiBi: a causal block mask and a score_mod."""
    slopes = alibi.slopes
    mask = create_block_mask(
        lambda b, h, q, k: q >= k, None, None, length, length, device=slopes.device
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(
        q, k, v, lambda score, b, h, i, j: score + slopes[h] * (j - i), mask
    )


def matrix(alibi: posenc.ALiBi, length: int, dtype: torch.dtype, device: str):
    """SDPA with the bias made beforehand, as a model makes it once for its layers."""
    bias = alibi.bias(length, dtype=dtype, device=device)[None]
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> float:
    """Largest error over some rows, in spacings of the dtype at the largest value."""
    length = q.shape[2]
    rows = torch.linspace(0, length - 1, 64, device=q.device).long()
    scores = q[:, :, rows].double() @ k.double().mT / math.sqrt(q.shape[-1])
    ahead = torch.arange(length, device=q.device) - rows[:, None]
    scores += slopes.double()[:, None, None] * ahead
    exact = scores.masked_fill(ahead > 0, -math.inf).softmax(-1) @ v.double()
    off = (out[:, :, rows].double() - exact).abs().max()
    return float(off / v.abs().max() / torch.finfo(q.dtype).eps)


def train(run: Callable[..., Tensor], *xs: Tensor) -> Callable[[], None]:
    """Forward and backward."""
    leaves = [x.detach().clone().requires_grad_() for x in xs]
    gradient = torch.randn_like(xs[0])

    def step() -> None:
        torch.autograd.grad(run(*leaves), leaves, gradient)

    return step


def cuda_memory(call: Callable[[], Tensor]) -> int:
    """Bytes that a call needs at its peak, beside its inputs and result."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    return torch.cuda.max_memory_allocated() - before - out.nbytes


def cpu_memory(name: str, length: int, threads: int) -> int:
    """The same on the CPU, where only a fresh process can tell."""
    command = [sys.executable, __file__, "--device", "cpu", "--threads", str(threads)]
    command += ["--once", name, "--length", str(length)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def once(name: str, length: int) -> None:
    """Print the high-water mark of one call, beside its inputs and result, in bytes."""
    heads, width, dtype, _ = CASES["cpu"]
    alibi, xs = posenc.ALiBi(heads), inputs(heads, length, width, dtype, "cpu")
    small = contestants(alibi, 512, "cpu", dtype)[name]()
    small(*(x[:, :, :512] for x in xs))
    kept = torch.ones_like(xs[0])  # the result's place
    before = high_water()
    del kept
    contestants(alibi, length, "cpu", dtype)[name]()(*xs)
    print(high_water() - before)


def high_water() -> int:
    """Most memory this process ever had, in bytes; getrusage would count its parent's, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure(
    device: str, length: int, mode: str, rounds: int, threads: int, only: list[str] | None = None
) -> list[dict]:
    """Every contestant at one length: checked, then timed."""
    heads, width, dtype, _ = CASES[device]
    alibi = posenc.ALiBi(heads).to(device)
    xs = inputs(heads, length, width, dtype, device)
    results, lanes = [], []
    for name, make in contestants(alibi, length, device, dtype).items():
        if only and name not in only:
            continue
        run = make()
        with torch.no_grad():
            slopes = alibi.slopes * (name != REFERENCE)
            off = error(run(*xs), *xs, slopes)
        result = {"contestant": name, "length": length, "mode": mode, "error": off}
        results.append(result)
        if not off <= 4:
            print(f"{name} is wrong: off by {off}", file=sys.stderr)
            continue
        if mode == "forward" and device == "cuda":
            result["memory"] = cuda_memory(lambda run=run: run(*xs))
        elif mode == "forward":
            result["memory"] = cpu_memory(name, length, threads)
        step = train(run, *xs) if mode == "train" else (lambda run=run: run(*xs))
        lanes.append(timing.loop_lane(name, [step], device=device, grad=mode == "train"))
        # On the CPU a call takes seconds, and one is a round.
        lanes[-1].calibrate(0.02) if device == "cuda" else lanes[-1].run(1)
    timing.race(lanes, rounds)
    for lane in lanes:
        low, median, high = timing.quartiles(lane.seconds)
        result = next(r for r in results if r["contestant"] == lane.name)
        result |= {"median": median, "low": low, "high": high, "seconds": lane.seconds}
    return results


def save(args: argparse.Namespace, results: list[dict]) -> None:
    """Write what there is so far."""
    heads, width, dtype, _ = CASES[args.device]
    case = {"batch": 1, "heads": heads, "width": width, "dtype": str(dtype)}
    settings = {"threads": args.threads, "rounds": args.rounds}
    report = {"machine": machine.describe(), "case": case, "settings": settings, "results": results}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Measure, print a table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=CASES, default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--length", type=int)
    parser.add_argument("--modes", nargs="+", default=["forward", "train"])
    parser.add_argument("--only", nargs="+", help="contestants; all by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.once:
        with torch.no_grad():
            once(args.once, args.length)
        return
    lengths = [args.length] if args.length else CASES[args.device][3]
    found = []
    for length in lengths:
        for mode in args.modes:
            torch.compiler.reset()  # each length as its own model would compile it
            found += measure(args.device, length, mode, args.rounds, args.threads, args.only)
            for r in found[-5:]:
                if r["length"] == length and r["mode"] == mode and "median" in r:
                    memory = f"{r['memory'] / 2**20:9.1f} MiB" if "memory" in r else ""
                    line = f"{length:7} {mode:8} {r['contestant']:24} {r['median'] * 1e3:10.3f} ms"
                    print(f"{line} {memory} off by {r['error']:.2f}", flush=True)
            save(args, found)


if __name__ == "__main__":
    main()
