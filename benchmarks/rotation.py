"""Time posenc and its peers against a copy of the same bytes: `python benchmarks/rotation.py`.

    python benchmarks/rotation.py --list
    python benchmarks/rotation.py decode tiny --dtype fp32 --layout half --rounds 5
    python benchmarks/rotation.py --device cuda --dtype bf16 --json FILE.json --plot FILE.svg

Each contestant is first compared with float64 and refused if it is wrong. Then all are timed in
interleaved rounds of one process. "× copy" is the time divided by that of copying q and k, and in
training of copying their gradients too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import rotation_peers as peers
import torch
from rich.console import Console
from rich.table import Table
from rotation_cases import CASES, DTYPES, LAYOUTS, Workload, choose
from rotation_peers import Call, Contestant, Missing
from rotation_plots import timings
from rotation_truth import Verdict, judge
from timing import Lane, Step, graph_lane, loop_lane, quartiles, race
from torch import Tensor

import posenc
from posenc.lab import machine
from posenc.lab.panels import save

MOST_SETS = 256
COPY, CLONE = "copy_", "clone"
COLUMNS = ("", "time", "quartiles", "× copy", "quartiles", "off by")
UNITS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
# Queries and keys, and the gradients that come back to them.
Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(slots=True)
class Result:
    """The result of one contestant by one clock; times are in seconds per call."""

    contestant: str
    # timed; wrong, refused by the check against float64; missing, not installed or not made for
    # the workload; or failed, it raised. All but the first have a reason.
    status: str
    reason: str = ""
    # A loop in Python, or a CUDA graph.
    via: str = "loop"
    version: str | None = None
    error_ulps: float | None = None
    low: float | None = None
    median: float | None = None
    high: float | None = None
    # Median over the rounds of the time divided by that of a copy in the same round.
    ratio_low: float | None = None
    ratio: float | None = None
    ratio_high: float | None = None
    seconds: list[float] = field(default_factory=list)


def measure(
    work: Workload,
    *,
    rounds: int,
    loop_seconds: float = 0.02,
    peers_too: bool = True,
) -> dict[str, Any]:
    """Check everyone who can run ``work``, then time them in interleaved rounds.

    Each timing takes ``loop_seconds`` or more. The result has a :class:`Result` for each contestant
    and clock. Ratios are to ``copies`` copies of q and k. The dict can be written as JSON.
    """
    # Compiled peers must not reuse the graphs of the last workload.
    torch.compiler.reset()
    sets = [_inputs(work, seed) for seed in range(_set_count(work))]
    results, steps = [], _copies(work, sets)
    for contestant in peers.contestants(work, peers=peers_too):
        result, call = _admit(contestant, work)
        results.append(result)
        if call is not None:
            steps[contestant.name] = [_step(call, inputs) for inputs in sets]
    # A short call from Python is bound by its launch; in a CUDA graph it is not.
    clocks = {"loop": loop_lane, "graph": graph_lane}
    lanes = []
    for name, via in itertools.product(steps, clocks if work.device == "cuda" else ["loop"]):
        try:
            lane = clocks[via](name, steps[name], device=work.device, grad=work.training)
            lane.calibrate(loop_seconds)
            lanes.append(lane)
        except Exception as broken:
            results.append(_failed(name, broken, via=via))
    race(lanes, rounds)
    return {
        **work.as_dict(),
        "copies": 1 + work.training,
        "input_sets": len(sets),
        "results": [asdict(result) for result in _summarize(lanes, results)],
    }


def report(measurements: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """The results of :func:`measure`, with the machine and the versions."""
    results = [result for measurement in measurements for result in measurement["results"]]
    return {
        "posenc": posenc.__version__,
        "kernels": [backend._asdict() for backend in posenc.backends()],
        "machine": machine.describe(),
        "settings": settings,
        "versions": {r["contestant"]: r["version"] for r in results if r["version"]},
        "measurements": measurements,
    }


def _admit(contestant: Contestant, work: Workload) -> tuple[Result, Call | None]:
    """Whether a contestant may be timed, and its call if so."""
    name, version = contestant.name, contestant.version()
    try:
        call = contestant.prepare(work)
        error, reason = _check(contestant, call, work)
    except Missing as missing:
        return Result(name, "missing", str(missing), version=version), None
    except Exception as broken:
        return _failed(name, broken, version=version), None
    status = "wrong" if reason else "timed"
    off = error if math.isfinite(error) else None
    result = Result(name, status, reason, version=version, error_ulps=off)
    return result, None if reason else call


def _check(contestant: Contestant, call: Call, work: Workload) -> Verdict:
    """Compare outputs, and gradients in training, with float64."""
    inputs = _inputs(work, seed=1000)
    before = [x.detach().clone() for x in inputs]
    against = partial(judge, work, float32_angles=contestant.float32_angles)
    with torch.set_grad_enabled(work.training):
        outputs = call(*inputs[:2])
    verdicts = [against(before[:2], [y.detach().clone() for y in outputs])]
    if work.training:
        gradients = torch.autograd.grad(outputs, inputs[:2], inputs[2:])
        verdicts.append(against(before[2:], gradients, transposed=True))
    may_write = contestant.in_place and not work.training
    if not (may_write or all(map(torch.equal, inputs[:2], before[:2]))):
        return Verdict(math.nan, "wrote into its inputs")
    # A refusal comes first, then the larger error.
    return max(verdicts, key=lambda verdict: (bool(verdict.reason), verdict.ulps))


def _inputs(work: Workload, seed: int) -> Inputs:
    q, k = work.pair(2 * seed)
    if not work.training:
        return q, k, q, k
    return q.requires_grad_(), k.requires_grad_(), *work.pair(2 * seed + 1)


def _step(call: Call, inputs: Inputs) -> Step:
    leaves, gradients = inputs[:2], inputs[2:]
    if not leaves[0].requires_grad:
        return partial(call, *leaves)
    return lambda: torch.autograd.grad(call(*leaves), leaves, gradients)


def _set_count(work: Workload) -> int:
    """How many sets of inputs to cycle through, so that a GPU's L2 cache holds none of them.

    At decode one set is enough: in a model, q and k are in the cache, because the projection has
    just written them. Inputs that need more than ``MOST_SETS`` are bound by the launch anyway.
    """
    if work.device != "cuda" or work.length == 1:
        return 1
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return 1 if work.nbytes >= 2 * cache else min(math.ceil(4 * cache / work.nbytes), MOST_SETS)


def _copies(work: Workload, sets: list[Inputs]) -> dict[str, list[Step]]:
    """Copies of the bytes that a step moves, into existing memory; on the CPU into new memory too.

    The bytes are those of q and k, and in training of their gradients.
    """
    moved = [inputs if work.training else inputs[:2] for inputs in sets]
    sources = [torch.cat([x.detach().flatten() for x in xs]) for xs in moved]
    copies: dict[str, list[Step]] = {COPY: [partial(torch.empty_like(x).copy_, x) for x in sources]}
    if work.device == "cpu":
        copies[CLONE] = [x.clone for x in sources]
    return copies


def _summarize(lanes: list[Lane], results: list[Result]) -> list[Result]:
    copy = {lane.via: lane.seconds for lane in lanes if lane.name == COPY}
    if "graph" in copy:
        # A large copy can be slower in a graph (0.50 instead of 0.32 ms for 671 MB on an H200),
        # so ratios are to the faster of the two.
        copy["graph"] = [min(pair) for pair in zip(copy["graph"], copy["loop"], strict=True)]
    known = {result.contestant: result for result in results if result.status == "timed"}
    timed = []
    for lane in lanes:
        base = known.get(lane.name, Result(lane.name, "timed"))
        result = replace(base, via=lane.via, seconds=lane.seconds)
        result.low, result.median, result.high = quartiles(lane.seconds)
        # Paired by round, so that a drift of the machine cancels.
        ratios = [t / c for t, c in zip(lane.seconds, copy[lane.via], strict=True)]
        result.ratio_low, result.ratio, result.ratio_high = quartiles(ratios)
        timed.append(result)
    return timed + [result for result in results if result.status != "timed"]


def _failed(name: str, broken: BaseException, **known: Any) -> Result:
    """The result of a contestant that raised, with the first line of its error."""
    lines = [line.strip() for line in str(broken).splitlines() if line.strip()]
    return Result(name, "failed", ": ".join([type(broken).__name__, *lines[:1]]), **known)


def show(title: str, measurement: dict[str, Any]) -> None:
    """Print the times of one workload, and why some contestants have none."""
    table = Table(*COLUMNS, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for result in measurement["results"]:
        if result["status"] == "timed":
            style = "bold" if result["contestant"].startswith("posenc") else ""
            table.add_row(*_cells(result), style=style)
    console = Console(width=100, markup=False, highlight=False)
    console.print(title, table, sep="\n")
    for each in measurement["results"]:
        if each["status"] != "timed":
            console.print(f"{each['contestant']}: {each['status']}, {each['reason']}")
    console.print()


def _cells(result: dict[str, Any]) -> tuple[str, ...]:
    scale, unit = next(u for u in UNITS if result["median"] < 1000 * u[0])
    low, median, high = (f"{result[each] / scale:.3g}" for each in ("low", "median", "high"))
    error = result["error_ulps"]
    return (
        result["contestant"] + (" (graph)" if result["via"] == "graph" else ""),
        f"{median} {unit}",
        f"{low} to {high}",
        f"{result['ratio']:.2f}",
        f"{result['ratio_low']:.2f} to {result['ratio_high']:.2f}",
        "" if error is None else f"{error:.3g} ulp",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="from --list; default: all")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--layout", choices=(*LAYOUTS, "both"), default="both")
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=usual)
    parser.add_argument("--mode", choices=("forward", "train"), help="for all cases")
    parser.add_argument("--positions", choices=("offset", "ids"), default="offset")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    parser.add_argument("--rounds", type=int, metavar="N", default=15, help="timings of each")
    parser.add_argument("--no-peers", action="store_true", help="time posenc alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios here")
    parser.add_argument("--list", action="store_true", help="show the cases and stop")
    given = parser.parse_args(arguments)
    if given.list:
        for case in CASES.values():
            print(f"{case.name:13} {case.home:5} {case.mode:8} {case.shape}")
        return
    for name in given.cases:
        if name not in CASES:
            parser.error(f"CASE must be one of {', '.join(CASES)}, got {name}")
    works = choose(
        given.cases,
        dtype=given.dtype,
        layout=given.layout,
        device=given.device,
        positions=given.positions,
        mode=given.mode,
    )
    if any(work.qk_norm and work.training for work in works):
        parser.error("--mode must be forward for cases with QK-norm, got train")
    for path in (given.json, given.plot):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"an output must be in a folder that exists, got {path}")
    measurements, found = [], {}
    with machine.threads(given.threads):
        used = torch.get_num_threads()
        for work in works:
            peers_too = not given.no_peers
            measurements.append(measure(work, rounds=given.rounds, peers_too=peers_too))
            found = report(measurements, threads=used, rounds=given.rounds)
            # Written after each workload, so that an interrupted run keeps its results.
            if given.json is not None:
                given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            show(f"{work}: {work.shape}, {work.nbytes:,} bytes", measurements[-1])
    if given.plot is not None:
        save(timings(found), given.plot)


if __name__ == "__main__":
    main()
