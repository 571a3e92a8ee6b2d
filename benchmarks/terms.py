"""Biases that are more than a number for each distance, against their matrix: forward and backward.

    python benchmarks/terms.py [--device cpu] [--lengths 1024 4096] [--only FIRE] [--json FILE]

Numbers for each distance, and RoPE with SDPA, are there to compare with; they have no matrix here.

The matrix is written as a user would, in the dtype of q, and given to SDPA, to plain products, and
to these compiled; the fastest counts. A result that is wrong stops the script. Rounds, of a few
calls each, are interleaved; times are medians in milliseconds of a call. Memory is the peak beside
q, k, v, their gradients, the output and its own, in matrices (H, L, L) of that dtype; on CUDA only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
import torch
import torch.nn.functional as F
from torch import Tensor

import posenc

HEADS, WIDTH, ROUNDS = 16, 64, 7
# Calls in a round; between them the device is not waited for.
CALLS = {"cuda": 5, "cpu": 1}


def distances(length: int, device: str) -> Tensor:
    """``i - j`` of each query and key."""
    index = torch.arange(length, device=device)
    return index[:, None] - index


def relative_keys(module: Any, q: Tensor, k: Tensor) -> Tensor:
    """Shaw: one product with all vectors, and a gather."""
    m = module.max_distance
    rows = m - distances(q.shape[2], q.device).clamp(0, m)
    products = q @ module.weight.to(q.dtype).T
    return products.gather(-1, rows.expand(*q.shape[:3], -1))


def deberta(module: Any, q: Tensor, k: Tensor) -> Tensor:
    """Both terms, as in the model's own code."""
    rows = module.distance_rows(distances(q.shape[2], q.device)).expand(*q.shape[:3], -1)
    to_keys = q @ module.pos_key.to(q.dtype).permute(1, 2, 0)
    to_queries = k @ module.pos_query.to(q.dtype).permute(1, 2, 0)
    return to_keys.gather(-1, rows) + to_queries.gather(-1, rows.mT).mT


def transformer_xl(module: Any, q: Tensor, k: Tensor) -> Tensor:
    """The product with every distance, shifted as in the paper's code; u times the keys."""
    length = q.shape[2]
    vectors = module.vectors(length).to(q.dtype).permute(1, 2, 0).flip(-1)
    shifted = (q + module.pos_bias_v.to(q.dtype)[:, None]) @ vectors
    padded = F.pad(shifted, (1, 0)).reshape(*q.shape[:2], length + 1, length)
    by_distance = padded[:, :, 1:].reshape(shifted.shape)
    u = module.pos_bias_u.to(q.dtype)[:, None]
    return by_distance + u @ k.mT


def fire(module: Any, q: Tensor, k: Tensor) -> Tensor:
    """The network of every ratio; it has no scale."""
    length = q.shape[2]
    c, least = module.c.abs(), module.L_multiplier.abs() * module.threshold
    far = distances(length, q.device).abs()
    own = torch.arange(length, device=q.device)[:, None].maximum(least)
    ratio = (c * far).log1p() / (c * own).log1p()
    made = module.mlp(ratio[..., None]).movedim(-1, 0)[None]
    return made.to(q.dtype) / WIDTH**-0.5


def cope(module: Any, q: Tensor, k: Tensor) -> Tensor:
    """As in the authors' code; it has no scale."""
    later = distances(q.shape[2], q.device) < 0
    gates = (q @ k.mT * WIDTH**-0.5).sigmoid().masked_fill(later, 0.0)
    at = gates.float().flip(-1).cumsum(-1).flip(-1).clamp(max=module.max_pos - 1)
    below, above = at.floor().long(), at.ceil().long()
    levels = q @ module.pos_emb[0].to(q.dtype)
    share = (at - below).to(q.dtype)
    made = levels.gather(-1, above) * share + levels.gather(-1, below) * (1 - share)
    return made / WIDTH**-0.5


class Rotated(torch.nn.Module):
    """RoPE and causal SDPA."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.rope = posenc.RoPE(WIDTH, max_seq_len=2**16)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotate, and attend."""
        return F.scaled_dot_product_attention(*self.rope(q, k), v, is_causal=True)


CASES: dict[str, tuple[Callable[[], Any], Callable[..., Tensor] | None, str]] = {
    "RelativeKeys": (
        lambda: posenc.RelativeKeys(WIDTH, max_distance=128),
        relative_keys,
        "0.7, 0.3",
    ),
    "DeBERTaBias": (
        lambda: posenc.DeBERTaBias(
            HEADS, head_dim=WIDTH, max_relative_positions=512, position_buckets=256, causal=False
        ),
        deberta,
        "0.7, 0.3",
    ),
    "FIRE": (lambda: posenc.FIRE(HEADS), fire, "0.7, 0.3"),
    "TransformerXLBias": (
        lambda: posenc.TransformerXLBias(HEADS, embed_dim=HEADS * WIDTH),
        transformer_xl,
        "1.0, 0.8",
    ),
    "CoPE": (lambda: posenc.CoPE(WIDTH, max_pos=64), cope, "1.0, 0.8"),
    "RoPE": (Rotated, None, "-"),
    "ALiBi": (lambda: posenc.ALiBi(HEADS), None, "-"),
    "T5Bias": (lambda: posenc.T5Bias(HEADS, causal=True), None, "of SDPA 2.5, 2.2, 2.2"),
    "LearnedBias": (
        lambda: posenc.LearnedBias(HEADS, max_distance=128),
        None,
        "of SDPA 2.5, 2.2, 2.2",
    ),
    "KERPLE": (lambda: posenc.KERPLE(HEADS), None, "of SDPA 2.5, 2.2, 2.2"),
}


