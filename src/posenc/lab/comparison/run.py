"""A comparison in a folder: every finished training is in its ``results.json``."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import statistics
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

import posenc
from posenc.lab import machine
from posenc.lab.comparison import own
from posenc.lab.comparison.encodings import ENCODINGS, find, trained_with
from posenc.lab.comparison.plan import Plan, Unit
from posenc.lab.comparison.tasks import TASKS, Reading
from posenc.lab.comparison.training import Progress, cost, silent, train_and_test

RESULTS = "results.json"
# What a run writes. No other file of a folder is ever replaced or removed.
FILES = (RESULTS, "report.html", "figure.svg", "figure.png")


class Run:
    """A plan, and the folder of its results; ``command`` is the command line, for the report."""

    def __init__(self, folder: Path, plan: Plan, command: str = "") -> None:
        self.own = [name for name in plan.encodings if own.is_own(name)]
        built_in = tuple(name for name in plan.encodings if name not in self.own)
        if built_in or not self.own:
            _check_known("encodings", built_in, [*ENCODINGS, own.FORM])
        _check_known("tasks", plan.tasks, TASKS)
        self.folder, self.plan = folder, plan
        self.results: dict[str, Any] = {
            "posenc": posenc.__version__,
            "command": command,
            "machine": machine.describe(),
            "plan": dataclasses.asdict(plan),
            "text": None,
            "files": {name: own.digest(name) for name in self.own},
            "costs": {},
            **_of_units(plan, {}),
        }
        # Loading a task also checks that its text is long enough.
        for data in [TASKS[task].load(plan) for task in plan.tasks]:
            if isinstance(data, Reading):
                text = data.text
                sizes = {"train": len(text.train), "held": len(text.held)}
                self.results["text"] = {**text._asdict(), **sizes}

    def begin(self, *, overwrite: bool = False) -> None:
        """Begin in a new or an empty folder; with ``overwrite``, also in one that has a run.

        The files of the user's own encodings are executed.
        """
        self._check_device()
        for name in self.own:
            own.check(name, self.plan)
        folder = self.folder
        files = sorted(os.listdir(folder)) if folder.exists() else []
        if files and RESULTS not in files:
            raise ValueError(
                f"{folder} holds {files[0]} and no run of posenc compare: "
                "name a new or an empty folder with -o."
            )
        if files:
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
        run._check_files()
        return run

    def go(self, progress: Progress = silent, *, jobs: int = 1) -> None:
        """Measure the costs, then do the unfinished trainings, ``jobs`` of them at a time.

        ``progress`` is called after each step, or with several jobs after each training.
        """
        if not self.results["complete"]:
            self._check_device()
        for name in self.plan.encodings:
            if name not in self.results["costs"]:
                progress(f"measuring the cost of {name}", 0.0)
                with machine.threads(self.plan.threads):
                    self.results["costs"][name] = cost(name, self.plan)
                self._write()
        for unit, result in self._train(progress, jobs):
            self._check_files()
            self.results |= _of_units(self.plan, {**self.results["units"], str(unit): result})
            self._write()

    def _train(self, progress: Progress, jobs: int) -> Iterator[tuple[Unit, dict[str, Any]]]:
        """Do the unfinished trainings, and yield each as it ends."""
        units = units_of(self.plan)
        missing = [unit for unit in units if str(unit) not in self.results["units"]]
        first = len(units) - len(missing)
        if jobs > 1 and len(missing) > 1:
            results = _train_in_processes(missing, self.plan, min(jobs, len(missing)))
            for done, (unit, result) in enumerate(results, first + 1):
                progress(f"{unit} is trained", done / len(units))
                yield unit, result
            return
        for done, unit in enumerate(missing, first):

            def overall(label: str, part: float, done: int = done) -> None:
                progress(label, (done + part) / len(units))

            yield unit, train_and_test(unit, self.plan, overall)

    def _check_files(self) -> None:
        """Refuse results of another version of the user's code than those before."""
        for name, before in self.results["files"].items():
            if own.digest(name) != before:
                raise ValueError(
                    f"{name.rpartition(':')[0]} has changed since {self.folder / RESULTS} was "
                    "begun: start again with --overwrite."
                )

    def _check_device(self) -> None:
        if self.plan.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a GPU that torch can use: leave it out.")

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".{RESULTS}.partial"
        partial.write_text(f"{json.dumps(self.results, indent=1, allow_nan=False)}\n", "utf-8")
        # In one move, so that a killed run leaves the old file or the new one.
        os.replace(partial, self.folder / RESULTS)


