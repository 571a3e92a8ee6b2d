"""Train a decoder, test it on longer sequences, and measure its speed and memory."""

from __future__ import annotations

import math
import os
import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.profiler import profile

from posenc.lab.comparison.decoder import Decoder
from posenc.lab.comparison.plan import ENCODINGS, Plan, Unit
from posenc.lab.comparison.text import Text

# Called after each step with a message and the fraction that is done.
Tell: TypeAlias = Callable[[str, float], None]


def train_and_test(unit: Unit, plan: Plan, text: Text, tell: Tell) -> dict[str, Any]:
    """All numbers of one training: its curve, the losses of each tested encoding, and its cost."""
    model = Decoder(unit.trains, plan, symbols=text.symbols, seed=unit.seed)
    losses, seconds = train(model, text.train, plan, unit, tell)
    model.eval()
    tested = [n for n in plan.encodings if (ENCODINGS[n].trained_as or n) == unit.trains]
    # A point of the curve is the mean of a few steps; there are about 50 points.
    size = math.ceil(plan.steps / 50)
    ends = range(size, plan.steps + 1, size)
    return {
        "trains": unit.trains,
        "seed": unit.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": {
            "step": list(ends),
            "loss": [statistics.fmean(losses[end - size : end]) for end in ends],
        },
        "tests": {name: losses_by_length(model, name, plan, text.held) for name in tested},
        "cost": _cost(model, plan, text, statistics.median(seconds)),
    }


def train(
    model: Decoder, text: Tensor, plan: Plan, unit: Unit, tell: Tell
) -> tuple[list[float], list[float]]:
    """Train ``model`` in place; returns the loss and the seconds of each step."""
    losses, seconds = [], []
    peak = plan.learning_rate
    optimizer = torch.optim.AdamW(model.weight_groups(0.1), lr=peak, betas=(0.9, 0.95), fused=True)
    window = torch.arange(plan.train_length + 1)
    for step, starts in enumerate(batches(text, plan, unit.seed)):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, plan.steps, peak)
        loss = next_token_loss(model, text[starts[:, None] + window]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        if not math.isfinite(losses[-1]):
            diverged = f"the training of {unit} diverged at step {step + 1}"
            raise ValueError(f"{diverged}: lower --learning-rate.")
        tell(f"{unit}, loss {losses[-1]:.2f}", (step + 1) / plan.steps)
    return losses, seconds


def batches(text: Tensor, plan: Plan, seed: int) -> Tensor:
    """First symbol of every sequence, ``(steps, batch)``: the data order of a seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = len(text) - plan.train_length
    return torch.randint(0, starts, (plan.steps, plan.batch), generator=generator)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a tenth of the steps, and cosine decay to a twentieth of the peak."""
    rising = min(1.0, (step + 1) / max(1.0, 0.1 * steps))
    falling = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
    return peak * rising * falling


def next_token_loss(model: Decoder, tokens: Tensor) -> Tensor:
    """Nats lost on each token after the first, ``(B, L)`` for tokens ``(B, L + 1)``."""
    scores, wanted = model(tokens[:, :-1]), tokens[:, 1:]
    lost = F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="none")
    return lost.view_as(wanted)


@torch.no_grad()
def losses_by_length(model: Decoder, name: str, plan: Plan, text: Tensor) -> dict[str, list[float]]:
    """Loss at each length: of its last symbols, of all symbols, and by position of the longest.

    Every length ends at the same places of the text. So the last ``train_length`` symbols
    are the same at every length, and only the context before them grows.
    """
    encoding, trained = ENCODINGS[name], model.position
    ends = torch.linspace(plan.longest, len(text) - 1, plan.windows).long()
    tail, whole = [], []
    for length in plan.lengths:
        if encoding.trained_as is not None:
            model.position = encoding.build(plan, length)
        tokens = text[ends[:, None] + torch.arange(-length, 1)]
        # A few at a time: the memory of the longest stays near that of a training step.
        most = max(1, plan.batch * plan.train_length // length)
        lost = torch.cat([next_token_loss(model, some) for some in tokens.split(most)])
        tail.append(lost[:, -plan.train_length :].mean().item())
        whole.append(lost.mean().item())
    model.position = trained
    # Times are in order, so the last length is the longest.
    parts = lost.split(max(1, plan.train_length // 4), dim=1)
    by_position = [part.mean().item() for part in parts]
    return {"tail": tail, "whole": whole, "by_position": by_position}


def _cost(model: Decoder, plan: Plan, text: Text, step_seconds: float) -> dict[str, float]:
    """Speed and peak memory of a training step, and of a forward of one longest sequence."""
    short = text.train[: plan.train_length + 1].expand(plan.batch, -1)
    long = text.held[None, : plan.longest + 1]

    def learn() -> None:
        next_token_loss(model, short).mean().backward()
        model.zero_grad()

    @torch.no_grad()
    def read() -> None:
        next_token_loss(model, long)

    # Allocate tables, and free gradients, before memory is measured.
    model.zero_grad()
    learn()
    read_seconds = statistics.median(timeit.repeat(read, repeat=3, number=1))
    return {
        "train_tokens_per_second": plan.batch * plan.train_length / step_seconds,
        "test_tokens_per_second": plan.longest / read_seconds,
        "train_bytes": peak_bytes(learn),
        "test_bytes": peak_bytes(read),
    }


def peak_bytes(call: Callable[[], Any]) -> int:
    """Peak of the bytes that ``call`` has allocated and not freed.

    Every allocation and release of torch's CPU allocator is counted, those inside operations too;
    the sum is the same on a busy machine.
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
