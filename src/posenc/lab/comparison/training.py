"""Train one decoder, in steps that a checkpoint can stand between."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posenc.lab import store
from posenc.lab.comparison.decoder import Decoder

_WARM_UP = 0.1
_LAST_RATE = 0.05


@dataclass(slots=True)
class Progress:
    """How far a training is: what a checkpoint holds beside weights and optimizer."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def batches(train: Tensor, steps: int, batch: int, length: int, seed: int) -> Tensor:
    """First symbol of every sequence, ``(steps, batch)``: the data order, all of it, from a seed.

    A function of the seed alone, so a training that goes on needs no state of a generator.
    """
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
    checkpoint: Path,
    name: str,
    every: float,
    tell: Callable[[Progress], None],
) -> Progress:
    """Train ``model`` on the sequences at ``starts``, from the checkpoint if it is of ``name``.

    Args:
        model: Trained in place.
        text: Symbols.
        starts: What :func:`batches` gives.
        length: Of a sequence.
        peak: Largest learning rate.
        checkpoint: Written every ``every`` seconds, whole or not at all.
        name: What is trained: a checkpoint of anything else is left alone.
        every: See ``checkpoint``.
        tell: Called after each step.
    """
    steps = len(starts)
    optimizer = torch.optim.AdamW(model.weight_groups(0.1), lr=peak, betas=(0.9, 0.95), fused=True)
    done = _restore(checkpoint, name, model, optimizer)
    window = torch.arange(length + 1)
    saved = time.monotonic()
    for step in range(done.step, steps):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        tokens = text[starts[step][:, None] + window]
        loss = next_token_loss(model, tokens).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done.step = step + 1
        done.losses.append(loss.item())
        if not math.isfinite(done.losses[-1]):
            rule = f"the training of {name} diverged at step {done.step}"
            raise ValueError(f"{rule}: lower --learning-rate.")
        done.seconds.append(time.perf_counter() - began)
        tell(done)
        if time.monotonic() - saved >= every and done.step < steps:
            _save(checkpoint, name, model, optimizer, done)
            saved = time.monotonic()
    return done


def next_token_loss(model: Decoder, tokens: Tensor) -> Tensor:
    """Nats lost on each token after the first, ``(B, L)`` for tokens ``(B, L + 1)``."""
    scores, wanted = model(tokens[:, :-1]), tokens[:, 1:]
    lost = F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="none")
    return lost.view_as(wanted)


def _save(
    path: Path, name: str, model: Decoder, optimizer: torch.optim.Optimizer, done: Progress
) -> None:
    content = io.BytesIO()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    progress = {"step": done.step, "losses": done.losses, "seconds": done.seconds}
    torch.save({"name": name, "progress": progress, **state}, content)
    store.write(path, content.getvalue())


def _restore(path: Path, name: str, model: Decoder, optimizer: torch.optim.Optimizer) -> Progress:
    if not path.exists():
        return Progress()
    state: dict[str, Any] = torch.load(path, weights_only=True)
    if state["name"] != name:
        return Progress()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])
