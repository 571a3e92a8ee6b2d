"""A comparison in a folder: every finished training is in its ``results.json``."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import posenc
from posenc.lab import machine
from posenc.lab.comparison import workers
from posenc.lab.comparison.costs import cost
from posenc.lab.comparison.plan import Plan, Unit
from posenc.lab.comparison.results import RESULTS, read
from posenc.lab.comparison.summary import summarize
from posenc.lab.comparison.tasks import TASKS, Reading
from posenc.lab.comparison.training import Tell, train_and_test

# Everything that a run writes. No other file of a folder is ever replaced or removed.
FILES = (RESULTS, "report.html", "figure.svg", "figure.png")


class Run:
    """A plan, and the folder of its results; ``command`` is the command line, for the report."""

    def __init__(self, folder: Path, plan: Plan, command: str = "") -> None:
        self.folder, self.plan = folder, plan
        self.data = {task: TASKS[task].load(plan) for task in plan.tasks}
        self.results: dict[str, Any] = {
            "posenc": posenc.__version__,
            "command": command,
            "machine": machine.describe(),
            "plan": dataclasses.asdict(plan),
            "text": self._text(),
            "complete": False,
            "units": {},
            "costs": {},
            "summary": {},
        }

    def begin(self, *, overwrite: bool = False) -> None:
        """Begin in a new or an empty folder; with ``overwrite``, also in one that has a run."""
        self._check_device()
        folder = self.folder
        found = sorted(os.listdir(folder)) if folder.exists() else []
        if found and RESULTS not in found:
            raise ValueError(
                f"{folder} holds {found[0]} and no run of posenc compare: "
                "name a new or an empty folder with -o."
            )
        if found:
            read(folder)
            if not overwrite:
                hint = "continue it with --resume, or replace it with --overwrite."
                raise ValueError(f"{folder} has a run: {hint}")
            for name in FILES[1:]:
                (folder / name).unlink(missing_ok=True)
        # Replaced last and in one move, so the folder has a complete results.json at every moment.
        self._write()

    @classmethod
    def resume(cls, folder: Path) -> Run:
        """The run in ``folder``, with its finished trainings."""
        plan, results = read(folder)
        run = cls(folder, plan)
        if run.results["text"] != results["text"]:
            raise ValueError(
                f"the text has changed since {folder / RESULTS} was written: "
                "start again with --overwrite."
            )
        run.results = results
        return run

    def go(self, tell: Tell = lambda label, done: None, *, jobs: int = 1) -> None:
        """Measure the costs, then do the unfinished trainings, ``jobs`` of them at a time.

        ``tell`` is called after each step, or with several jobs after each training.
        """
        if not self.results["complete"]:
            self._check_device()
        for name in self.plan.encodings:
            if name not in self.results["costs"]:
                tell(f"measuring the cost of {name}", 0.0)
                with machine.threads(self.plan.threads):
                    self.results["costs"][name] = cost(name, self.plan)
                self._write()
        units = self.plan.units()
        for unit, result in self._train(tell, jobs):
            finished = {**self.results["units"], str(unit): result}
            ordered = {str(each): finished[str(each)] for each in units if str(each) in finished}
            self.results["units"] = ordered
            self.results["complete"] = len(ordered) == len(units)
            self.results["summary"] = summarize(self.plan, ordered)
            self._write()

    def _train(self, tell: Tell, jobs: int) -> Iterator[tuple[Unit, dict[str, Any]]]:
        """Do the unfinished trainings, and yield each as it ends."""
        units = self.plan.units()
        missing = [unit for unit in units if str(unit) not in self.results["units"]]
        first = len(units) - len(missing)
        if jobs > 1 and len(missing) > 1:
            ended = workers.train_all(missing, self.plan, min(jobs, len(missing)))
            for done, (unit, result) in enumerate(ended, first + 1):
                tell(f"{unit} is trained", done / len(units))
                yield unit, result
            return
        for done, unit in enumerate(missing, first):

            def tell_all(label: str, part: float, done: int = done) -> None:
                tell(label, (done + part) / len(units))

            with machine.threads(self.plan.threads):
                result = train_and_test(unit, self.plan, self.data[unit.task], tell_all)
            yield unit, result

    def _check_device(self) -> None:
        if self.plan.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a GPU that torch can use: leave it out.")

    def _text(self) -> dict[str, Any] | None:
        """What is known of the text, if there is one."""
        data = self.data.get("text")
        if not isinstance(data, Reading):
            return None
        text = data.text
        return {**text._asdict(), "train": len(text.train), "held": len(text.held)}

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        half = self.folder / f".{RESULTS}.partial"
        half.write_text(f"{json.dumps(self.results, indent=1, allow_nan=False)}\n", "utf-8")
        # In one move, so that a killed run leaves the old file or the new one.
        os.replace(half, self.folder / RESULTS)
