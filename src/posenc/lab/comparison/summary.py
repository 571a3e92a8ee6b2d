"""The numbers of a comparison, encoding by encoding: means over the seeds, their range, ranks."""

from __future__ import annotations

import statistics
from typing import Any

from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.tasks import TASKS


def summarize(plan: Plan, units: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """For each task a row for each encoding that has a finished seed, in the plan's order.

    At each length, ``score`` is the mean over the seeds, ``low`` and ``high`` are their extremes,
    ``worse`` is how much worse the mean is than at the first length, ``rank`` counts from 1 for the
    best mean, and ``level`` says whether the range of the seeds reaches that of the best.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for task in plan.tasks:
        ours = [unit for unit in units.values() if unit["task"] == task]
        found = {n: [unit for unit in ours if n in unit["tests"]] for n in plan.encodings}
        rows[task] = [_row(task, name, of) for name, of in found.items() if of]
        for at in range(len(plan.times)):
            _rank(rows[task], at, lower=TASKS[task].lower_is_better)
    return rows


def _row(task: str, name: str, units: list[dict[str, Any]]) -> dict[str, Any]:
    tests = [unit["tests"][name] for unit in units]
    columns = list(zip(*(test["score"] for test in tests), strict=True))
    score = [statistics.fmean(column) for column in columns]
    curve = units[0]["curve"]
    return {
        "encoding": name,
        "label": ENCODINGS[name].label,
        "how": ENCODINGS[name].how,
        "past": ENCODINGS[name].past,
        "seeds": [unit["seed"] for unit in units],
        "score": score,
        "low": [min(column) for column in columns],
        "high": [max(column) for column in columns],
        "worse": [TASKS[task].worse_by(each, score[0]) for each in score],
        "rank": [],
        "level": [],
        "loss": _mean([test["loss"] for test in tests]),
        "by_position": _mean([test["by_position"] for test in tests]),
        "curve": {**curve, "loss": _mean([unit["curve"]["loss"] for unit in units])},
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
