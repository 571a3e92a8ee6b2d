"""The file ``results.json`` of a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.summary import summarize

RESULTS = "results.json"


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
        units = results["units"]
        # These follow from the trainings, so they are computed again.
        summary = summarize(plan, units)
        complete = all(str(unit) in units for unit in plan.units())
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{path} is damaged, or from another version of posenc compare: "
            "move it away, or name another folder with -o."
        ) from None
    return plan, {**known, "complete": complete, "units": units, "summary": summary}
