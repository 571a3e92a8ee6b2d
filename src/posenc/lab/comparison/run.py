"""A comparison in a folder: every finished training is in its ``results.json``."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from pathlib import Path
from typing import Any

import posenc
from posenc._contract import files
from posenc.lab import machine
from posenc.lab.comparison.plan import ENCODINGS, Plan
from posenc.lab.comparison.text import load
from posenc.lab.comparison.training import Tell, train_and_test

RESULTS = "results.json"
# Everything that a run writes. No other file of a folder is ever replaced or removed.
FILES = (RESULTS, "report.html", "figure.svg", "figure.png")


class Run:
    """A plan, and the folder of its results; ``command`` is the command line, for the report."""

    def __init__(self, folder: Path, plan: Plan, command: str = "") -> None:
        self.folder, self.plan = folder, plan
        self.text = text = load(None if plan.text is None else Path(plan.text))
        if len(text.held) <= plan.longest:
            raise ValueError(
                f"{text.name} is too short: its last tenth has {len(text.held)} bytes, and "
                f"{plan.longest + 1} are needed to test a length of {plan.longest}; lower --times."
            )
        self.results: dict[str, Any] = {
            "posenc": posenc.__version__,
            "command": command,
            "machine": machine.describe(),
            "plan": dataclasses.asdict(plan),
            "text": {**text._asdict(), "train": len(text.train), "held": len(text.held)},
            "complete": False,
            "units": {},
            "summary": [],
        }

    def begin(self, *, overwrite: bool = False) -> None:
        """Begin in a new or an empty folder; with ``overwrite``, also in one that has a run."""
        folder = self.folder
        found = sorted(os.listdir(folder)) if folder.exists() else []
        if found and RESULTS not in found:
            raise ValueError(
                f"{folder} holds {found[0]} and no run of posenc compare: "
                "name a new or an empty folder with -o."
            )
        if found:
            _read(folder)
            if not overwrite:
                way_out = "continue it with --resume, or replace it with --overwrite."
                raise ValueError(f"{folder} has a run: {way_out}")
            for name in FILES[1:]:
                (folder / name).unlink(missing_ok=True)
        # Replaced last and in one move, so the folder has a complete results.json at every moment.
        self._write()

    @classmethod
    def resume(cls, folder: Path) -> Run:
        """The run in ``folder``, with its finished trainings."""
        plan, results = _read(folder)
        run = cls(folder, plan)
        if run.text.sha256 != results["text"]["sha256"]:
            raise ValueError(
                f"{run.text.name} has changed since {folder / RESULTS} was written: "
                "start again with --overwrite."
            )
        run.results = results
        return run

    def go(self, tell: Tell = lambda label, done: None) -> None:
        """Do the unfinished trainings, one by one; ``tell`` is called after each step."""
        finished, units = self.results["units"], self.plan.units()

        def tell_all(label: str, done: float) -> None:
            tell(label, (len(finished) + done) / len(units))

        for unit in units:
            if str(unit) not in finished:
                with machine.threads(self.plan.threads):
                    finished[str(unit)] = train_and_test(unit, self.plan, self.text, tell_all)
                self.results["complete"] = len(finished) == len(units)
                self.results["summary"] = summarize(self.plan, finished)
                self._write()

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        half = self.folder / f".{RESULTS}.partial"
        half.write_text(f"{json.dumps(self.results, indent=1, allow_nan=False)}\n", "utf-8")
        # In one move, so that a killed run leaves the old file or the new one.
        os.replace(half, self.folder / RESULTS)


def _read(folder: Path) -> tuple[Plan, dict[str, Any]]:
    """The plan and the results of the run in ``folder``; ValueError if there is none."""
    path = folder / RESULTS
    if not path.exists():
        raise ValueError(f"{folder} has no {RESULTS} to resume: name the folder of a run with -o.")
    try:
        results = files.read_json("compare", path)
        if not results.keys() >= {"posenc", "plan", "text", "units"}:
            raise ValueError
        options: dict[str, Any] = results["plan"]
        options = {k: tuple(v) if type(v) is list else v for k, v in options.items()}
        return Plan(**options), results
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            f"{path} is damaged, or from another version of posenc compare: "
            "move it away, or name another folder with -o."
        ) from None


def summarize(plan: Plan, units: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each encoding that has a finished seed: means over the seeds, and their range.

    ``tail`` is the loss of the last ``train_length`` symbols at each length; ``rise`` is how much
    higher it is than at the first; ``low`` and ``high`` are the extremes of the seeds.
    """
    rows = []
    for name in plan.encodings:
        found = [unit for unit in units.values() if name in unit["tests"]]
        if not found:
            continue
        tests = [unit["tests"][name] for unit in found]
        curves, costs = ([unit[part] for unit in found] for part in ("curve", "cost"))
        columns = list(zip(*(test["tail"] for test in tests), strict=True))
        tail = [statistics.fmean(column) for column in columns]
        rows.append(
            {
                "encoding": name,
                "label": ENCODINGS[name].label,
                "past": ENCODINGS[name].past,
                "seeds": [unit["seed"] for unit in found],
                "tail": tail,
                "low": [min(column) for column in columns],
                "high": [max(column) for column in columns],
                "rise": [loss - tail[0] for loss in tail],
                "whole": _mean([test["whole"] for test in tests]),
                "by_position": _mean([test["by_position"] for test in tests]),
                "curve": {**curves[0], "loss": _mean([curve["loss"] for curve in curves])},
                "parameters": found[0]["parameters"],
                "cost": {k: statistics.median(cost[k] for cost in costs) for k in costs[0]},
            }
        )
    return rows


def _mean(rows: list[list[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]
