"""Train one decoder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from posenc.lab.comparison.decoder import Decoder

_WARM_UP = 0.1
_LAST_RATE = 0.05


@dataclass(slots=True)
class Progress:
    """The loss and the time of every step so far."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def batches(train: Tensor, steps: int, batch: int, length: int, seed: int) -> Tensor:
    """First symbol of every sequence, ``(steps, batch)``: the data order of a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, len(train) - length, (steps, batch), generator=generator)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up in a straight line for a tenth of the steps, then down a cosine to a twentieth."""
    rising = min(1.0, (step + 1) / max(1.0, _WARM_UP * steps))
    falling = _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2
    return peak * rising * falling


def train(
    model: Decoder,
    text: Tensor,
    starts: Tensor,
    *,
    length: int,
    peak: float,
    name: str,
    tell: Callable[[Progress], None],
) -> Progress:
    """Train ``model`` on the sequences at ``starts``.

    Args:
        model: Trained in place.
        text: Symbols.
        starts: What :func:`batches` gives.
        length: Of a sequence.
        peak: Largest learning rate.
        name: What is trained, for errors.
        tell: Called after each step.
    """
    steps, done = len(starts), Progress()
    optimizer = torch.optim.AdamW(model.weight_groups(0.1), lr=peak, betas=(0.9, 0.95), fused=True)
    window = torch.arange(length + 1)
    for step in range(steps):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        tokens = text[starts[step][:, None] + window]
        loss = next_token_loss(model, tokens).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done.losses.append(loss.item())
        if not math.isfinite(done.losses[-1]):
            rule = f"the training of {name} diverged at step {step + 1}"
            raise ValueError(f"{rule}: lower --learning-rate.")
        done.seconds.append(time.perf_counter() - began)
        tell(done)
    return done


def next_token_loss(model: Decoder, tokens: Tensor) -> Tensor:
    """Nats lost on each token after the first, ``(B, L)`` for tokens ``(B, L + 1)``."""
    scores, wanted = model(tokens[:, :-1]), tokens[:, 1:]
    lost = F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="none")
    return lost.view_as(wanted)
