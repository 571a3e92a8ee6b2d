"""What a comparison showed, in a sentence."""

from __future__ import annotations

from typing import Any

# Labels that a sentence cannot take as they are.
_SPOKEN = {"none": "no encoding"} | {n: f"{n} positions" for n in ("sinusoidal", "learned")}


def sentence(results: dict[str, Any]) -> str:
    """What was seen past the training length, or nothing where there is nothing to compare."""
    plan, rows = results["plan"], results["summary"]
    if len(rows) < 2 or len(plan["times"]) < 2:
        return ""
    first, last = (plan["times"][i] * plan["train_length"] for i in (0, -1))

    def say(row: dict[str, Any]) -> str:
        name = _SPOKEN.get(row["encoding"], row["label"])
        return f"{name} ({row['tail'][0]:.2f} → {row['tail'][-1]:.2f})"

    best, *_, worst = map(say, sorted(rows, key=lambda row: row["rise"][-1]))
    return (
        f"From {first} to {last} symbols, a transformer trained on {plan['train_length']} "
        f"kept its loss best with {best} and worst with {worst}."
    )
