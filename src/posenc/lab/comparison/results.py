"""The file ``results.json`` of a comparison, which anybody may have written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from posenc._contract import files
from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.plan import Plan, Unit
from posenc.lab.comparison.summary import summarize

RESULTS = "results.json"
_TEXT = {"name": str, "train": int, "held": int, "symbols": int, "sha256": str}
_MACHINE = "cpu cores architecture system gpu cuda python torch triton date".split()
_PLAN = {
    **dict.fromkeys("encodings tasks times".split(), list),
    **dict.fromkeys("seeds train_length steps batch width layers heads windows".split(), int),
    "threads": int,
    **dict.fromkeys("learning_rate base".split(), float),
    "text": (str, None),
    **dict.fromkeys(["device", "dtype"], str),
}
_FILE = {
    "posenc": str,
    "command": str,
    "machine": dict.fromkeys(_MACHINE, (str, int, None)),
    "plan": _PLAN,
    "text": (_TEXT, None),
    "units": dict,
    "costs": dict,
    # These follow from the units, so they are computed again.
    "complete": object,
    "summary": object,
}
_COST = {
    **dict.fromkeys("read read_bytes".split(), float),
    **dict.fromkeys("step step_seconds step_bytes".split(), (float, None)),
    "parameters": int,
}


def read(folder: Path) -> tuple[Plan, dict[str, Any]]:
    """The plan and the results of the run in ``folder``; ValueError if there is none."""
    path = folder / RESULTS
    if not path.exists():
        raise ValueError(f"{folder} has no {RESULTS} to resume: name the folder of a run with -o.")
    try:
        results = files.read_json("compare", path)
        _check(_fits(results, _FILE))
        options: dict[str, Any] = results["plan"]
        options = {k: tuple(v) if type(v) is list else v for k, v in options.items()}
        plan = Plan(**options)
        units, costs = results["units"], results["costs"]
        known = {str(unit): _unit(plan, unit) for unit in plan.units()}
        _check(all(name in known and _fits(units[name], known[name]) for name in units))
        _check(all(name in plan.encodings and _fits(costs[name], _COST) for name in costs))
    except (TypeError, ValueError):
        raise ValueError(
            f"{path} is damaged, or from another version of posenc compare: "
            "move it away, or name another folder with -o."
        ) from None
    results["summary"] = summarize(plan, units)
    results["complete"] = len(units) == len(known)
    return plan, results


def _check(sound: bool) -> None:
    if not sound:
        raise ValueError


def _unit(plan: Plan, unit: Unit) -> dict[str, Any]:
    """What is known of a training."""
    points = plan.steps // math.ceil(plan.steps / 50)
    pieces = math.ceil(plan.longest / max(1, plan.train_length // 4)) if unit.task == "text" else 0
    scores = [float] * len(plan.times)
    test = {"score": scores, "loss": scores, "by_position": [float] * pieces}
    tested = [n for n in plan.encodings if (ENCODINGS[n].trained_as or n) == unit.trains]
    curve = {"step": [int] * points, "loss": [float] * points}
    return {**unit._asdict(), "curve": curve, "tests": dict.fromkeys(tested, test)}


def _fits(value: Any, shape: Any) -> bool:
    """Whether a value of JSON has a shape: a type, a value, several of them, or a nest of them."""
    if isinstance(shape, tuple):
        return any(_fits(value, each) for each in shape)
    if isinstance(shape, dict):
        fits = type(value) is dict and value.keys() == shape.keys()
        return fits and all(_fits(value[key], shape[key]) for key in shape)
    if isinstance(shape, list):
        fits = type(value) is list and len(value) == len(shape)
        return fits and all(map(_fits, value, shape))
    if shape is float:
        # Not a number is never below, and sums of such numbers are finite.
        return type(value) in (int, float) and abs(value) < 1e30
    if shape is int:
        return type(value) is int and 0 <= value < 2**63
    if isinstance(shape, type):
        return isinstance(value, shape)
    return type(value) is type(shape) and value == shape
