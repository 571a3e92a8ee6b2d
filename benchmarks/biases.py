"""Attention with a bias on a GPU, against SDPA and FlexAttention, in one process.

    python benchmarks/biases.py [--only alibi|table|long|memory|first] [--json FILE]

Times are medians of interleaved rounds, in milliseconds, of calls from Python without a CUDA
graph; a result that is wrong stops the script. The last column is the ratio to reach.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from posenc.attention import DistanceTable, RunningSum, alibi_attention, biased_attention
from posenc.functional import alibi_slopes

ROUNDS, CALLS = 15, 10
RESULTS: list[dict[str, Any]] = []


def race(*functions: Callable[[], object]) -> list[float]:
    """Median milliseconds of each function's call, from interleaved rounds."""
    for f in functions:
        for _ in range(3):
            f()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(ROUNDS):
        for f, each in zip(functions, times, strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                f()
            torch.cuda.synchronize()
            each.append((time.perf_counter() - begin) / CALLS * 1000)
    return [statistics.median(each) for each in times]


def draw(*shape: int, grad: bool = False) -> list[torch.Tensor]:
    """Random q, k and v."""
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
        for _ in range(3)
    ]


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Stop at a result that is wrong."""
    error = (got.float() - wanted.float()).norm() / wanted.float().norm()
    if not error < 1e-2:
        sys.exit(f"a result is wrong by {error:.2e}")


def both(attend: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> Callable[[], object]:
    """Forward and backward."""
    g = torch.randn_like(attend())
    return lambda: torch.autograd.grad(attend(), inputs, g)


def captured(
    attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> Callable[[], object]:
    """Forward and backward as a CUDA graph, whose replay has no cost of Python."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Autograd runs the gradient of a leaf on the stream that the leaf is from.
        own = [x.detach().clone().requires_grad_() for x in inputs]
        g = torch.randn_like(own[0])
        for _ in range(3):
            torch.autograd.grad(attend(*own), own, g)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        torch.autograd.grad(attend(*own), own, g)

    def replay() -> object:
        graph.replay()
        return own, g  # the graph holds addresses alone

    return replay


def show(name: str, ours: float, other: float, reach: str) -> None:
    """Print one comparison and keep it."""
    RESULTS.append({"name": name.strip(), "posenc": ours, "other": other})
    print(f"{name:58s} {ours:9.3f} {other:9.3f}  {ours / other:6.2f}  reach {reach}", flush=True)


def alibi(lengths: tuple[int, ...] = (256, 1024, 2048)) -> None:
    """Against FlexAttention with ALiBi and a ready mask."""
    slopes = alibi_slopes(32, device="cuda")
    flex = torch.compile(flex_attention)
    for length in lengths:
        q, k, v = draw(4, 32, length, 128, grad=True)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length)

        def mod(score, b, h, i, j):  # type: ignore[no-untyped-def]
            return score + slopes[h] * (j - i)

        def ours(q=q, k=k, v=v):  # type: ignore[no-untyped-def]
            return alibi_attention(q, k, v, slopes, causal=True)

        def theirs(q=q, k=k, v=v, mask=mask):  # type: ignore[no-untyped-def]
            return flex(q, k, v, mod, mask)

        check(ours(), theirs())
        with torch.no_grad():
            a, b = race(ours, theirs)
        show(f"ALiBi forward, L = {length}, FlexAttention", a, b, "1.0")
        a, b = race(both(ours, [q, k, v]), both(theirs, [q, k, v]))
        show(f"ALiBi forward + backward, L = {length}, FlexAttention", a, b, "1.0")


def long() -> None:
    """ALiBi, and a forgetting gate, against SDPA without a bias."""
    slopes = alibi_slopes(32, device="cuda")
    for length, batch in ((4096, 4), (8192, 4), (32768, 1)):
        q, k, v = draw(batch, 32, length, 128)
        gates = F.logsigmoid(torch.randn(batch, 32, length, device="cuda").double() + 3)
        sums = RunningSum(gates.cumsum(-1))
        times = race(
            lambda q=q, k=k, v=v: alibi_attention(q, k, v, slopes, causal=True),  # type: ignore[misc]
            lambda q=q, k=k, v=v, sums=sums: biased_attention(q, k, v, sums, causal=True),  # type: ignore[misc]
            lambda q=q, k=k, v=v: biased_attention(q, k, v, causal=True),  # type: ignore[misc]
            lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True),  # type: ignore[misc]
        )
        show(f"ALiBi forward, L = {length}, SDPA without a bias", times[0], times[3], "< 1.0")
        show(f"forgetting gate forward, L = {length}, SDPA", times[1], times[3], "-")
        show(f"no bias forward, L = {length}, SDPA", times[2], times[3], "-")


