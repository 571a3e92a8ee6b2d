"""PoPE beside a copy of as many bytes: `python benchmarks/pope.py --device cuda --json FILE`.

PoPE reads D channels and writes 2 D; the copy reads and writes 1.5 D. Right first: a result that is
off by more than 0.503 ulp is not timed. All run in one process, a round times each of them once,
and medians of rounds are shown, with quartiles of their ratio to the copy in the same round.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import timing
import torch
from torch import Tensor

import posenc
from posenc.functional import polar

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# On the CPU a result below 32 MiB, because glibc maps larger ones afresh and page faults are timed.
SHAPES = {"cuda": (8, 32, 4096, 128), "cpu": (1, 32, 512, 128)}


def error(got: Tensor, x: Tensor, cos: Tensor, sin: Tensor, delta: Tensor | None) -> float:
    """The largest error of some tokens, in ulps at the magnitude of each channel."""
    x, got = x[:, :, :64].double(), got[:, :, :64].double()
    size = torch.logaddexp(x, torch.zeros_like(x))
    phase = torch.zeros_like(x[0, :, :1, :]) if delta is None else delta.double()[:, None]
    phi = torch.atan2(sin[:64].double(), cos[:64].double()) + phase
    exact = torch.cat((size * phi.cos(), size * phi.sin()), -1)
    _, exponent = torch.frexp(torch.cat((size, size), -1))
    spacing = torch.finfo(x.dtype).eps
    return float(((got - exact).abs() / torch.exp2(exponent.double()) / (spacing / 2)).max())


def measure(shape: tuple[int, ...], dtype: torch.dtype, device: str, rounds: int) -> list[dict]:
    """Times of PoPE of queries and of keys, and of the copy."""
    generator = torch.Generator(device).manual_seed(0)
    batch, heads, length, width = shape
    x = torch.randn(shape, generator=generator, device=device).to(dtype)
    same = torch.randn(batch, heads, length, 3 * width // 2, device=device).to(dtype)
    delta = -6 * torch.rand(heads, width, generator=generator, device=device)
    # Half precision needs no wider tables on a GPU; the module chooses so too.
    wide = torch.float32 if device == "cuda" and dtype.itemsize == 2 else torch.float64
    ids = torch.arange(length, device=device)
    cos, sin = posenc.PoPE(width, num_kv_heads=None, max_seq_len=None).tables(ids, dtype=wide)
    steps = {
        "copy of 1.5 times the bytes": same.clone,
        "queries": lambda: polar(x, cos, sin),
        "keys": lambda: polar(x, cos, sin, delta),
    }
    for name, phases in (("queries", None), ("keys", delta)):
        half = torch.finfo(dtype).eps / torch.finfo(torch.float64).eps
        off = error(steps[name](), x, cos, sin, phases) / half
        if not off <= 0.503:
            raise SystemExit(f"{name} in {dtype} is off by {off:.3f} ulp: not timed")
    lane = timing.graph_lane if device == "cuda" else timing.loop_lane
    lanes = [lane(name, [step], device=device, grad=False) for name, step in steps.items()]
    for each in lanes:
        each.calibrate(0.05)
    timing.race(lanes, rounds)
    copy, results = lanes[0].seconds, []
    for each in lanes:
        ratio = timing.quartiles([a / b for a, b in zip(each.seconds, copy, strict=True)])
        median = timing.quartiles(each.seconds)[1]
        results.append({"contestant": each.name, "median": median, "ratio": ratio})
        print(f"{dtype}  {each.name:28} {median * 1e3:9.3f} ms  {ratio[1]:.2f} "
              f"({ratio[0]:.2f} to {ratio[2]:.2f})", flush=True)  # fmt: skip
    return results


def main() -> None:
    """Measure every dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.device]
    found = {
        name: measure(shape, dtype, options.device, options.rounds)
        for name, dtype in DTYPES.items()
    }
    timing.write(options.json, found, shape=shape, threads=options.threads, rounds=options.rounds)


if __name__ == "__main__":
    main()
