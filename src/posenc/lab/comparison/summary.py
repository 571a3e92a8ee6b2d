"""What a comparison showed: a row for each encoding, and a sentence."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.plan import Plan

# Labels that a sentence cannot take as they are.
_SPOKEN = {"none": "no encoding"} | {n: f"{n} positions" for n in ("sinusoidal", "learned")}


def summarize(plan: Plan, units: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each encoding that has a finished seed: means over the seeds, and their range.

    ``tail`` is the loss of the last training length of each tested length; ``rise`` is what it
    has gained since the first; ``low`` and ``high`` are the least and the largest of the seeds.
    """
    rows = []
    for name in plan.encodings:
        found = [unit for unit in units.values() if name in unit["tests"]]
        if not found:
            continue
        tests = [unit["tests"][name] for unit in found]
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
                "curve": {
                    "step": found[0]["curve"]["step"],
                    "loss": _mean([unit["curve"]["loss"] for unit in found]),
                },
                "parameters": found[0]["parameters"],
                "cost": {
                    kind: statistics.median(unit["cost"][kind] for unit in found)
                    for kind in found[0]["cost"]
                },
            }
        )
    return rows


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def sentence(plan: Plan, rows: Sequence[dict[str, Any]]) -> str:
    """What was seen past the training length, or nothing where there is nothing to compare."""
    if len(rows) < 2 or len(plan.times) < 2:
        return ""

    def say(row: dict[str, Any]) -> str:
        name = _SPOKEN.get(row["encoding"], row["label"])
        return f"{name} ({row['tail'][0]:.2f} → {row['tail'][-1]:.2f})"

    best, *_, worst = map(say, sorted(rows, key=lambda row: row["rise"][-1]))
    return (
        f"From {plan.lengths[0]} to {plan.lengths[-1]} symbols, a transformer trained on "
        f"{plan.train_length} kept its loss best with {best} and worst with {worst}."
    )
