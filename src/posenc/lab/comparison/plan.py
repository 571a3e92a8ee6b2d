"""What a comparison trains and tests: the table of encodings, and the plan with all sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

from posenc.lab.pictures.biases import FAMILIES
from posenc.lab.pictures.show import RULES
from posenc.nn import ALiBi, CoPE, ForgetGate, LearnedPosEmbedding, RoPE, SinusoidalPE

QUICK = {"train_length": 32, "steps": 400, "width": 64, "layers": 2, "learning_rate": 2e-2}


@dataclass(frozen=True, slots=True)
class Encoding:
    """One line of the comparison."""

    label: str
    # How its module is called: module(x), module(q, k), module.attention(q, k, v), or, for gates,
    # module.attention(q, k, v, module(x)).
    acts_on: Literal["input", "queries and keys", "scores", "gates"]
    # Makes the module, for a plan and the length of the sequences.
    build: Callable[[Plan, int], nn.Module]
    # What happens to it past the training length.
    past: str
    # The encoding whose trained weights it is tested with, if not its own.
    trained_as: str | None = None


def _rope(label: str, past: str, rule: str | None = None) -> Encoding:
    """RoPE; with a scaling rule, its trained model under that rule past the training length."""

    def build(plan: Plan, length: int) -> nn.Module:
        factor = length / plan.train_length
        scaling = RULES[rule](factor, plan.train_length) if rule and factor > 1 else None
        sizes = plan.width // plan.heads, plan.longest, plan.base
        return RoPE(*sizes, interleaved=False, scaling=scaling)

    if rule is not None:
        past = f"RoPE's model, {past} length / training length."
    return Encoding(label, "queries and keys", build, past, "rope" if rule else None)


def _family(name: str, past: str) -> Encoding:
    """The relative bias that `posenc show` draws under this name; one for all layers."""
    label, _, make = FAMILIES[name]
    return Encoding(label, "scores", lambda plan, length: make(plan.heads, plan.train_length), past)


ENCODINGS = {
    "none": Encoding(
        "none", "input", lambda plan, length: nn.Identity(), "The causal mask alone tells order."
    ),
    "sinusoidal": Encoding(
        "sinusoidal",
        "input",
        lambda plan, length: SinusoidalPE(plan.longest, plan.width, base=plan.base),
        "The formula continues, to positions that the model was not trained on.",
    ),
    "learned": Encoding(
        "learned",
        "input",
        lambda plan, length: LearnedPosEmbedding(plan.longest, plan.width),
        "The table has rows for the longest test; rows past the training length were never "
        "trained, and have their initial values.",
    ),
    "rope": _rope("RoPE", "The pairs rotate on, to distances that the model was not trained on."),
    "rope-yarn": _rope("RoPE + YaRN", "tested with YaRN of factor", "yarn"),
    "rope-linear": _rope("RoPE + linear", "every pair slowed by", "linear"),
    "rope-ntk": _rope("RoPE + NTK", "its base raised for", "ntk"),
    "alibi": Encoding(
        "ALiBi", "scores", lambda plan, length: ALiBi(plan.heads), "The slopes stay as they are."
    ),
    "alibi-learned": Encoding(
        "ALiBi, learned",
        "scores",
        lambda plan, length: ALiBi(plan.heads, learned=True),
        "The slopes stay as they were trained.",
    ),
    "t5": _family("t5", "All farther keys are in the last bucket."),
    "learned-bias": _family("learned-bias", "All farther keys share the last trained number."),
    "kerple": _family("kerple", "The logarithm continues."),
    "sandwich": _family("sandwich", "The sum of cosines continues."),
    "fire": _family("fire", "Distances over the query's position stay in the trained range."),
    "forget-gate": Encoding(
        "forgetting gates",
        "gates",
        lambda plan, length: ForgetGate(plan.width, plan.heads),
        "The tokens go on to decide what is kept of those before them.",
    ),
    "cope": Encoding(
        "CoPE",
        "scores",
        lambda plan, length: CoPE(plan.width // plan.heads, plan.train_length),
        "Counts end at the training length, but gates need not count every token.",
    ),
}
COMPARED = ("none", "sinusoidal", "learned", "rope", "rope-yarn", "alibi")
# Okabe and Ito's colours, then Tol's, suit colour-blind readers; markers tell the lines apart
# without them.
_COLOURS = (
    "#8c8c8c #e69f00 #d55e00 #0072b2 #56b4e9 #cc79a7 #7d6bb0 #009e73 "
    "#44aa99 #332288 #882255 #117733 #999933 #cc6677 #aa4499 #ddcc77"
).split()
LOOKS = dict(zip(ENCODINGS, zip(_COLOURS, "os^Dv<>oPXs^*hpd", strict=True), strict=True))


class Unit(NamedTuple):
    """One training."""

    trains: str
    seed: int

    def __str__(self) -> str:
        return f"{self.trains}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the numbers of a comparison depend on, except the text.

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
    # Sums are rounded differently with another number of threads.
    threads: int = 1

    def __post_init__(self) -> None:
        for name in self.encodings or [""]:
            if name not in ENCODINGS:
                known = ", ".join(ENCODINGS)
                raise ValueError(f"--encodings must be among {known}; got {name or 'nothing'}.")
        if min(self.times) < 1:
            raise ValueError(f"--times must be 1 or more, got {min(self.times)}.")
        if self.width % (2 * self.heads):
            raise ValueError(f"--width must be a multiple of 2 × {self.heads}, got {self.width}.")
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
        """Trainings, seed by seed, so that a stopped run has every encoding of its first seeds."""
        trained = dict.fromkeys(ENCODINGS[name].trained_as or name for name in self.encodings)
        return [Unit(name, seed) for seed in range(self.seeds) for name in trained]
