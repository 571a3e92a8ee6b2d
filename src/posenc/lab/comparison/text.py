"""Text to train on: a file of the user's, or the built-in tales.

The tales are generated from the grammar in ``tales.txt``. Each invents a town and three people, who
keep their trade, their belonging and their place to its end. What was said of them early tells what
will be said later, so a longer context helps, and names that no other tale has can be learned only
from the context. Every choice is one step of a linear congruential generator, so the bytes are the
same everywhere.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SIZE = 2**19
# The constants are those of Knuth's MMIX; the state begins at 1.
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407


class Text(NamedTuple):
    """Bytes as int64 symbols, ``symbols`` distinct ones: nine tenths to train on, one held out."""

    name: str
    train: Tensor
    held: Tensor
    symbols: int
    # Of the bytes, so that a run is resumed only with the same text.
    sha256: str


def load(file: Path | None = None) -> Text:
    """The text of ``file``, or the built-in one."""
    content = tales() if file is None else file.read_bytes()
    symbols = torch.frombuffer(bytearray(content or b"\n"), dtype=torch.uint8)
    distinct, symbols = torch.unique(symbols, return_inverse=True)
    cut = round(0.9 * len(symbols))
    digest = hashlib.sha256(content).hexdigest()
    name = "the built-in tales" if file is None else file.name
    return Text(name, symbols[:cut], symbols[cut:], len(distinct), digest)


@lru_cache(maxsize=1)
def tales(size: int = SIZE) -> bytes:
    """The first ``size`` bytes of one tale after another; plain ASCII."""
    teller, text = _Teller(), bytearray()
    while len(text) < size:
        text += teller.tale().encode("ascii")
    return bytes(text[:size])


def _rules() -> dict[str, list[str]]:
    """The alternatives of each rule, by its name."""
    grammar = Path(__file__).with_name("tales.txt").read_text(encoding="ascii")
    joined = re.sub(r"\n +", " ", grammar)
    lines = [line.split(": ", 1) for line in joined.splitlines() if not line.startswith("#")]
    return {
        name: [each.strip() for each in body.split("|" if "|" in body else None)]
        for name, body in lines
    }


class _Teller:
    """Expands rules. ``facts`` are the words that stay the same to the end of a tale.

    ``{who}`` is one of the three people, by name or by trade; ``{other}`` is one of the two others.
    """

    def __init__(self) -> None:
        self.rules, self.state, self.subject = _rules(), 1, "A"
        self.facts: dict[str, str] = {}

    def below(self, count: int) -> int:
        """A number below ``count``, from the high bits: the low ones of such a generator repeat."""
        self.state = (self.state * _MULTIPLIER + _INCREMENT) % 2**64
        return (self.state >> 33) % count

    def expand(self, name: str) -> str:
        """The fact of that name, or one alternative of the rule, with its braces expanded."""
        if name == "who":
            self.subject = "ABC"[self.below(3)]
            name = (self.subject, f"{self.subject} title")[self.below(2)]
        elif name == "other":
            name = "ABC".replace(self.subject, "")[self.below(2)]
        if name in self.facts:
            return self.facts[name]
        alternatives = self.rules[name]
        chosen = alternatives[self.below(len(alternatives))]
        return re.sub(r"\{([\w ]+)\}", lambda slot: self.expand(slot[1]), chosen)

    def sentence(self, rule: str) -> str:
        """One sentence, with its capital letters and articles put right."""
        said = re.sub(r"\ba (?=[aeiou])", "an ", self.expand(rule))
        return re.sub(r'(^"?|[.?] "?)([a-z])', lambda start: start[1] + start[2].upper(), said)

    def tale(self) -> str:
        """Paragraphs about one town and three people."""
        self.facts = {}
        facts = {"town": self.expand("name") + self.expand("ending")}
        for person in "ABC":
            facts[person] = self.expand("name")
            for what in ("trade", "look", "noun", "place"):
                facts[f"{person} {what}"] = self.expand(what)
            facts[f"{person} title"] = f"the {facts[f'{person} trade']}"
        self.facts = facts
        paragraphs = [" ".join(map(self.sentence, ("opening", "meeting", "third")))]
        for _ in range(3 + self.below(4)):
            paragraphs.append(" ".join(self.sentence("line") for _ in range(2 + self.below(4))))
        return "\n".join([*paragraphs, self.sentence("closing")]) + "\n\n"
