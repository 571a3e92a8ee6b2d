"""Train the same transformer with each encoding, then test it on sequences longer than those."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch

import posenc
from posenc.lab import machine, store
from posenc.lab.comparison.cost import cost
from posenc.lab.comparison.decoder import Decoder
from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.memory import peak_bytes
from posenc.lab.comparison.plan import Plan, Unit
from posenc.lab.comparison.summary import summarize
from posenc.lab.comparison.text import Text, load
from posenc.lab.comparison.training import Progress, batches, next_token_loss, train

RESULTS = "results.json"
# Points of a training curve that are kept, and parts of a training length told apart.
_CURVE, _PARTS = 50, 4


class Event(NamedTuple):
    """Where a run is: a unit, the part of its steps that is done, and the loss now."""

    unit: Unit
    done: float
    loss: float | None


class Stopped(Exception):
    """Another training was interrupted or failed, so this one ends too."""


class Run:
    """A comparison in a folder: finished units in ``results.json``, current ones in checkpoints.

    Args:
        folder: Where results go.
        plan: What to do. A new run replaces what the folder has; see :meth:`resume`.
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

    def begin(self) -> None:
        """Make the folder this run's: what another left in it goes first."""
        for name in (RESULTS, "report.html", "figure.png", "figure.svg"):
            (self.folder / name).unlink(missing_ok=True)
        self._tidy("checkpoint-*.pt")
        self._write()

    @classmethod
    def resume(cls, folder: Path) -> Run:
        """The run that a folder has, with all that is finished in it."""
        file = folder / RESULTS
        if not file.exists():
            raise ValueError(f"{folder} has no {RESULTS} to resume.")
        try:
            results = json.loads(file.read_text())
            run = cls(folder, Plan.of(results["plan"]), results["command"])
            written, units = results["text"]["sha256"], results["units"]
        except (KeyError, TypeError, json.JSONDecodeError):
            raise ValueError(f"{file} was not written by posenc compare.") from None
        if run.text.sha256 != written:
            raise ValueError(f"{run.text.name} has changed since {file} was written.")
        run.results["units"] = units
        run._write()
        run._tidy()
        return run

    def go(
        self,
        tell: Callable[[Event], None] = lambda event: None,
        *,
        every: float = 10.0,
        jobs: int | None = None,
    ) -> None:
        """Train and test what is not finished.

        Several trainings side by side use the cores better than one that is split over them:
        the operations of a small model are too short to share. The numbers are the same.

        Args:
            tell: Called after each step, from the thread of its training.
            every: Seconds between checkpoints of a training.
            jobs: Trainings at a time; as many as there are cores for if None.
        """
        todo = [unit for unit in self.plan.units() if str(unit) not in self.results["units"]]
        before, stop = torch.get_num_threads(), threading.Event()
        if jobs is None:
            jobs = max(1, machine.cores() // self.plan.threads)

        def tell_or_stop(event: Event) -> None:
            if stop.is_set():
                raise Stopped
            tell(event)

        # The profiler complains on stderr unless its first use is in the thread that loaded torch.
        peak_bytes(lambda: None)
        pool = ThreadPoolExecutor(
            jobs, initializer=torch.set_num_threads, initargs=(self.plan.threads,)
        )
        try:
            running = {pool.submit(self._unit, unit, tell_or_stop, every): unit for unit in todo}
            for finished in as_completed(running):
                self.results["units"][str(running[finished])] = finished.result()
                self._write()
                self._checkpoint(running[finished]).unlink(missing_ok=True)
        finally:
            # What a training cannot be told while it works, it is told at its next step.
            stop.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)

    def _checkpoint(self, unit: Unit) -> Path:
        return self.folder / f"checkpoint-{unit}.pt"

    def _tidy(self, *patterns: str) -> None:
        """Remove what a killed run was writing, and what else is named."""
        for pattern in (".*.partial", *patterns):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)

    def _write(self) -> None:
        done, names = self.results["units"], [str(unit) for unit in self.plan.units()]
        # In the order of the plan, whichever was finished first.
        self.results["units"] = {name: done[name] for name in names if name in done}
        self.results["complete"] = len(self.results["units"]) == len(names)
        self.results["summary"] = summarize(self.results)
        content = json.dumps(self.results, indent=1, allow_nan=False)
        store.write(self.folder / RESULTS, f"{content}\n".encode())

    def _unit(self, unit: Unit, tell: Callable[[Event], None], every: float) -> dict[str, Any]:
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
            checkpoint=self._checkpoint(unit),
            name=str(unit),
            every=every,
            tell=lambda p: tell(Event(unit, p.step / plan.steps, p.losses[-1])),
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
            "curve": _curve(done),
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
                size = max(1, plan.train_length // _PARTS)
                by_position = [part.mean().item() for part in lost.split(size, dim=1)]
        model.stretch(None)
        return {"tail": tail, "whole": whole, "by_position": by_position}


def _curve(done: Progress) -> dict[str, list[float]]:
    """The losses of training, as means of equal stretches of steps."""
    size = math.ceil(len(done.losses) / _CURVE)
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
            f"and {need} are needed to test a length of {plan.longest}."
        )
    return text


def _about(text: Text) -> dict[str, Any]:
    return {
        "name": text.name,
        "sha256": text.sha256,
        "train": len(text.train),
        "held": len(text.held),
        "symbols": text.symbols,
    }
