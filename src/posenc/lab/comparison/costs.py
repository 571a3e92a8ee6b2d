"""What an encoding costs: the time of a step, its memory, and its parameters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from posenc.lab import machine
from posenc.lab.comparison.encodings import ENCODINGS, trained_with
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.tasks import Batch
from posenc.lab.comparison.training import Decoder, learn, losses_of, make_optimizer

# Symbols of a text, about.
_SYMBOLS = 64
REPEATS = 10


def cost(name: str, plan: Plan) -> dict[str, Any]:
    """Time of a training step and of reading one longest sequence; on CUDA also their peak bytes.

    Any tokens and new weights: neither changes what a step does. Steps with the encoding
    alternate with steps without one, and a time is the ratio of their medians, so that another
    program that slows the machine slows both. An encoding that is applied afterwards has no step
    of its own.
    """
    with machine.threads(plan.threads):
        return _cost(name, plan)


def _cost(name: str, plan: Plan) -> dict[str, Any]:
    model, plain = (
        Decoder(trained_with(each), plan, symbols=_SYMBOLS, seed=0).to(plan.device)
        for each in (name, "none")
    )
    afterwards = ENCODINGS[name].trained_as is not None
    if afterwards:
        model.use(name, plan.longest)
    short = (torch.arange(plan.train_length) % _SYMBOLS).expand(plan.batch, -1)
    long = torch.arange(plan.longest)[None] % _SYMBOLS

    def step(decoder: Decoder) -> Callable[[], Any]:
        optimizer = make_optimizer(decoder, 1e-6)
        return lambda: learn(decoder, Batch(short, short), optimizer)

    @torch.no_grad()
    def read(decoder: Decoder) -> None:
        losses_of(decoder, Batch(long, long))

    costs: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.position.parameters()),
        "read": _ratio(lambda: read(model), lambda: read(plain), plan.device),
        "read_bytes": _peak_bytes(lambda: read(model), plan.device),
        "step": None,
        "step_bytes": None,
    }
    if not afterwards:
        ours, theirs = step(model), step(plain)
        costs["step"] = _ratio(ours, theirs, plan.device)
        costs["step_bytes"] = _peak_bytes(ours, plan.device)
    return costs


def _ratio(ours: Callable[[], Any], theirs: Callable[[], Any], device: str) -> float:
    """Median time of one over that of the other; they take turns."""
    # Allocate tables, states and gradients, and compile kernels, before anything is timed.
    for _ in range(2):
        ours()
        theirs()
    pairs = [(_seconds(ours, device), _seconds(theirs, device)) for _ in range(REPEATS)]
    one, other = (statistics.median(times) for times in zip(*pairs, strict=True))
    return float(one / other)


def _seconds(call: Callable[[], Any], device: str) -> float:
    began = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """Peak of the bytes that ``call`` has allocated and not freed; torch counts them on CUDA."""
    if device != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before
