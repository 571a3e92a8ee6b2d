"""What an encoding costs: time and memory of training, and of reading the longest sequence."""

from __future__ import annotations

import statistics
import time

import torch

from posenc.lab.comparison.decoder import Decoder
from posenc.lab.comparison.memory import peak_bytes
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
        "train_tokens_per_second": plan.batch
        * plan.train_length
        / max(statistics.median(done.seconds), 1e-9),
        "test_tokens_per_second": plan.longest / max(statistics.median(seconds), 1e-9),
        "train_bytes": peak_bytes(learn),
        "test_bytes": peak_bytes(read),
    }
