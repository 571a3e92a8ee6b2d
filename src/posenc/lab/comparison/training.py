"""Train a decoder, and test it on longer sequences."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from posenc.lab.comparison.decoder import Decoder
from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.plan import Plan, Unit
from posenc.lab.comparison.tasks import TASKS, UNASKED, Batch, Data

# Called after each step with a message and the fraction that is done.
Tell: TypeAlias = Callable[[str, float], None]
# Recalibration sees other data than the training before it.
_LATER = 2**20


def train_and_test(unit: Unit, plan: Plan, data: Data, tell: Tell) -> dict[str, Any]:
    """All numbers of one training: its curve, and the scores of each tested encoding."""
    model = Decoder(unit.trains, plan, symbols=data.symbols, seed=unit.seed).to(plan.device)
    losses = train(model, data, plan, unit, tell)
    tested = [n for n in plan.encodings if (ENCODINGS[n].trained_as or n) == unit.trains]
    # A point of the curve is the mean of a few steps; there are about 50 points.
    size = math.ceil(plan.steps / 50)
    ends = range(size, plan.steps + 1, size)
    return {
        "task": unit.task,
        "trains": unit.trains,
        "seed": unit.seed,
        "curve": {
            "step": list(ends),
            "loss": [statistics.fmean(losses[end - size : end]) for end in ends],
        },
        "tests": {name: evaluate(model, name, plan, unit, data) for name in tested},
    }


def train(model: Decoder, data: Data, plan: Plan, unit: Unit, tell: Tell) -> list[float]:
    """Train ``model`` in place; returns the loss of each step."""
    losses: list[float] = []
    peak = plan.learning_rate
    optimizer = make_optimizer(model, peak)
    for step, batch in enumerate(data.training(plan, unit.seed)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, plan.steps, peak)
        losses.append(learn(model, batch, optimizer).item())
        if not math.isfinite(losses[-1]):
            diverged = f"the training of {unit} diverged at step {step + 1}"
            raise ValueError(f"{diverged}: lower --learning-rate.")
        tell(f"{unit}, loss {losses[-1]:.2f}", (step + 1) / plan.steps)
    return losses


def make_optimizer(model: Decoder, rate: float) -> torch.optim.Optimizer:
    """The optimizer of every training."""
    return torch.optim.AdamW(model.weight_groups(0.1), lr=rate, betas=(0.9, 0.95), fused=True)


def learn(model: Decoder, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
    """One step; returns the mean loss before it."""
    # What is not asked loses nothing. A mask would make a GPU wait.
    loss = losses_of(model, batch).sum() / (batch.wanted != UNASKED).sum().item()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a tenth of the steps, and cosine decay to a twentieth of the peak."""
    rising = min(1.0, (step + 1) / max(1.0, 0.1 * steps))
    falling = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
    return peak * rising * falling


def losses_of(model: Decoder, batch: Batch) -> Tensor:
    """Nats lost on what should follow each token, ``(B, L)``; 0 where nothing is asked."""
    return _compare(_scores(model, batch.tokens), batch.wanted)


def _scores(model: Decoder, tokens: Tensor) -> Tensor:
    plan = model.plan
    with torch.autocast(plan.device, torch.bfloat16, enabled=plan.dtype == "bf16"):
        return model(tokens.to(plan.device)).float()  # type: ignore[no-any-return]


def _compare(scores: Tensor, wanted: Tensor) -> Tensor:
    wanted = wanted.to(scores.device)
    lost = F.cross_entropy(
        scores.flatten(0, 1), wanted.flatten(), ignore_index=UNASKED, reduction="none"
    )
    return lost.view_as(wanted)


def evaluate(
    model: Decoder, name: str, plan: Plan, unit: Unit, data: Data
) -> dict[str, list[float]]:
    """The score at each length, of the model that was trained or of one that follows from it."""
    encoding = ENCODINGS[name]
    if encoding.trained_as is not None:
        model = copy.deepcopy(model)
        model.use(name, plan.train_length)
    if encoding.recalibration:
        few = dataclasses.replace(plan, steps=max(1, round(encoding.recalibration * plan.steps)))
        later = unit._replace(seed=unit.seed + _LATER)
        train(model, data, few, later, lambda label, done: None)
    model.eval()
    return scores_by_length(model, name, plan, unit.task, data)


@torch.no_grad()
def scores_by_length(
    model: Decoder, name: str, plan: Plan, task: str, data: Data
) -> dict[str, list[float]]:
    """Score and mean loss at each length; of a text, also the loss by position of the longest.

    The score is the loss of the last ``train_length`` symbols, or the accuracy of the answers.
    """
    score, whole, by_position = [], [], []
    for length in plan.lengths:
        if ENCODINGS[name].trained_as is not None:
            model.use(name, length)
        batch = data.testing(plan, length)
        # A few at a time: the memory of the longest stays near that of a training step.
        most = max(1, plan.batch * plan.train_length // length)
        parts = [
            _marks(model, Batch(*some))
            for some in zip(batch.tokens.split(most), batch.wanted.split(most), strict=True)
        ]
        lost, right = (torch.cat(part) for part in zip(*parts, strict=True))
        asked = batch.wanted != UNASKED
        by_loss = TASKS[task].lower_is_better
        found = lost[:, -plan.train_length :] if by_loss else right[asked].float()
        score.append(found.mean().item())
        whole.append(lost[asked].mean().item())
        if by_loss and length == plan.longest:
            pieces = lost.split(max(1, plan.train_length // 4), dim=1)
            by_position = [piece.mean().item() for piece in pieces]
    return {"score": score, "loss": whole, "by_position": by_position}


def _marks(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether the likeliest was wanted; on the CPU."""
    scores = _scores(model, batch.tokens)
    lost = _compare(scores, batch.wanted).cpu()
    return lost, scores.argmax(-1).cpu() == batch.wanted
