"""What is trained and tested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from posenc.lab.comparison.encodings import COMPARED, ENCODINGS

QUICK = {"train_length": 32, "steps": 400, "width": 64, "layers": 2, "learning_rate": 2e-2}


class Unit(NamedTuple):
    """One training."""

    trains: str
    seed: int

    def __str__(self) -> str:
        return f"{self.trains}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All that decides the numbers of a comparison, apart from the text.

    The fields are the options that ``posenc compare --help`` explains. A base of 0 stands for the
    training length: the slow pairs then rotate less than once in a training sequence and the fast
    ones several times, as in a model that is trained on thousands of positions with 10 000.
    """

    encodings: tuple[str, ...] = COMPARED
    seeds: int = 1
    text: str | None = None
    train_length: int = 64
    times: tuple[int, ...] = (1, 2, 4, 8)
    steps: int = 1000
    batch: int = 32
    width: int = 96
    layers: int = 3
    heads: int = 4
    learning_rate: float = 8e-3
    base: float = 0.0
    windows: int = 64
    # Sums are rounded differently with another count.
    threads: int = 1

    def __post_init__(self) -> None:
        for name in self.encodings or [""]:
            if name not in ENCODINGS:
                known = ", ".join(ENCODINGS)
                raise ValueError(f"--encodings must be among {known}; got {name or 'nothing'}.")
        if min(self.times) < 1:
            raise ValueError(f"--times must be 1 or more, got {min(self.times)}.")
        if self.width % (2 * self.heads):
            raise ValueError(f"--width must be a multiple of 2 × {self.heads} heads.")
        if self.base == 0:
            object.__setattr__(self, "base", float(self.train_length))
        if not 1 < self.base < 1e300:
            raise ValueError(f"--base must be above 1, got {self.base:g}.")
        if not 0 < self.learning_rate < 1e300:
            raise ValueError(f"--learning-rate must be above 0, got {self.learning_rate:g}.")

    @property
    def lengths(self) -> list[int]:
        """Tested lengths, in symbols."""
        return [self.train_length * times for times in self.times]

    @property
    def longest(self) -> int:
        """Positions a model must take."""
        return max(self.lengths)

    def units(self) -> list[Unit]:
        """What is trained, seed by seed, so that an early end has every encoding of some seeds."""
        trained = dict.fromkeys(ENCODINGS[name].trained_as or name for name in self.encodings)
        return [Unit(name, seed) for seed in range(self.seeds) for name in trained]
