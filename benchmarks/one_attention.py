"""The kernels of attention today, and the one attention that is to replace them, in turns.

    PYTHONPATH=src:tests python benchmarks/one_attention.py [--only slopes] [--json FILE]

Each core runs in processes of its own, which take turns. Every result is compared with the formula
in float64 for a few heads, and one that is off is not timed. Times are medians of a call in
milliseconds: forward, and forward and backward, from a CUDA graph, and from Python (`host`). It
needs a GPU, and goes when today's kernels go.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import posenc
from posenc.attention import biased_attention

# Sequences, heads of q and of k, tokens, channels.
SHAPES = [
    (1, 16, 16, 1024, 64),
    (1, 16, 16, 4096, 64),
    (1, 32, 8, 8192, 128),
    (4, 32, 32, 4096, 128),
]
QUERIES = {"decode": (8, 16, 16, 4096, 64)}
ROUNDS, CALLS = 7, 5


def modules(heads: int, width: int) -> dict[str, Any]:
    """A module of each kind of bias."""
    return {
        "none": None,
        "slopes": posenc.ALiBi(heads, learned=True),
        "table": posenc.LearnedBias(heads, max_distance=128),
        "T5": posenc.T5Bias(heads, causal=True),
        "KERPLE": posenc.KERPLE(heads),
        "RelativeKeys": posenc.RelativeKeys(width, max_distance=128),
        "TransformerXL": posenc.TransformerXLBias(heads, embed_dim=heads * width),
        "DeBERTa": posenc.DeBERTaBias(
            heads, head_dim=width, max_relative_positions=512, position_buckets=256, causal=False
        ),
        "FIRE": posenc.FIRE(heads),
        "CoPE": posenc.CoPE(width, max_pos=64),
    }


def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """A call as a user makes it."""
    if module is None:
        return biased_attention(q, k, v, causal=True, **options)
    result: Tensor = module(q, k, v, **options)
    return result


def error(module: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> float:
    """The largest error of the output and of the gradients of q, k and v, in norms."""
    inputs = [x[:1, :, :1024].clone().requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    above = g[:1, :, :1024]
    out = attend(module, *inputs)
    got = [out, *torch.autograd.grad(out, inputs, above)]
    true = attend(module, *wide, backend="dense")
    want = [true, *torch.autograd.grad(true, wide, above.double())]
    return max(float((x.double() - y).norm() / y.norm()) for x, y in zip(got, want, strict=True))


def timed(step: Any) -> tuple[float, float]:
    """Milliseconds of a call from a CUDA graph, and from Python."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            step()
    found = []
    for run in (graph.replay, lambda: [step() for _ in range(CALLS)]):
        times = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / CALLS * 1e3)
        found.append(statistics.median(times))
    return found[0], found[1]


def measure(core: str, only: str | None) -> None:
    """The times of one core, a line of JSON each."""
    if core == "one":
        from support.flash import use_one_attention

        use_one_attention(setattr)
    for name, (batch, heads, kv_heads, tokens, width) in [
        *[(str(shape), shape) for shape in SHAPES],
        *QUERIES.items(),
    ]:
        torch.manual_seed(0)
        queries = 1 if name == "decode" else tokens
        like: Any = {"device": "cuda", "dtype": torch.bfloat16}
        q, g = torch.randn(2, batch, heads, queries, width, **like).unbind()
        k, v = torch.randn(2, batch, kv_heads, tokens, width, **like).unbind()
        for kind, module in modules(heads, width).items():
            if only not in (None, kind) or (kind == "DeBERTa" and name == "decode"):
                continue
            row: dict[str, Any] = {"shape": name, "kind": kind}
            try:
                module = None if module is None else module.cuda()
                row["error"] = error(module, q, k, v, g) if queries > 1 else 0.0
                leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                wanted = [*leaves, *([] if module is None else module.parameters())]
                with torch.no_grad():
                    row["forward"], row["host"] = timed(lambda: attend(module, q, k, v))  # noqa: B023
                if queries > 1 and row["error"] < 2e-2:
                    row["both"], row["host both"] = timed(
                        lambda: torch.autograd.grad(attend(module, *leaves), wanted, g)  # noqa: B023
                    )
            except Exception as failure:  # what one kind does not do must not hide the others
                row["failure"] = f"{type(failure).__name__}: {str(failure)[:200]}"
            print(json.dumps(row), flush=True)


def main() -> None:
    """Both cores in turns, and the ratio of their times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", choices=["today", "one"])
    parser.add_argument("--only")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.core is not None:
        measure(options.core, options.only)
        return
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for _ in range(options.turns):
        for core in ("today", "one"):
            command = [sys.executable, __file__, "--core", core]
            command += [] if options.only is None else ["--only", options.only]
            lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            for row in map(json.loads, lines.splitlines()):
                key = f"{row['shape']} {row['kind']}"
                found.setdefault(key, {}).setdefault(core, []).append(row)
    for key, cores in found.items():
        parts = []
        for what in ("forward", "both", "host both", "error"):
            today, one = (
                [row[what] for row in cores.get(core, []) if what in row]
                for core in ("today", "one")
            )
            if today and one:
                a, b = min(today), min(one)
                ratio = "" if what == "error" or not a else f" {b / a:.2f}"
                parts.append(f"{what} {a:.3g} {b:.3g}{ratio}")
        failures = {row["failure"] for rows in cores.values() for row in rows if "failure" in row}
        print(key, "|", " | ".join([*parts, *failures]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
