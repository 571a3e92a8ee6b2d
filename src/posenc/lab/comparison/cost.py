"""What an encoding costs: time and memory of training, and of reading the longest sequence."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile

from posenc.lab.comparison.decoder import Decoder
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.text import Text
from posenc.lab.comparison.training import Progress, next_token_loss

COSTS = ("train_tokens_per_second", "test_tokens_per_second", "train_bytes", "test_bytes")


def cost(model: Decoder, text: Text, plan: Plan, done: Progress) -> dict[str, float]:
    """Speed of training and of reading the longest sequence; memory of one of each."""
    short = text.train[: plan.batch * (plan.train_length + 1)].view(plan.batch, -1)
    long = text.held[None, : plan.longest + 1]

    def learn() -> None:
        next_token_loss(model, short).mean().backward()
        model.zero_grad()

    def read() -> None:
        with torch.no_grad():
            next_token_loss(model, long)

    # Gradients and tables that were there before are not part of what is watched.
    model.zero_grad()
    learn()
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - began)
    return {
        "train_tokens_per_second": short[:, 1:].numel() / statistics.median(done.seconds),
        "test_tokens_per_second": plan.longest / statistics.median(seconds),
        "train_bytes": peak_bytes(learn),
        "test_bytes": peak_bytes(read),
    }


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most bytes that ``call`` had allocated at one time, and not given back.

    Every allocation and release of torch's CPU allocator is counted, those inside operations too;
    the sum is the same on a busy machine.

    Examples:
        >>> import torch
        >>> x = torch.zeros(1000)
        >>> peak_bytes(lambda: (x + 1) * 2) // 1000
        8
    """
    # The profiler writes a line to stderr when it starts and when it stops, unless told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(profile_memory=True) as watched:
        call()
    held = peak = 0
    for event in watched.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