def read(folder: Path) -> tuple[Plan, dict[str, Any]]:
    """The plan and the results of the run in ``folder``; ValueError if there is none."""
    path = folder / RESULTS
    if not path.exists():
        raise ValueError(f"{folder} has no {RESULTS} to resume: name the folder of a run with -o.")
    try:
        results = json.loads(path.read_text("utf-8"))
        options: dict[str, Any] = results["plan"]
        # JSON has lists where a plan has tuples.
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        plan = Plan(**options)
        known = {key: results[key] for key in "posenc command machine plan text costs".split()}
        known["files"] = results.get("files", {})
        return plan, known | _of_units(plan, results["units"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{path} is damaged, or from another version of posenc compare: "
            "move it away, or name another folder with -o."
        ) from None


def units_of(plan: Plan) -> list[Unit]:
    """Trainings, seed by seed, so that a stopped run has every encoding of its first seeds."""
    trained = dict.fromkeys(map(trained_with, plan.encodings))
    return [
        Unit(task, name, seed)
        for seed in range(plan.seeds)
        for task in plan.tasks
        for name in trained
    ]


def _check_known(option: str, names: tuple[str, ...], known: Iterable[str]) -> None:
    for name in names or [""]:
        if name not in known:
            among = ", ".join(known)
            raise ValueError(f"--{option} must be among {among}; got {name or 'nothing'}.")


def _of_units(plan: Plan, finished: dict[str, Any]) -> dict[str, Any]:
    """The finished trainings in the plan's order, and what follows from them."""
    units = {str(unit): finished.get(str(unit)) for unit in units_of(plan)}
    done = {name: numbers for name, numbers in units.items() if numbers is not None}
    complete = len(done) == len(units)
    return {"complete": complete, "units": done, "summary": summarize(plan, done)}


def summarize(plan: Plan, units: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """For each task a row for each encoding that has a finished seed, in the plan's order.

    At each length, ``score`` is the mean over the seeds, ``low`` and ``high`` are their extremes,
    ``rank`` counts from 1 for the best mean, and ``level`` says whether the range of the seeds
    reaches that of the best.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for task in plan.tasks:
        trained = [unit for unit in units.values() if unit["task"] == task]
        tested = {name: [u for u in trained if name in u["tests"]] for name in plan.encodings}
        rows[task] = [_row(name, of) for name, of in tested.items() if of]
        for at in range(len(plan.times)):
            _rank(rows[task], at, lower=TASKS[task].lower_is_better)
    return rows


def _row(name: str, units: list[dict[str, Any]]) -> dict[str, Any]:
    tests = [unit["tests"][name] for unit in units]
    columns = list(zip(*(test["score"] for test in tests), strict=True))
    return {
        "encoding": name,
        "label": find(name).label,
        "how": find(name).how,
        "past": find(name).past,
        "seeds": [unit["seed"] for unit in units],
        "score": [statistics.fmean(column) for column in columns],
        "low": [min(column) for column in columns],
        "high": [max(column) for column in columns],
        "rank": [],
        "level": [],
        "by_position": _mean([test["by_position"] for test in tests]),
        "curve": {**units[0]["curve"], "loss": _mean([unit["curve"]["loss"] for unit in units])},
    }


def _rank(rows: list[dict[str, Any]], at: int, *, lower: bool) -> None:
    """Append rank and level of every row at one length."""
    sign = 1 if lower else -1
    means = [sign * row["score"][at] for row in rows]
    # The worst seed of the best encoding, which the best seed of another may reach.
    best = rows[means.index(min(means))] if rows else {}
    for row, mean in zip(rows, means, strict=True):
        row["rank"].append(1 + sum(other < mean for other in means))
        reaches = (
            row["low"][at] <= best["high"][at] if lower else row["high"][at] >= best["low"][at]
        )
        row["level"].append(reaches)


def _mean(rows: list[list[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def _train_in_processes(
    units: list[Unit], plan: Plan, jobs: int
) -> Iterator[tuple[Unit, dict[str, Any]]]:
    """Train ``units`` in ``jobs`` processes, and yield the numbers of each as it ends.

    When the caller stops, so do the processes.
    """
    others = set(multiprocessing.active_children())
    # A forked process cannot use CUDA, nor the threads of its parent.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _ignore_interrupt)
    try:
        futures = {pool.submit(train_and_test, unit, plan): unit for unit in units}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        pool.shutdown(cancel_futures=True)


def _ignore_interrupt() -> None:
    # A terminal sends Ctrl-C to every process; the first of them ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
