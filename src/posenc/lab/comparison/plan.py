"""What a comparison trains and tests, with all sizes; its names are looked up by `run`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

COMPARED = ("none", "sinusoidal", "learned", "rope", "rope-yarn", "alibi")
QUICK = {"steps": 300, "batch": 32, "learning_rate": 2e-2}


class Unit(NamedTuple):
    """One training."""

    task: str
    trains: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task}-{self.trains}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the numbers of a comparison depend on, except the text.

    The fields are the options that ``posenc compare --help`` explains. A base of 0 stands for the
    training length: the slow pairs then rotate less than once in a training sequence and the fast
    ones several times, as in a model that is trained on thousands of positions with 10 000.
    """

    encodings: tuple[str, ...] = COMPARED
    tasks: tuple[str, ...] = ("text",)
    seeds: int = 1
    text: str | None = None
    train_length: int = 32
    times: tuple[int, ...] = (1, 2, 4, 8)
    steps: int = 1000
    batch: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    learning_rate: float = 1e-2
    base: float = 0.0
    windows: int = 64
    # Sums are rounded differently with another number of threads, and on another device.
    threads: int = 1
    device: str = "cpu"
    # Of the matrix products, under torch.autocast; weights stay in float32.
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"--device must be cpu or cuda, got {self.device}.")
        if self.dtype not in ("fp32", "bf16"):
            raise ValueError(f"--dtype must be fp32 or bf16, got {self.dtype}.")
        if self.train_length < 8 and self.tasks != ("text",):
            raise ValueError(f"--train-length must be 8 or more, got {self.train_length}.")
        if min(self.times, default=0) < 1:
            raise ValueError(f"--times must be 1 or more, got {min(self.times, default='none')}.")
        if self.width % (2 * self.heads):
            raise ValueError(f"--width must be a multiple of 2 × {self.heads}, got {self.width}.")
        if self.base == 0:
            object.__setattr__(self, "base", float(self.train_length))
        if not 1 < self.base < math.inf:
            raise ValueError(f"--base must be above 1, got {self.base:g}.")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"--learning-rate must be above 0, got {self.learning_rate:g}.")

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.width // self.heads

    @property
    def lengths(self) -> list[int]:
        """Tested lengths, in symbols."""
        return [self.train_length * times for times in self.times]

    @property
    def longest(self) -> int:
        """Positions a model must take."""
        return max(self.lengths)
