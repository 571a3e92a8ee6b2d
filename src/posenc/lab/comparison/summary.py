"""What a run found, one row for each encoding."""

from __future__ import annotations

import statistics
from typing import Any

from posenc.lab.comparison.cost import COSTS
from posenc.lab.comparison.encodings import ENCODINGS


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
