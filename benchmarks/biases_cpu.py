"""Biases on the CPU against SDPA with a ready matrix: `python benchmarks/biases_cpu.py`.

A learned bias is compared with a matrix that needs a gradient, a fixed one with a matrix that does
not. Right first: a result that is off is not timed. A round times both once, and the ratio is of
the medians. Peak memory is the high-water mark of a process that makes this one call, beside its
inputs; for SDPA the matrix counts.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import timing
import torch
import torch.nn.functional as F
from torch import Tensor

from posenc.attention import (
    DistanceTable,
    RunningSum,
    Slopes,
    biased_attention,
    relative_bias,
)
from posenc.functional import alibi_slopes

HEADS, WIDTH = 8, 64
LENGTHS = (128, 256, 512, 1024, 2048, 8192)
MODES = ("forward", "train", "learn")  # learn: the bias has a gradient, too


def bias_of(kind: str, length: int) -> Slopes | DistanceTable | RunningSum | None:
    """A bias as a model has it: ALiBi's slopes, a table of 512 distances, gates near one."""
    generator = torch.Generator().manual_seed(1)
    if kind == "slopes":
        return Slopes(alibi_slopes(HEADS))
    if kind == "table":
        return DistanceTable(torch.randn(HEADS, 512, generator=generator))
    if kind == "sums":
        gates = torch.randn(HEADS, length, generator=generator, dtype=torch.float64) + 4
        return RunningSum(F.logsigmoid(gates).cumsum(-1))
    return None


def matrix_of(kind: str, length: int) -> Tensor:
    """The bias as a matrix, float32 ``(1, H, L, L)``, with minus infinity above the diagonal."""
    bias = bias_of(kind, length) or Slopes(torch.zeros(HEADS))
    return relative_bias(bias, length)[None]


def contestants(
    kind: str, length: int, mode: str, matrix: Callable[[str, int], Tensor] = matrix_of
) -> dict[str, Callable[[], Callable[..., list]]]:
    """What makes each: a function of q, k, v and the output's gradient."""

    def posenc() -> Callable[..., list]:
        bias = bias_of(kind, length)
        values = [] if bias is None else [bias.values.requires_grad_(mode == "learn")]
        return functools.partial(
            run, lambda q, k, v: biased_attention(q, k, v, bias, causal=True), values
        )

    def sdpa() -> Callable[..., list]:
        mask = matrix(kind, length).requires_grad_(mode == "learn")
        attend = functools.partial(F.scaled_dot_product_attention, attn_mask=mask)
        return functools.partial(run, attend, [mask])

    def run(attend: Callable[..., Tensor], values: list, q: Tensor, *others: Tensor) -> list:
        k, v, g = others
        if mode == "forward":
            return [attend(q, k, v)]
        xs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*xs)
        learned = [x for x in values if x.requires_grad]
        return [out, *torch.autograd.grad(out, xs + learned, g)]

    return {"posenc": posenc, "matrix": sdpa}


def inputs(length: int) -> list[Tensor]:
    """Random normal q, k, v and gradient, ``(1, H, L, D)``."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, length, WIDTH)
    return [torch.randn(shape, generator=generator) for _ in range(4)]


def is_right(mine: list[Tensor], other: list[Tensor]) -> bool:
    """Whether the outputs and the gradients of q, k and v agree within float32's rounding."""
    pairs = zip(mine[:4], other[:4], strict=True)
    return all(bool((a - b).abs().max() <= 3e-5 * b.abs().max()) for a, b in pairs)


def memory(kind: str, length: int, mode: str, name: str) -> float:
    """MiB of one call at its peak, in a process of its own."""
    command = [sys.executable, __file__, "--once", kind, str(length), mode, name]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(made.stdout) / 2**20


def once(kind: str, length: str, mode: str, name: str) -> None:
    """Print the high-water mark of one call, beside its inputs, in bytes."""
    contestants(kind, 64, mode)[name]()(*inputs(64))
    xs = inputs(int(length))
    before = high_water()

    # Making the true matrix takes more memory than it has.
    def matrix(kind: str, length: int) -> Tensor:
        return torch.ones(1, HEADS, length, length)

    contestants(kind, int(length), mode, matrix)[name]()(*xs)
    print(high_water() - before)


def high_water() -> int:
    """Most memory this process ever had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure(kind: str, length: int, mode: str, rounds: int) -> str:
    """A line of the table: both times, their ratio, and that of the memory."""
    xs = inputs(length)
    made = {name: make() for name, make in contestants(kind, length, mode).items()}
    if not is_right(*(call(*xs) for call in made.values())):
        return "wrong, so not timed"
    lanes = [
        timing.loop_lane(name, [functools.partial(call, *xs)], device="cpu", grad=True)
        for name, call in made.items()
    ]
    for lane in lanes:
        lane.calibrate(0.03)
    timing.race(lanes, rounds)
    mine, other = (timing.quartiles(lane.seconds)[1] for lane in lanes)
    mib = [memory(kind, length, mode, name) for name in made] if length >= 1024 else []
    text = f"{mine * 1e3:10.2f} ms {other * 1e3:10.2f} ms  ratio {mine / other:5.2f}"
    return text + (f"   {mib[0]:7.0f} MiB {mib[1]:7.0f} MiB {mib[0] / mib[1]:6.3f}" if mib else "")


def main() -> None:
    """Print a line for each kind, length and mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--kinds", nargs="+", default=["none", "slopes", "table", "sums"])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--once", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.once:
        once(*args.once)
        return
    print("kind    length mode          posenc        matrix")
    for length in args.lengths:
        for mode in args.modes:
            for kind in args.kinds:
                # Matrix, weights and their gradients do not fit in most machines.
                if (kind, mode) == ("none", "learn") or (mode == "learn" and length > 4096):
                    continue
                rounds = args.rounds if length <= 2048 else 3
                print(
                    f"{kind:7} {length:6} {mode:8}", measure(kind, length, mode, rounds), flush=True
                )


if __name__ == "__main__":
    main()
