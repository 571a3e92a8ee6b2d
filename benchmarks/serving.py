"""Norm, rotation and cache on a GPU: `rotate_and_cache` against a copy, its pieces, and peers.

    python benchmarks/serving.py [--only kernel host model] [--json FILE]

kernel: calls in a CUDA graph, as ratios to a copy of the bytes of q, k and v; a result that is
wrong stops the script. host: microseconds of a call from Python for one token. model: a Qwen3 of
1 B parameters with random weights, as it comes, patched, and patched with its norms left alone.
Times are medians of interleaved rounds. Peers run if they are installed: Liger, FlashAttention and
vLLM, whose Triton kernels serving_peers.py calls.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import timing
import torch
from rotation_peers import Missing
from serving_peers import PEERS, liger
from torch import Tensor

import posenc
from posenc.functional import qk_norm_rope, rotate_and_cache, rotate_qk

HEADS, KV_HEADS, WIDTH, PAGE = 32, 8, 128, 16
TOKENS = (1, 8, 64, 256, 2048, 16384)
ROUNDS, CALLS = 9, 20
RESULTS: dict[str, list[dict[str, Any]]] = {"kernel": [], "host": [], "model": []}


def captured(call: Callable[[int], object]) -> Callable[[], None]:
    """A function that replays `CALLS` calls, each given its number."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    return graph.replay


