"""Train the same transformer with each encoding, then test it on sequences longer than those."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import posenc
from posenc.lab import machine, store
from posenc.lab.comparison import folder as folders
from posenc.lab.comparison.cost import COSTS, cost
from posenc.lab.comparison.decoder import Decoder
from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.folder import FILES, RESULTS
from posenc.lab.comparison.plan import Plan, Unit
from posenc.lab.comparison.text import Text, load
from posenc.lab.comparison.training import Progress, batches, next_token_loss, train


class Event(NamedTuple):
    """Where a run is: a unit, the part of its steps that is done, and the loss now."""

    unit: Unit
    done: float
    loss: float | None


class Run:
    """A comparison in a folder: every finished training is in its ``results.json``.

    Args:
        folder: Where results go.
        plan: What to do.
        command: The command line that asked for it, for the report.
    """

    def __init__(self, folder: Path, plan: Plan, command: str = "") -> None:
        self.folder, self.plan = folder, plan
        self.text = _text(plan)
        self.results: dict[str, Any] = {
            "posenc": posenc.__version__,
            "command": command,
            "machine": machine.describe(),
            "plan": dataclasses.asdict(plan),
            "text": _about(self.text),
            "complete": False,
            "units": {},
            "summary": [],
        }

    def begin(self, *, overwrite: bool = False) -> None:
        """Make a new or an empty folder this run's; with ``overwrite``, one that has a run too."""
        folders.check_new(self.folder, overwrite=overwrite)
        for name in FILES:
            if name != RESULTS:
                (self.folder / name).unlink(missing_ok=True)
        # Replaced last and in one move, so the folder is a run's at every moment.
        self._write()

    @classmethod
    def resume(cls, folder: Path) -> Run:
        """The run that a folder has, with all that is finished in it."""
        results = folders.read(folder)
        run = cls(folder, folders.plan_of(folder, results), results["command"])
        if run.text.sha256 != results["text"].get("sha256"):
            raise ValueError(
                f"{run.text.name} has changed since {folder / RESULTS} was written: "
                "--overwrite begins anew."
            )
        folders.check_units(folder, run.plan, results["units"])
        run.results["units"] = results["units"]
        run._write()
        return run

    def go(self, tell: Callable[[Event], None] = lambda event: None) -> None:
        """Train and test what is not finished, one after the other; ``tell`` hears of each step."""
        with machine.threads(self.plan.threads):
            for unit in self.plan.units():
                if str(unit) not in self.results["units"]:
                    self.results["units"][str(unit)] = self._unit(unit, tell)
                    self._write()

    def _write(self) -> None:
        self.results["complete"] = len(self.results["units"]) == len(self.plan.units())
        self.results["summary"] = summarize(self.results)
        content = json.dumps(self.results, indent=1, allow_nan=False)
        store.write(self.folder / RESULTS, f"{content}\n".encode())

    def _unit(self, unit: Unit, tell: Callable[[Event], None]) -> dict[str, Any]:
        plan = self.plan
        assert plan.base is not None
        model = Decoder(
            unit.trains,
            symbols=self.text.symbols,
            width=plan.width,
            layers=plan.layers,
            heads=plan.heads,
            longest=plan.longest,
            base=plan.base,
            seed=unit.seed,
        )
        starts = batches(self.text.train, plan.steps, plan.batch, plan.train_length, unit.seed)
        tell(Event(unit, 0.0, None))
        done = train(
            model,
            self.text.train,
            starts,
            length=plan.train_length,
            peak=plan.learning_rate,
            name=str(unit),
            tell=lambda p: tell(Event(unit, len(p.losses) / plan.steps, p.losses[-1])),
        )
        model.eval()
        tests = {
            name: self._test(model, name)
            for name in plan.encodings
            if ENCODINGS[name].trains == unit.trains
        }
        return {
            "trains": unit.trains,
            "seed": unit.seed,
            "parameters": sum(p.numel() for p in model.parameters()),
            "curve": _curve(done, plan.curve_steps),
            "tests": tests,
            "cost": cost(model, self.text, plan, done),
        }

    @torch.no_grad()
    def _test(self, model: Decoder, name: str) -> dict[str, Any]:
        """Loss at each length: of the last training length of it, and of all of it.

        Every length ends at the same places of the text. So the last symbols, as many as a
        training sequence has, are the same at every length, and only what is before them grows.
        """
        plan, stretch = self.plan, ENCODINGS[name].stretch
        ends = torch.linspace(plan.longest, len(self.text.held) - 1, plan.windows).long()
        tail, whole, by_position = [], [], []
        for length in plan.lengths:
            if stretch is not None:
                longer = length > plan.train_length
                factor = length / plan.train_length
                model.stretch(stretch(factor, plan.train_length) if longer else None)
            window = torch.arange(-length, 1)
            # A few at a time: the memory of the longest stays near that of a training step.
            most = max(1, plan.batch * plan.train_length // length)
            tokens = self.text.held[ends[:, None] + window]
            lost = torch.cat([next_token_loss(model, some) for some in tokens.split(most)])
            tail.append(lost[:, -plan.train_length :].mean().item())
            whole.append(lost.mean().item())
            if length == plan.longest:
                by_position = [part.mean().item() for part in lost.split(plan.part, dim=1)]
        model.stretch(None)
        return {"tail": tail, "whole": whole, "by_position": by_position}


def _curve(done: Progress, size: int) -> dict[str, list[float]]:
    """The losses of training, as means of ``size`` steps."""
    ends = range(size, len(done.losses) + 1, size)
    means = [statistics.fmean(done.losses[end - size : end]) for end in ends]
    return {"step": [float(end) for end in ends], "loss": means}


def _text(plan: Plan) -> Text:
    try:
        text = load(None if plan.text is None else Path(plan.text))
    except OSError as wrong:
        raise ValueError(f"--text {plan.text} cannot be read: {wrong.strerror}.") from None
    if len(text.held) <= plan.longest:
        have, need = len(text.held), plan.longest + 1
        raise ValueError(
            f"{text.name} is too short: its last tenth has {have} bytes, "
            f"and {need} are needed to test a length of {plan.longest}; lower --times."
        )
    return text


def _about(text: Text) -> dict[str, Any]:
    return {**text._asdict(), "train": len(text.train), "held": len(text.held)}


def summarize(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each encoding that has a finished seed: means over the seeds, and their spread.

    ``tail`` is the loss of the last training length of each tested length; ``rise`` is what it
    has gained since the first; ``low`` and ``high`` are the least and the largest of the seeds.
    """
    rows = []
    for name in results["plan"]["encodings"]:
        encoding = ENCODINGS[name]
        found = [u for u in results["units"].values() if name in u["tests"]]
        if not found:
            continue
        tails = [unit["tests"][name]["tail"] for unit in found]
        mean = _mean(tails)
        rows.append(
            {
                "encoding": name,
                "label": encoding.label,
                "past": encoding.past,
                "seeds": [unit["seed"] for unit in found],
                "tail": mean,
                "low": [min(column) for column in zip(*tails, strict=True)],
                "high": [max(column) for column in zip(*tails, strict=True)],
                "rise": [loss - mean[0] for loss in mean],
                "whole": _mean([unit["tests"][name]["whole"] for unit in found]),
                "by_position": _mean([unit["tests"][name]["by_position"] for unit in found]),
                "curve": {
                    "step": found[0]["curve"]["step"],
                    "loss": _mean([unit["curve"]["loss"] for unit in found]),
                },
                "parameters": found[0]["parameters"],
                "cost": {k: statistics.median(u["cost"][k] for u in found) for k in COSTS},
            }
        )
    return rows


def _mean(rows: list[list[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]