def table() -> None:
    """A table of distances, fixed and learned, against SDPA without a bias."""
    for length, reach in ((2048, "1.3"), (8192, "2.5")):
        q, k, v = draw(1, 16, length, 64, grad=True)
        numbers = torch.randn(16, length, device="cuda")
        learned = numbers.clone().requires_grad_()
        few = torch.randn(16, 128, device="cuda", requires_grad=True)

        def ours(values=numbers, q=q, k=k, v=v):  # type: ignore[no-untyped-def]
            return biased_attention(q, k, v, DistanceTable(values), causal=True)

        def theirs(q=q, k=k, v=v):  # type: ignore[no-untyped-def]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        small = [x[:, :2, :1024] for x in (q, k, v)]
        exact = biased_attention(
            *(x.double() for x in small),
            DistanceTable(numbers[:2].double()),
            causal=True,
            backend="dense",
        )
        check(biased_attention(*small, DistanceTable(numbers[:2]), causal=True), exact)
        with torch.no_grad():
            a, b, c = race(ours, theirs, lambda ours=ours, few=few: ours(few))
        show(f"fixed table forward, L = {length}, SDPA", a, b, "1.8 at 8192")
        show(f"fixed table of 128 distances (T5) forward, L = {length}, SDPA", c, b, "-")
        a, b, c, d = race(
            both(lambda ours=ours, t=learned: ours(t), [q, k, v, learned]),
            both(theirs, [q, k, v]),
            both(ours, [q, k, v]),
            both(lambda ours=ours, few=few: ours(few), [q, k, v, few]),
        )
        show(f"learned table forward + backward, L = {length}, SDPA", a, b, reach)
        e, f = race(
            captured(lambda q, k, v, t, ours=ours: ours(t, q, k, v), [q, k, v, learned]),
            captured(theirs, [q, k, v]),
        )
        show(f"learned table in CUDA graphs, L = {length}, SDPA", e, f, reach)
        show(f"fixed table forward + backward, L = {length}, SDPA", c, b, "-")
        show(f"learned table of 128 (T5) forward + backward, L = {length}, SDPA", d, b, "-")


def memory() -> None:
    """Memory beside inputs, outputs and gradients at 32,768 tokens."""
    length = 32768
    for heads, width in ((32, 128), (16, 64)):
        slopes = torch.nn.Parameter(alibi_slopes(heads, device="cuda"))
        learned = torch.randn(heads, length, device="cuda", requires_grad=True)
        sums = F.logsigmoid(torch.randn(1, heads, length, device="cuda").double() + 3).cumsum(-1)
        biases = {
            "slopes": lambda q, k, v, s=slopes: alibi_attention(q, k, v, s, causal=True),
            "table": lambda q, k, v, t=learned: biased_attention(
                q, k, v, DistanceTable(t), causal=True
            ),
            "sums": lambda q, k, v, c=sums: biased_attention(q, k, v, RunningSum(c), causal=True),
        }
        for name, attend in biases.items():
            q, k, v = draw(1, heads, length, width, grad=True)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = attend(q, k, v)
            g = torch.ones_like(out)
            out.backward(g)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            # The output, its gradient, and those of q, k and v.
            beside = (peak - 5 * q.numel() * 2) / 2**20
            del q, k, v, out, g
            RESULTS.append({"name": f"memory, {name}, H = {heads}, D = {width}", "MiB": beside})
            print(f"{RESULTS[-1]['name']}: {beside:.0f} MiB  reach 100", flush=True)


FIRST = """
import time, torch
import posenc
from posenc.attention import alibi_attention, biased_attention, DistanceTable
from posenc.functional import alibi_slopes
kind = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
q, k, v = (torch.randn(1, 8, 2048, 64, **kind) for _ in range(3))
table = torch.zeros(8, 2048, device="cuda", requires_grad=True)
slopes = alibi_slopes(8, device="cuda")
torch.cuda.synchronize()
def timed(name, f):
    begin = time.perf_counter()
    result = f()
    torch.cuda.synchronize()
    print(f"first call, {name}: {time.perf_counter() - begin:.1f} s  reach 3", flush=True)
    return result
out = timed("ALiBi forward", lambda: alibi_attention(q, k, v, slopes, causal=True))
timed("ALiBi backward", lambda: out.sum().backward())
out = timed("table forward", lambda: biased_attention(q, k, v, DistanceTable(table), causal=True))
timed("table backward", lambda: out.sum().backward())
for name, module in {
    "FIRE": posenc.FIRE(8),
    "RelativeKeys": posenc.RelativeKeys(64, max_distance=128),
    "DeBERTaBias": posenc.DeBERTaBias(8, head_dim=64, position_buckets=256, causal=False),
    "CoPE": posenc.CoPE(64, max_pos=64),
}.items():
    module.to("cuda")
    timed(f"{name} forward and backward", lambda: module(q, k, v).sum().backward())
"""


def first() -> None:
    """The first calls of a process, with an empty cache of compiled kernels."""
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        command = [sys.executable, "-c", FIRST]
        done = subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    print(done.stdout, end="")
    for line in done.stdout.splitlines():
        name, _, seconds = line.partition(": ")
        RESULTS.append({"name": name, "seconds": float(seconds.split()[0])})


PARTS = {"alibi": alibi, "long": long, "table": table, "memory": memory, "first": first}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="*")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in options.only or PARTS:
        PARTS[name]()
    timing.write(options.json, RESULTS, rounds=ROUNDS)
