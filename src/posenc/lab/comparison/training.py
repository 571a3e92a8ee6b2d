"""A small causal transformer: its training, its tests on longer sequences, and its costs."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posenc.lab import machine
from posenc.lab.comparison.encodings import find, trained_with
from posenc.lab.comparison.plan import Plan, Unit
from posenc.lab.comparison.tasks import IGNORED, TASKS, Batch, Data

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Called after each step with a message and the fraction that is done.
Progress: TypeAlias = Callable[[str, float], None]
# Distinct symbols of a text, about, and how often a step is timed.
_SYMBOLS, REPEATS = 64, 10
# Recalibration sees other data than the training before it.
_LATER = 2**20


class Decoder(nn.Module):
    """Embedding, pre-norm blocks of attention and a squared-ReLU MLP, and an untied head.

    The plan has the sizes, except ``symbols``, the number of distinct tokens. Weights that all
    encodings share are drawn first, so they are the same for one seed.
    """

    def __init__(self, encoding: str, plan: Plan, *, symbols: int, seed: int) -> None:
        super().__init__()
        self.plan = plan
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(symbols, plan.width)
            self.blocks = nn.ModuleList(_Block(plan.width, plan.heads) for _ in range(plan.layers))
            self.norm = nn.LayerNorm(plan.width)
            self.head = nn.Linear(plan.width, symbols, bias=False)
            for weight in self._matrices():
                nn.init.normal_(weight, std=0.02)
            self.use(encoding, plan.train_length)

    def use(self, encoding: str, length: int) -> None:
        """Replace the encoding by a new module, for sequences of ``length``."""
        self.encoding = find(encoding)
        self.position = self.encoding.build(self.plan, length).to(self.embedding.weight.device)
        acts_on = self.encoding.acts_on
        self.acts_on = self.position.acts_on if acts_on == "own" else acts_on

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of each next token, ``(B, L, symbols)`` for tokens ``(B, L)``."""
        x = self.embedding(tokens)
        if self.acts_on == "input":
            x = self.position(x)
        for layer, block in enumerate(self.blocks):
            attend = self._attend if self.encoding.acts_in(layer) else _attend_plainly
            x = block(x, attend)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def _attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of queries, keys and values, which are projections of ``x``."""
        acts_on, scale = self.acts_on, q.shape[-1] ** -0.5
        if acts_on in ("scores", "gates"):
            inputs = (x,) if acts_on == "gates" else ()
            # Some modules have another default scale, and only the encoding should vary.
            return self.position(q, k, v, *inputs, scale=scale)  # type: ignore[no-any-return]
        if acts_on == "queries and keys":
            q, k = self.position(q, k)
        # An encoding may make queries and keys wider, which would change the default scale.
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    def weight_groups(self, decay: float) -> list[dict[str, object]]:
        """Parameters for an optimizer: decay for matrices, none for vectors and for tables.

        A learned row that no gradient reaches must keep its initial value.
        """
        matrices = self._matrices()
        others = [p for p in self.parameters() if all(p is not matrix for matrix in matrices)]
        return [
            {"params": matrices, "weight_decay": decay},
            {"params": others, "weight_decay": 0.0},
        ]

    def _matrices(self) -> list[Tensor]:
        return [p for p in (*self.blocks.parameters(), self.head.weight) if p.dim() > 1]


def _attend_plainly(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        normed = self.before_attention(x)
        qkv = self.qkv(normed).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(normed, *qkv.unbind()).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.before_mlp(x))).square())  # type: ignore[no-any-return]


def silent(label: str, done: float) -> None:
    """Hear of progress, and say nothing."""


def train_and_test(unit: Unit, plan: Plan, progress: Progress = silent) -> dict[str, Any]:
    """All numbers of one training: its curve, and the scores of each tested encoding."""
    data = TASKS[unit.task].load(plan)
    with machine.threads(plan.threads):
        model = Decoder(unit.trains, plan, symbols=data.symbols, seed=unit.seed).to(plan.device)
        losses = train(model, data, plan, unit, progress)
        tested = [name for name in plan.encodings if trained_with(name) == unit.trains]
        tests = {name: evaluate(model, name, plan, unit, data) for name in tested}
    # A point of the curve is the mean of a few steps; there are about 50 points.
    size = math.ceil(plan.steps / 50)
    ends = range(size, plan.steps + 1, size)
    means = [statistics.fmean(losses[end - size : end]) for end in ends]
    return {**unit._asdict(), "curve": {"step": list(ends), "loss": means}, "tests": tests}


def train(
    model: Decoder, data: Data, plan: Plan, unit: Unit, progress: Progress = silent
) -> list[float]:
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
        progress(f"{unit}, loss {losses[-1]:.2f}", (step + 1) / plan.steps)
    return losses


def make_optimizer(model: Decoder, rate: float) -> torch.optim.Optimizer:
    """The optimizer of every training."""
    return torch.optim.AdamW(model.weight_groups(0.1), lr=rate, betas=(0.9, 0.95), fused=True)


def learn(model: Decoder, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
    """One step; returns the mean loss before it."""
    # Tokens without a target lose nothing. A mask would make a GPU wait.
    loss = losses_of(model, batch).sum() / (batch.targets != IGNORED).sum().item()
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
    """Nats lost on the target of each token, ``(B, L)``; 0 for tokens without a target."""
    scores, targets = _scores(model, batch.tokens), batch.targets.to(model.plan.device)
    how: Any = {"ignore_index": IGNORED, "reduction": "none"}
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), **how).view_as(targets)


def _scores(model: Decoder, tokens: Tensor) -> Tensor:
    plan = model.plan
    with torch.autocast(plan.device, torch.bfloat16, enabled=plan.dtype == "bf16"):
        return model(tokens.to(plan.device)).float()  # type: ignore[no-any-return]


def evaluate(
    model: Decoder, name: str, plan: Plan, unit: Unit, data: Data
) -> dict[str, list[float]]:
    """The score at each length, of the trained model or of one that follows from it."""
    encoding = find(name)
    if encoding.trained_as is not None:
        model = copy.deepcopy(model)
        model.use(name, plan.train_length)
    if encoding.recalibration:
        few = dataclasses.replace(plan, steps=max(1, round(encoding.recalibration * plan.steps)))
        later = unit._replace(seed=unit.seed + _LATER)
        train(model, data, few, later)
    model.eval()
    return scores_by_length(model, name, plan, unit.task, data)


@torch.no_grad()
def scores_by_length(
    model: Decoder, name: str, plan: Plan, task: str, data: Data
) -> dict[str, list[float]]:
    """The score at each length, and for a text the loss by position of the longest.

    The score is the loss of the last ``train_length`` symbols, or the accuracy of the answers.
    """
    score, by_position = [], []
    for length in plan.lengths:
        if find(name).trained_as is not None:
            model.use(name, length)
        batch = data.testing(plan, length)
        # A few sequences at a time: the longest then need about the memory of a training step.
        few = max(1, plan.batch * plan.train_length // length)
        pieces = zip(*(part.split(few) for part in batch), strict=True)
        if TASKS[task].lower_is_better:
            lost = torch.cat([losses_of(model, Batch(*piece)).cpu() for piece in pieces])
            score.append(lost[:, -plan.train_length :].mean().item())
            if length == plan.longest:
                quarters = lost.split(max(1, plan.train_length // 4), dim=1)
                by_position = [quarter.mean().item() for quarter in quarters]
        else:
            answers = torch.cat([_scores(model, tokens).argmax(-1).cpu() for tokens, _ in pieces])
            correct = (answers == batch.targets)[batch.targets != IGNORED]
            score.append(correct.float().mean().item())
    return {"score": score, "by_position": by_position}


def cost(name: str, plan: Plan) -> dict[str, Any]:
    """Time of a training step and of reading one longest sequence; on CUDA also their peak bytes.

    Any tokens and new weights: neither changes what a step does. Steps with the encoding
    alternate with steps without one, and a time is the ratio of their medians, so that another
    program that slows the machine slows both. An encoding that is applied afterwards has no step
    of its own.
    """
    model, plain = (
        Decoder(trained_with(each), plan, symbols=_SYMBOLS, seed=0).to(plan.device)
        for each in (name, "none")
    )
    afterwards = find(name).trained_as is not None
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
