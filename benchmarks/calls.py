"""Host time of a call for one token, in clones: `python benchmarks/calls.py --json FILE`.

    python benchmarks/calls.py --device cuda              # every public call, and peers
    python benchmarks/calls.py --device cuda --generate   # patched models beside unpatched ones

Right first: a call of ours or of a peer that is off in float64 stops the script. Rounds are
interleaved in one process; medians and quartiles are over them, and a ratio is to the unit in the
same round. On CUDA the clock is the host's, and the device is waited for between rounds only. On
the CPU it is the time of the one thread, which other processes do not lengthen.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timing
import torch
from calls_rows import DTYPES, all_rows, check

from posenc.lab import machine

# Calls in a round at most: on CUDA too few to fill the queue of launches, which blocks the host.
CALLS = {"cuda": 100, "cpu": 300}
ROUND_SECONDS = 0.02


def host_lane(
    name: str, call: Callable[[], Any], device: str, *, grad: bool = False
) -> timing.Lane:
    """Calls by the clock of the host; work that is left on the device is not waited for."""
    clock = time.thread_time if device == "cpu" else time.perf_counter

    def run(passes: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        with torch.set_grad_enabled(grad):
            begun = clock()
            for _ in range(passes):
                call()
            return clock() - begun

    return timing.Lane(name, "host", run, calls=1)


def time_calls(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time the rows that match, and their units; print and return the results."""
    rows, missing = all_rows(options.device)
    chosen = {name for name in rows if matches(options, name)}
    chosen |= {rows[name].unit for name in chosen}
    lanes: dict[str, timing.Lane] = {}
    for name, row in rows.items():
        if name in chosen:
            check(name, row)
            lanes[name] = host_lane(name, row.call, options.device, grad=row.grad)
            warm_up(lanes[name], options.calls or CALLS[options.device])
    timing.race(list(lanes.values()), options.rounds)
    results: list[dict[str, Any]] = []
    for name, lane in lanes.items():
        unit = rows[name].unit
        results.append(result_of(lane, lanes[unit]) | {"unit": unit, "calls": lane.passes})
        print(call_line(results[-1]), flush=True)
    for name in missing:
        if matches(options, name):
            results.append({"name": name, "missing": missing[name]})
            print(f"{name:40} missing: {missing[name]}")
    return results


def warm_up(lane: timing.Lane, most: int) -> None:
    """Make the first calls, and choose how many are a round."""
    count = min(most, 10)
    lane.run(count)
    lane.passes = max(1, min(most, int(ROUND_SECONDS * count / lane.run(count))))


def result_of(lane: timing.Lane, unit: timing.Lane) -> dict[str, Any]:
    """Seconds of a call, and their ratio to the unit in the same round, with quartiles."""
    low, median, high = timing.quartiles(lane.seconds)
    pairs = zip(lane.seconds, unit.seconds, strict=True)
    ratio_low, ratio, ratio_high = timing.quartiles([a / b for a, b in pairs])
    ratios = {"ratio_low": ratio_low, "ratio": ratio, "ratio_high": ratio_high}
    times = {"low": low, "median": median, "high": high}
    return {"name": lane.name, **times, **ratios, "seconds": lane.seconds}


def call_line(found: dict[str, Any]) -> str:
    """A line of the table."""
    low, median, high = (found[name] * 1e6 for name in ("low", "median", "high"))
    times = f"{median:9.1f} us ({low:.1f} to {high:.1f})"
    return f"{found['name']:40} {times:36} {found['ratio']:6.2f} of {found['unit']}"


def time_models(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time both models of each family that matches; print and return the results."""
    from calls_generate import FAMILIES

    results = []
    for family in FAMILIES:
        if matches(options, family):
            results.append(time_pair(family, options.device, options.rounds))
            print(model_line(results[-1], options.device), flush=True)
    return results


def time_pair(family: str, device: str, rounds: int) -> dict[str, Any]:
    """Times of `generate`; the ratio of each model is to the other."""
    from calls_generate import TOKENS, Pair

    pair = Pair(family, device, DTYPES[device])
    calls = {
        "unpatched": lambda: pair.generate(pair.unpatched),
        "patched": lambda: pair.generate(pair.patched),
    }
    before, after = (call() for call in calls.values())
    same = torch.equal(before, after)
    if device == "cpu" and not same:
        raise SystemExit(f"{family} generates other tokens when it is patched: not timed")
    lanes = [host_lane(name, call, device) for name, call in calls.items()]
    timing.race(lanes, rounds)
    found = {
        lane.name: result_of(lane, other)
        for lane, other in zip(lanes, reversed(lanes), strict=True)
    }
    kind = {"family": family, "layers": pair.layers, "tokens": TOKENS, "same_tokens": same}
    return {**kind, **found}


def model_line(found: dict[str, Any], device: str) -> str:
    """A line of the table: milliseconds on CUDA, microseconds of a layer and token on the CPU."""
    scale, unit = 1e3, "ms"
    if device == "cpu":
        scale, unit = 1e6 / found["tokens"] / found["layers"], "us"
    texts = []
    for name in ("unpatched", "patched"):
        low, median, high = (found[name][each] * scale for each in ("low", "median", "high"))
        texts.append(f"{name} {median:7.1f} {unit} ({low:.1f} to {high:.1f})")
    words = "same tokens" if found["same_tokens"] else "other tokens"
    # How many times as fast the patched model is.
    ratio = found["unpatched"]["ratio"]
    return f"{found['family']:8} {texts[0]:42} {texts[1]:42} {ratio:5.2f} x  {words}"


def matches(options: argparse.Namespace, name: str) -> bool:
    """Whether ``--only`` has this name."""
    return re.search(options.only, name, re.IGNORECASE) is not None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DTYPES, default="cpu")
    parser.add_argument("--generate", action="store_true", help="time models instead of calls")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, help="of a round, at most")
    parser.add_argument("--only", metavar="PATTERN", default="", help="a regular expression")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    found = machine.describe()
    print(found["gpu" if options.device == "cuda" else "cpu"], f"torch {found['torch']}", sep=", ")
    with machine.threads(1):
        results = time_models(options) if options.generate else time_calls(options)
    timing.write(options.json, results, device=options.device, rounds=options.rounds, threads=1)


if __name__ == "__main__":
    main()
