"""The table of encodings that can be compared: one entry for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

import posenc
from posenc.lab.comparison import own
from posenc.lab.comparison.plan import Plan
from posenc.lab.show import FAMILIES, RULES


@dataclass(frozen=True, slots=True)
class Encoding:
    """One line of the comparison."""

    label: str
    # How its module is called: module(x); module(q, k), whose results may have another width;
    # module(q, k, v); or, for gates, module(q, k, v, x). Own: as the module's `acts_on` says.
    acts_on: Literal["input", "queries and keys", "scores", "gates", "own"]
    # Builds the module, for a plan and the length of the sequences.
    build: Callable[[Plan, int], nn.Module]
    # What the encoding does past the training length.
    past: str
    # For an encoding that is applied to a trained model: the one the model was trained with.
    trained_as: str | None = None
    # Steps of further training with the new encoding, as a fraction of those before.
    recalibration: float = 0.0
    # Every how many layers one has no encoding; 0 if all have one.
    skips: int = 0

    def acts_in(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has the encoding."""
        return not self.skips or (layer + 1) % self.skips > 0

    @property
    def how(self) -> str:
        """Whether the encoding is trained, or applied afterwards, in words."""
        if self.trained_as is None:
            return "trained"
        applied = f"applied to {ENCODINGS[self.trained_as].label}'s model"
        return f"{applied}, then trained further" if self.recalibration else applied


