"""What is trained and tested: all that decides the numbers, apart from the text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from posenc.lab.comparison.encodings import COMPARED, ENCODINGS

# The smallest value of each whole number in a plan.
LEAST = {"train_length": 4, "width": 2} | dict.fromkeys(
    ("steps", "batch", "layers", "heads", "windows", "threads"), 1
)


@dataclass(frozen=True, slots=True)
class Plan:
    """All that decides the numbers of a comparison, apart from the text.

    Attributes:
        encodings: Names that ``posenc compare --help`` lists.
        seeds: Each encoding is trained once for each.
        text: A file, or None for the built-in tales.
        train_length: Symbols of a training sequence.
        times: Tested lengths, in training lengths.
        steps: Of the optimizer.
        batch: Sequences of a step.
        width: Channels of the model.
        layers: Blocks.
        heads: Attention heads.
        learning_rate: The largest.
        base: Of RoPE and of the sinusoid; the training length if None. The slow pairs then turn
            less than once in a training sequence and the fast ones several times, as in a model
            that is trained on thousands of positions with 10 000.
        windows: Sequences of held-out text that are tested.
        threads: Of the CPU; sums are rounded differently with another count.
    """

    encodings: tuple[str, ...] = COMPARED
    seeds: tuple[int, ...] = (0,)
    text: str | None = None
    train_length: int = 64
    times: tuple[int, ...] = (1, 2, 4, 8)
    steps: int = 1000
    batch: int = 32
    width: int = 96
    layers: int = 3
    heads: int = 4
    learning_rate: float = 8e-3
    base: float | None = None
    windows: int = 64
    threads: int = 1

    def __post_init__(self) -> None:
        for name in self.encodings:
            if name not in ENCODINGS:
                raise ValueError(f"--encodings must be among {', '.join(ENCODINGS)}; got {name}.")
        if not self.encodings:
            raise ValueError("--encodings must name one at least.")
        for field, least in LEAST.items():
            if not _whole(getattr(self, field), least):
                flag = f"--{field.replace('_', '-')}"
                raise ValueError(f"{flag} must be a whole number, {least} or more.")
        if self.width % (2 * self.heads):
            raise ValueError(f"--width must be a multiple of 2 × {self.heads} heads.")
        if self.base is None:
            object.__setattr__(self, "base", float(self.train_length))
        elif not 1 < self.base < 1e300:
            raise ValueError(f"--base must be above 1, got {self.base:g}.")
        if not 0 < self.learning_rate < 1e300:
            raise ValueError(f"--learning-rate must be above 0, got {self.learning_rate:g}.")
        if not self.times or not all(_whole(times, 1) for times in self.times):
            raise ValueError("--times must be whole numbers, 1 or more.")
        if not self.seeds or not all(_whole(seed, 0) for seed in self.seeds):
            raise ValueError("--seeds must be whole numbers, 0 or more.")
        if not isinstance(self.text, str | None):
            raise TypeError("--text must be the name of a file.")

    @property
    def lengths(self) -> list[int]:
        """Tested lengths, in symbols."""
        return [self.train_length * times for times in self.times]

    @property
    def longest(self) -> int:
        """Positions a model must take."""
        return max(*self.lengths, self.train_length)

    @property
    def curve_steps(self) -> int:
        """Steps that one point of the training curve is the mean of; there are about 50 points."""
        return math.ceil(self.steps / 50)

    @property
    def part(self) -> int:
        """Positions that one point of the loss by position is the mean of."""
        return max(1, self.train_length // 4)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Plan:
        """The plan that JSON holds; TypeError or ValueError if it is none."""
        lists = ("encodings", "seeds", "times")
        known: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in fields.items()}
        return cls(**known)

    def units(self) -> list[Unit]:
        """What is trained, seed by seed, so that an early end has every encoding of some seeds."""
        trained = dict.fromkeys(ENCODINGS[name].trains for name in self.encodings)
        return [Unit(name, seed) for seed in self.seeds for name in trained]


QUICK = {"train_length": 32, "steps": 400, "width": 64, "layers": 2, "learning_rate": 2e-2}


class Unit(NamedTuple):
    """One training."""

    trains: str
    seed: int

    def __str__(self) -> str:
        return f"{self.trains}-{self.seed}"


def _whole(value: object, least: int) -> bool:
    return type(value) is int and least <= value < 2**31
