"""Clocks: a loop timed on the host or by CUDA events, a CUDA graph replayed, rounds interleaved."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import torch

import posenc
from posenc.lab import machine

Step: TypeAlias = Callable[[], Any]
_CALLS_PER_GRAPH = 20
PEERS = ("transformers", "liger-kernel", "flash-attn", "vllm", "rotary-embedding-torch")


@dataclass(slots=True)
class Lane:
    """One contestant on one clock: called from Python (``loop``) or from a CUDA graph."""

    name: str
    via: str
    # run(passes) makes ``passes * calls`` calls and returns the seconds they took.
    run: Callable[[int], float]
    calls: int
    # Passes in one round.
    passes: int = 1
    # Seconds of one call, for each round.
    seconds: list[float] = field(default_factory=list)

    def calibrate(self, least: float) -> None:
        """Warm up, then double the passes of a round until it takes ``least`` seconds."""
        self.run(2)
        while self.run(self.passes) < least:
            self.passes *= 2


def loop_lane(name: str, steps: Sequence[Step], *, device: str, grad: bool) -> Lane:
    """Call ``steps`` one after the other from Python.

    With several steps each has memory of its own, and results are kept for a whole pass, so that
    new outputs are not written to memory that is still in the cache.
    """
    kept: list[Any] = [None] * len(steps)

    def call(passes: int) -> None:
        if len(steps) == 1:
            (step,) = steps
            for _ in range(passes):
                step()
            return
        for _ in range(passes):
            for i, step in enumerate(steps):
                kept[i] = step()

    def run(passes: int) -> float:
        with torch.set_grad_enabled(grad):
            return _seconds(call, passes, device)

    return Lane(name, "loop", run, calls=len(steps))


def graph_lane(name: str, steps: Sequence[Step], *, device: str, grad: bool) -> Lane:
    """Capture ``steps`` in a CUDA graph and replay it: the device's own time, without Python."""
    graph = torch.cuda.CUDAGraph()
    # Replaying costs a few microseconds, so one replay holds many calls.
    repeats = max(1, _CALLS_PER_GRAPH // len(steps))
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.set_grad_enabled(grad):
        with torch.cuda.stream(side):
            for step in steps:
                step()
        torch.cuda.current_stream().wait_stream(side)
        kept: list[Any] = [None] * len(steps)
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                for i, step in enumerate(steps):
                    kept[i] = step()

    # A graph holds raw pointers, so its inputs and outputs must live as long as it does.
    def replay(passes: int, held: Any = (steps, kept)) -> None:
        for _ in range(passes):
            graph.replay()

    return Lane(name, "graph", lambda n: _seconds(replay, n, device), repeats * len(steps))


def race(lanes: Sequence[Lane], rounds: int) -> None:
    """Time every lane once a round, so that a slow minute of the machine slows all of them.

    Each round has a random order, because running always after the same lane has changed times by
    5 % on a GPU.
    """
    order, shuffle = list(lanes), random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for lane in order:
                lane.seconds.append(lane.run(lane.passes) / (lane.passes * lane.calls))
    finally:
        gc.enable()


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    several = values if len(values) > 1 else [*values, *values]
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return low, middle, high


def write(path: Path | None, results: Any, **settings: Any) -> None:
    """Write results with the machine, the versions and the date, if there is a file to write."""
    if path is None:
        return
    versions = {}
    for name in PEERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    report = {
        "posenc": posenc.__version__,
        "kernels": [backend._asdict() for backend in posenc.backends()],
        "machine": machine.describe(),
        "versions": versions,
        "settings": settings,
        "results": results,
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _seconds(call: Callable[[int], None], passes: int, device: str) -> float:
    """Time of a call, by the host's clock or by CUDA events."""
    if device == "cpu":
        begun = time.perf_counter()
        call(passes)
        return time.perf_counter() - begun
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call(passes)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
