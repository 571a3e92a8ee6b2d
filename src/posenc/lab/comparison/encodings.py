"""The encodings that are compared: what each is trained as, and how it goes past that length."""

from __future__ import annotations

from dataclasses import dataclass

from posenc.lab.pictures.show import RULES, RuleFor


@dataclass(frozen=True, slots=True)
class Encoding:
    """One line of the comparison.

    Attributes:
        name: As on the command line.
        label: As in pictures.
        trains: The encoding it is trained as; several may share one training.
        past: What happens to it past the training length.
        stretch: The scaling rule it is tested with, if any.
    """

    name: str
    label: str
    trains: str
    past: str
    stretch: RuleFor | None = None


ENCODINGS = {
    encoding.name: encoding
    for encoding in (
        Encoding("none", "none", "none", "The causal mask alone tells where a token is."),
        Encoding(
            "sinusoidal", "sinusoidal", "sinusoidal", "The formula goes on; no model saw it there."
        ),
        Encoding(
            "learned",
            "learned",
            "learned",
            "The table has rows for the longest test, and the later ones were never trained: "
            "they are as LearnedPosEmbedding made them.",
        ),
        Encoding(
            "rope", "RoPE", "rope", "The pairs turn on, to distances that no model was trained on."
        ),
        Encoding(
            "rope-yarn",
            "RoPE + YaRN",
            "rope",
            "RoPE's model, tested with YaRN of factor length / training length.",
            RULES["yarn"],
        ),
        Encoding(
            "rope-linear",
            "RoPE + linear",
            "rope",
            "RoPE's model, every pair slowed by length / training length.",
            RULES["linear"],
        ),
        Encoding(
            "rope-ntk",
            "RoPE + NTK",
            "rope",
            "RoPE's model, its base raised for length / training length.",
            RULES["ntk"],
        ),
        Encoding("alibi", "ALiBi", "alibi", "The same slopes over longer distances."),
    )
}
COMPARED = ("none", "sinusoidal", "learned", "rope", "rope-yarn", "alibi")