def _rope(
    label: str, past: str, rule: str | None = None, *, part: int = 1, skips: int = 0
) -> Encoding:
    """RoPE of one ``part`` of the channels; or with a rule, past the training length."""

    def build(plan: Plan, length: int) -> nn.Module:
        factor = length / plan.train_length
        scaling = RULES[rule](factor, plan.train_length) if rule and factor > 1 else None
        sizes = plan.head_dim, plan.longest, plan.base
        rotated = max(2, plan.head_dim // part // 2 * 2)
        return posenc.RoPE(*sizes, interleaved=False, scaling=scaling, rotary_dim=rotated)

    if rule is not None:
        past = f"RoPE's model, {past} length / training length."
    return Encoding(label, "queries and keys", build, past, "rope" if rule else None, skips=skips)


def _xpos(plan: Plan, length: int) -> nn.Module:
    # Half the training length is the paper's ratio. float32 holds the scales of 88 times it.
    decay = max(plan.train_length / 2, plan.longest / 88)
    return posenc.XPos(
        plan.head_dim, max_seq_len=plan.longest, base=plan.base, scale_base=decay, interleaved=False
    )


def _learned_rates(kind: type[posenc.MixedRoPE], plan: Plan) -> nn.Module:
    heads, base = plan.heads, plan.base
    return kind(plan.head_dim, num_kv_heads=heads, coordinates=1, base=base, interleaved=False)


def _self_extend(plan: Plan, length: int) -> nn.Module:
    rope, window = _plain_rope(plan), plan.train_length // 2
    # The last position of the farthest group is one that was trained.
    group = max(1, -((window - length) // (plan.train_length - window)))
    return posenc.SelfExtend(rope, group=group, window=window)


def _dual_chunk(plan: Plan, length: int) -> nn.Module:
    window = plan.train_length // 4
    return posenc.DualChunk(_plain_rope(plan), chunk=plan.train_length - window, window=window)


def _plain_rope(plan: Plan) -> posenc.RoPE:
    return posenc.RoPE(plan.head_dim, plan.longest, plan.base, interleaved=False)


def _family(name: str, past: str) -> Encoding:
    """The relative bias that `posenc show` draws under this name; one for all layers."""
    family = FAMILIES[name]
    return Encoding(
        family.label,
        "scores",
        lambda plan, length: family.make(plan.heads, plan.head_dim, plan.train_length),
        past,
    )


def find(name: str) -> Encoding:
    """The encoding of this name; a file of the user's is executed when its module is built."""
    if not own.is_own(name):
        return ENCODINGS[name]
    past = f"A class of {name.rpartition(':')[0]}."
    return Encoding(own.label(name), "own", lambda plan, length: own.Own(name, plan), past)


def trained_with(name: str) -> str:
    """The encoding that the model for the tests of this one is trained with."""
    return find(name).trained_as or name


ENCODINGS = {
    "none": Encoding(
        "none", "input", lambda plan, length: nn.Identity(), "Only the causal mask tells order."
    ),
    "sinusoidal": Encoding(
        "sinusoidal",
        "input",
        lambda plan, length: posenc.SinusoidalPE(plan.longest, plan.width, base=plan.base),
        "The formula continues, to positions that the model was not trained on.",
    ),
    "learned": Encoding(
        "learned",
        "input",
        lambda plan, length: posenc.LearnedPosEmbedding(plan.longest, plan.width),
        "The table has rows for the longest test; rows past the training length were never "
        "trained, and have their initial values.",
    ),
    "rope": _rope("RoPE", "The pairs rotate on, to distances that the model was not trained on."),
    "rope-yarn": _rope("RoPE + YaRN", "tested with YaRN of factor", "yarn"),
    "rope-linear": _rope("RoPE + linear", "every pair slowed by", "linear"),
    "rope-ntk": _rope("RoPE + NTK", "its base raised for", "ntk"),
    "rope-llama3": _rope("RoPE + Llama 3", "its slow pairs slowed by", "llama3"),
    "drope": Encoding(
        "DroPE",
        "input",
        lambda plan, length: nn.Identity(),
        "RoPE's model, trained on for a tenth of the steps without any rotation.",
        trained_as="rope",
        recalibration=0.1,
    ),
    "self-extend": Encoding(
        "Self-Extend",
        "scores",
        _self_extend,
        "RoPE's model; positions farther than half of the training length are shared in groups.",
        trained_as="rope",
    ),
    "dual-chunk": Encoding(
        "Dual Chunk",
        "scores",
        _dual_chunk,
        "RoPE's model; positions are counted in chunks, so none is past the training length.",
        trained_as="rope",
    ),
    "rope-half": _rope("RoPE, half", "Half of the channels rotate on; the rest never did.", part=2),
    "rope-nope": _rope("RoPE, NoPE", "As RoPE; every second layer has no encoding.", skips=2),
    "rope-learned": Encoding(
        "RoPE, learned rates",
        "queries and keys",
        lambda plan, length: _learned_rates(posenc.MixedRoPE, plan),
        "The pairs of each head rotate on, as fast as was learned.",
    ),
    "string": Encoding(
        "STRING",
        "queries and keys",
        lambda plan, length: _learned_rates(posenc.STRING, plan),
        "The planes of each head rotate on, as they were learned.",
    ),
    "pope": Encoding(
        "PoPE",
        "queries and keys",
        lambda plan, length: posenc.PoPE(
            plan.head_dim, num_kv_heads=plan.heads, max_seq_len=plan.longest, base=plan.base
        ),
        "The angles go on, to distances that the model was not trained on.",
    ),
    "xpos": Encoding("xPos", "queries and keys", _xpos, "Rotation and decay continue."),
    "alibi": _family("alibi", "The slopes stay as they are."),
    "alibi-learned": Encoding(
        "ALiBi, learned",
        "scores",
        lambda plan, length: posenc.ALiBi(plan.heads, learned=True),
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
        lambda plan, length: posenc.ForgetGate(plan.heads, embed_dim=plan.width),
        "The tokens go on to decide what is kept of those before them.",
    ),
    "cope": Encoding(
        "CoPE",
        "scores",
        lambda plan, length: posenc.CoPE(plan.head_dim, max_pos=plan.train_length),
        "Counts end at the training length, but gates need not count every token.",
    ),
    "relative-keys": _family("relative-keys", "All farther keys share the last trained vector."),
    "transformer-xl": Encoding(
        "Transformer-XL",
        "scores",
        lambda plan, length: posenc.TransformerXLBias(
            plan.heads, embed_dim=plan.width, base=plan.base
        ),
        "The sinusoid of the distance continues.",
    ),
    "deberta": Encoding(
        "DeBERTa",
        "scores",
        lambda plan, length: posenc.DeBERTaBias(
            plan.heads,
            head_dim=plan.head_dim,
            max_relative_positions=plan.train_length,
            causal=True,
        ),
        "All farther keys share the last trained vectors.",
    ),
}