def scores_of(module: Any, matrix: Callable[..., Tensor], q: Tensor, k: Tensor) -> Tensor:
    """The bias with the scale, ``-inf`` for keys that are not seen."""
    scale = (3 * WIDTH) ** -0.5 if isinstance(module, posenc.DeBERTaBias) else WIDTH**-0.5
    made = matrix(module, q, k) * scale
    if module.causal:
        made = made.masked_fill(distances(q.shape[2], q.device) < 0, float("-inf"))
    return made


def forms(module: Any, matrix: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    """Attention with the matrix in each way; a function of q, k and v."""
    scale = (3 * WIDTH) ** -0.5 if isinstance(module, posenc.DeBERTaBias) else WIDTH**-0.5

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = scores_of(module, matrix, q, k)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * scale + scores_of(module, matrix, q, k)
        return scores.softmax(-1) @ v

    return {"SDPA": sdpa, "products": plain, "compiled": torch.compile(plain)}


def race(functions: list[Callable[[], object]], device: str, rounds: int) -> list[float]:
    """Median milliseconds of each function's call, from interleaved rounds."""
    times: list[list[float]] = [[] for _ in functions]
    for n in range(rounds + 2):
        for f, each in zip(functions, times, strict=True):
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS[device]):
                f()
            if device == "cuda":
                torch.cuda.synchronize()
            if n > 1:
                each.append((time.perf_counter() - begin) * 1000 / CALLS[device])
    return [statistics.median(each) for each in times]


def memory_of(call: Callable[[], object], q: Tensor) -> float:
    """The peak of a call beside inputs and outputs, in matrices."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    each = q.numel() * q.element_size()
    return (peak - 4 * each) / (q.shape[1] * q.shape[2] ** 2 * q.element_size())


def measure(name: str, length: int, device: str, rounds: int, most: int) -> dict[str, Any]:
    """Check and time one bias at one length; print a line and return it."""
    make, matrix, reach = CASES[name]
    torch.manual_seed(0)
    torch.compiler.reset()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    module = make().to(device)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    shape = 1, HEADS, length, WIDTH
    q, k, v, g = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    wanted = [*inputs, *module.parameters()]

    def both(attend: Callable[..., Tensor], of: list[Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(q, k, v), of, g, allow_unused=True)

    def unbiased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=module.causal)

    ours = both(module, wanted)
    few = [x.detach().float()[:, :, :512] for x in (q, k, v)]
    exact = module(*few)
    calls: dict[str, Callable[[], object]] = {"posenc": ours, "unbiased": both(unbiased, inputs)}
    written = forms(module, matrix) if matrix is not None and length <= most else {}
    for form, attend in written.items():
        try:
            small = attend(*few)
            error = float(((small - exact).norm() / exact.norm()).detach())
            if not error < 1e-3:
                sys.exit(f"{name}: {form} differs by {error:.1e}")
            calls[form] = both(attend, wanted)
            calls[form]()
        except torch.OutOfMemoryError:
            calls.pop(form, None)
    times = dict(zip(calls, race(list(calls.values()), device, rounds), strict=True))
    matrices = [(t, form) for form, t in times.items() if form not in ("posenc", "unbiased")]
    best, form = min(matrices) if matrices else (None, None)
    memory = memory_of(ours, q) if device == "cuda" else None
    against = f"the matrix {best:.2f} ({form}), {times['posenc'] / best:.2f}" if best else "-"
    print(
        f"{name:18} {length:6}: {times['posenc']:.2f} ms, of {against}; of SDPA without a bias "
        f"{times['unbiased']:.2f}, {times['posenc'] / times['unbiased']:.1f}, memory {memory}  "
        f"reach {reach}",
        flush=True,
    )
    return {
        "name": name,
        "tokens": length,
        "posenc": times["posenc"],
        "matrix": best,
        "form": form,
        "unbiased": times["unbiased"],
        "memory": memory,
    }


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096, 16384])
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--matrix", type=int, default=8192, help="the longest that has a matrix")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    names = [options.only] if options.only else CASES
    results = [
        measure(name, length, options.device, options.rounds, options.matrix)
        for name in names
        for length in options.lengths
    ]
    timing.write(options.json, results, rounds=options.rounds)


if __name__ == "__main__":
    main()