def race(functions: dict[str, Callable[[], object]], calls: int, repeats: int) -> dict[str, float]:
    """Median microseconds of one of the ``calls`` that each function makes."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(repeats):
                function()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begin) / repeats / calls * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


class Case:
    """Tokens of a packed projection, pages for them, and what is timed."""

    heads = HEADS, KV_HEADS

    def __init__(self, tokens: int, interleaved: bool, norm: bool, cache: torch.dtype) -> None:
        # Long calls take turns on several tensors, so that none is in the L2 cache.
        count = 4 if tokens >= 2048 else 1
        shape = tokens, HEADS + 2 * KV_HEADS, WIDTH
        self.packed = [torch.randn(shape, device="cuda").bfloat16() for _ in range(count)]
        self.copies = [torch.empty_like(x) for x in self.packed]
        pages = max(64, 2 * tokens // PAGE)
        shape = pages, PAGE, KV_HEADS, WIDTH
        self.caches = [torch.zeros(shape, device="cuda").to(cache) for _ in "kv"]
        self.slots = torch.randperm(pages * PAGE, device="cuda")[:tokens]
        angles = torch.rand(8192, WIDTH // 2, device="cuda", dtype=torch.float64) * 6
        # As RoPE's tables for halves.
        self.tables = angles.cos().float(), angles.sin().float()
        at = torch.randint(0, 8192, (tokens,), device="cuda")
        self.how = {"position_ids": at, "interleaved": interleaved}
        weight = torch.rand(WIDTH, device="cuda").bfloat16()
        self.weights = (weight, weight) if norm else ()
        self.scales = {}
        if cache != torch.bfloat16:
            self.scales = {f"{x}_scale": torch.tensor(0.02, device="cuda") for x in "kv"}

    def qkv(self, i: int) -> tuple[Tensor, ...]:
        """Queries, keys and values of a call."""
        packed = self.packed[i % len(self.packed)]
        return packed.split((*self.heads, KV_HEADS), 1)

    def one(self, i: int) -> Tensor:
        """Our one call."""
        weights = dict(zip(("q_weight", "k_weight"), self.weights, strict=False))
        how = {**weights, **self.scales, **self.how}
        return rotate_and_cache(*self.qkv(i), *self.tables, *self.caches, self.slots, **how)

    def pieces(self, i: int) -> Tensor:
        """Norm, rotation, and two writes, of numbers divided by their scale if there is one."""
        q, k, v = self.qkv(i)
        how = {**self.how, "seq_dim": 1}
        if self.weights:
            q, k = qk_norm_rope(q[None], k[None], *self.weights, *self.tables, **how)
        else:
            q, k = rotate_qk(q[None], k[None], *self.tables, **how)
        bits = torch.uint8 if self.scales else q.dtype
        for cache, name, x in zip(self.caches, "kv", (k[0], v), strict=True):
            if self.scales:
                x = (x / self.scales[f"{name}_scale"]).to(cache.dtype)
            cache.flatten(0, 1).view(bits).index_copy_(0, self.slots, x.view(bits))
        return q[0]

    def copy(self, i: int) -> Tensor:
        """A copy of the bytes."""
        n = i % len(self.packed)
        return self.copies[n].copy_(self.packed[n])

    def calls(self) -> dict[str, Callable[[int], Tensor]]:
        """What is timed beside a copy and our call, each compared with our call."""
        calls = {"pieces": self.pieces}
        for name, peer in PEERS.items():
            with suppress(Missing):
                calls[name] = peer(self)
        made = [self.one(0), *[cache.clone() for cache in self.caches]]
        for name, call in calls.items():
            for cache in self.caches:
                cache.zero_()
            for ours, theirs in zip(made, (call(0), *self.caches), strict=True):
                # Our pieces may differ by a step of bfloat16. A peer rounds norm, weight, cosine,
                # product and sum: five half steps for each number of a pair. Float8 has long steps.
                rounded = 2**-7 if name == "pieces" else 2**-6
                limit = rounded if theirs.dtype == torch.bfloat16 else 2**-3
                off = (ours.float() - theirs.float()).abs().max()
                assert off <= limit * theirs.float().abs().max(), (name, off)
        return calls


def kernel() -> None:
    """Rows of ratios to a copy."""
    others = ("pieces", *PEERS)
    names = "".join(f"  {name:>20}" for name in others)
    print(f"tokens  layout       norm  cache          copy, us  one call{names}")
    for cache in (torch.bfloat16, torch.float8_e4m3fn):
        for interleaved in (False, True):
            for norm in (False, True):
                for tokens in TOKENS:
                    case = Case(tokens, interleaved, norm, cache)
                    timed = {"copy": case.copy, "one": case.one, **case.calls()}
                    found = race({n: captured(f) for n, f in timed.items()}, CALLS, 3)
                    base = found["copy"]
                    words = ["interleaved" if interleaved else "half", "yes" if norm else "no"]
                    ratios = [f"{found[n] / base:.2f}" if n in found else "-" for n in others]
                    kind = {"tokens": tokens, "interleaved": interleaved, "norm": norm}
                    RESULTS["kernel"].append(
                        kind | {"cache": str(cache)[6:], "microseconds": found}
                    )
                    print(
                        f"{tokens:6}  {words[0]:11}  {words[1]:4}  {str(cache)[6:]:13} {base:8.1f}"
                        f"  {found['one'] / base:8.2f}" + "".join(f"  {x:>20}" for x in ratios),
                        flush=True,
                    )


def host() -> None:
    """Microseconds of a call from Python."""
    rope = posenc.RoPE(WIDTH, max_seq_len=8192, interleaved=False, seq_dim=1).cuda()
    case = Case(1, False, True, torch.bfloat16)
    q, k, v = case.qkv(0)
    at = case.how["position_ids"]
    weights = dict(zip(("q_weight", "k_weight"), case.weights, strict=True))
    timed: dict[str, Callable[[], object]] = {
        "one multiplication": lambda: q * 2,
        "rotate_qk": lambda: rotate_qk(q[None], k[None], *case.tables, seq_dim=1, **case.how),
        "RoPE": lambda: rope(q[None], k[None], position_ids=at),
        "rotate_and_cache": lambda: case.one(0),
        "RoPE.rotate_and_cache": lambda: rope.rotate_and_cache(
            q, k, v, *case.caches, case.slots, position_ids=at, **weights
        ),
        "pieces": lambda: case.pieces(0),
    }
    for name, peer in PEERS.items():
        # FlashAttention has no norm of heads.
        case_of_peer = Case(1, False, peer is liger, torch.bfloat16)
        try:
            timed[name] = partial(peer(case_of_peer), 0)
        except Missing as why:
            print(why)
    for f in timed.values():
        f()
    for name, took in race(timed, 1, 200).items():
        RESULTS["host"].append({"name": name, "microseconds": took})
        print(f"from Python, {name}: {took:.1f} us", flush=True)


def model() -> None:
    """Milliseconds of a Qwen3: prefill of 8,192 tokens, and a training step of 8 x 1,024."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from posenc.interop.huggingface import patched

    config = Qwen3Config(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=16, vocab_size=32_000,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(config).to("cuda", torch.bfloat16)
    long, batch = (torch.randint(0, 32_000, size, device="cuda") for size in ((1, 8192), (8, 1024)))

    def prefill() -> None:
        with torch.no_grad():
            made(long, logits_to_keep=1)

    def train() -> None:
        made(batch, labels=batch).loss.backward()
        made.zero_grad(set_to_none=True)

    for name, step in (("prefill", prefill), ("training step", train)):
        times: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            times.setdefault("as it comes", []).append(timed_steps(step))
            for title, fuse in (("patched", True), ("patched, norms alone", False)):
                with patched(made, fuse=fuse):
                    times.setdefault(title, []).append(timed_steps(step))
        found = {title: statistics.median(each) for title, each in times.items()}
        base = found["as it comes"]
        for title, took in found.items():
            RESULTS["model"].append({"step": name, "name": title, "milliseconds": took})
            print(f"Qwen3, {name}, {title}: {took:.1f} ms, {base / took:.2f} x", flush=True)


def timed_steps(step: Callable[[], None], count: int = 4) -> float:
    """Milliseconds of a step, after one that is not timed."""
    step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count * 1000


PARTS = {"kernel": kernel, "host": host, "model": model}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="*")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in options.only or PARTS:
        if name == "model":
            PARTS[name]()
        else:
            with torch.no_grad():
                PARTS[name]()
    timing.write(options.json, RESULTS, rounds=ROUNDS)
