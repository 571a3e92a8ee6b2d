"""The encodings that are compared: an entry of the table adds one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Literal

from torch import nn

from posenc.lab.pictures.show import RULES
from posenc.nn import ALiBi, LearnedPosEmbedding, RoPE, SinusoidalPE

if TYPE_CHECKING:
    from posenc.lab.comparison.plan import Plan


@dataclass(frozen=True, slots=True)
class Encoding:
    """One line of the comparison."""

    label: str
    # What its module takes: module(x), module(q, k), or module.attention(q, k, v).
    acts_on: Literal["input", "queries and keys", "scores"]
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


ENCODINGS = {
    "none": Encoding(
        "none", "input", lambda plan, length: nn.Identity(), "The causal mask alone tells order."
    ),
    "sinusoidal": Encoding(
        "sinusoidal",
        "input",
        lambda plan, length: SinusoidalPE(plan.longest, plan.width, base=plan.base),
        "The formula goes on; no model saw it there.",
    ),
    "learned": Encoding(
        "learned",
        "input",
        lambda plan, length: LearnedPosEmbedding(plan.longest, plan.width),
        "The table has rows for the longest test, and the later ones were never trained: "
        "they are as LearnedPosEmbedding made them.",
    ),
    "rope": _rope("RoPE", "The pairs rotate on, to distances that no model was trained on."),
    "rope-yarn": _rope("RoPE + YaRN", "tested with YaRN of factor", "yarn"),
    "rope-linear": _rope("RoPE + linear", "every pair slowed by", "linear"),
    "rope-ntk": _rope("RoPE + NTK", "its base raised for", "ntk"),
    "alibi": Encoding(
        "ALiBi", "scores", lambda plan, length: ALiBi(plan.heads), "The slopes stay as they are."
    ),
}
COMPARED = ("none", "sinusoidal", "learned", "rope", "rope-yarn", "alibi")
# Okabe and Ito's colours and a grey differ for every eye; with markers, colour is never alone.
_COLOURS = "#8c8c8c #e69f00 #d55e00 #0072b2 #56b4e9 #cc79a7 #7d6bb0 #009e73".split()
LOOKS = {
    name: (colour, marker)
    for name, colour, marker in zip(ENCODINGS, cycle(_COLOURS), cycle("os^Dv<>oPX*"), strict=False)
}
