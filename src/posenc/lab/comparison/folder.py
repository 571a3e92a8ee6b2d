"""The folder of a run: which files in it are the run's own, and what `results.json` must hold."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from posenc.lab import store
from posenc.lab.comparison.cost import COSTS
from posenc.lab.comparison.encodings import ENCODINGS
from posenc.lab.comparison.plan import Plan, Unit

RESULTS = "results.json"
# Everything that a run writes. No other file of a folder is ever replaced or removed.
FILES = (RESULTS, "report.html", "figure.svg", "figure.png")

# A run with hundreds of trainings stays far below this.
_LARGEST = 2**24
_TOP = {"posenc": str, "command": str, "plan": dict, "text": dict, "units": dict}


def check_new(folder: Path, *, overwrite: bool) -> None:
    """Raise unless a new run may begin in ``folder``: it is new, empty, or has a run of ours."""
    found = sorted(os.listdir(folder)) if folder.exists() else []
    if not found:
        return
    if RESULTS not in found:
        raise ValueError(
            f"{folder} holds {found[0]} and no run of posenc compare: "
            "name a new or an empty folder with -o."
        )
    read(folder)
    if not overwrite:
        raise ValueError(f"{folder} has a run: --resume goes on with it, --overwrite begins anew.")


def read(folder: Path) -> dict[str, Any]:
    """What the ``results.json`` of a run holds; ValueError where the folder has no run of ours.

    The plan and the units are as the file has them: see :func:`plan_of` and :func:`check_units`.
    """
    if not os.path.lexists(folder / RESULTS):
        raise ValueError(f"{folder} has no {RESULTS} to resume: name the folder of a run with -o.")
    for name in FILES:
        for path in (folder / name, store.partial(folder / name)):
            # A run writes regular files: what else has such a name is somebody's own.
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                raise ValueError(
                    f"{path} is not a regular file: move it away, or name another folder with -o."
                )
    try:
        with (folder / RESULTS).open("rb") as file:
            content = file.read(_LARGEST + 1)
        found = json.loads(content) if len(content) <= _LARGEST else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not _has(_TOP, {name: found.get(name) for name in _TOP}):
        raise _damaged(folder)
    return found


def plan_of(folder: Path, results: dict[str, Any]) -> Plan:
    """The plan of what :func:`read` found."""
    try:
        return Plan.of(results["plan"])
    except (TypeError, ValueError, OverflowError):
        raise _damaged(folder) from None


def check_units(folder: Path, plan: Plan, units: dict[str, Any]) -> None:
    """Raise unless ``units`` are what finished trainings of ``plan`` leave, number by number."""
    known = {str(unit): unit for unit in plan.units()}
    for name, found in units.items():
        if name not in known or not _has(_unit(plan, known[name]), found):
            raise _damaged(folder)


def _unit(plan: Plan, unit: Unit) -> dict[str, Any]:
    """What is written of a finished training: a type, or the value itself, for each entry."""
    points, lengths = plan.steps // plan.curve_steps, len(plan.times)
    test = {
        "tail": [float] * lengths,
        "whole": [float] * lengths,
        "by_position": [float] * -(-plan.longest // plan.part),
    }
    return {
        "trains": unit.trains,
        "seed": unit.seed,
        "parameters": int,
        "curve": {"step": [float] * points, "loss": [float] * points},
        "tests": {name: test for name in plan.encodings if ENCODINGS[name].trains == unit.trains},
        "cost": dict.fromkeys(COSTS, float),
    }


def _has(form: Any, value: Any) -> bool:
    """Whether ``value`` has this form: the same keys, as many items, and the types that are named.

    Examples:
        >>> _has({"seed": int, "tail": [float, float]}, {"seed": 0, "tail": [1.5, 2]})
        True
        >>> _has({"seed": int}, {"seed": "<script>"})
        False
    """
    if isinstance(form, dict):
        if not isinstance(value, dict) or value.keys() != form.keys():
            return False
        return all(_has(form[name], value[name]) for name in form)
    if isinstance(form, list):
        return isinstance(value, list) and len(value) == len(form) and all(map(_has, form, value))
    if form is float:
        # JSON has infinities and integers of any size, and no picture can be drawn of them.
        return type(value) in (int, float) and abs(value) < 1e30
    return type(value) is form if isinstance(form, type) else bool(value == form)


def _damaged(folder: Path) -> ValueError:
    return ValueError(
        f"{folder / RESULTS} is damaged, or not of posenc compare: "
        "move it away, or name another folder with -o."
    )
