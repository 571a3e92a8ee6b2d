"""What a decoder learns: text, or one of two games that a seeded generator makes.

Both games have a string of distinct letters, blanks, and a question about the string at the end.
The longer the sequence, the more blanks are between them; the string and the question stay the
same. So a decoder that fails on a longer sequence does so only because of the distance.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.text import Text, load

# The target that cross_entropy leaves out.
IGNORED = -100
# Seeds of trainings are smaller.
_TEST_SEED = 2**40


class Batch(NamedTuple):
    """Tokens ``(B, L)``, and what should follow each of them, or :data:`IGNORED`."""

    tokens: Tensor
    targets: Tensor


class Reading:
    """The next symbol of a text, at every position."""

    # What a report says of the task; what is measured, and whether less of it is better.
    label, measure, lower_is_better = "text", "nats per symbol", True
    about = (
        "Predict the next symbol of a text. The loss is that of the last symbols, as many as in "
        "training: the same symbols at every length, with more before them."
    )

    def __init__(self, text: Text) -> None:
        self.text, self.symbols = text, text.symbols

    @classmethod
    def load(cls, plan: Plan) -> Reading:
        """The text of a plan, if it is long enough."""
        text = load(None if plan.text is None else Path(plan.text))
        if len(text.held) <= plan.longest:
            raise ValueError(
                f"{text.name} is too short: its last tenth has {len(text.held)} bytes, and "
                f"{plan.longest + 1} are needed to test a length of {plan.longest}; lower --times."
            )
        return cls(text)

    def training(self, plan: Plan, seed: int) -> Iterator[Batch]:
        """A batch for each step: windows of the text that begin at random places."""
        generator = torch.Generator().manual_seed(seed)
        window = torch.arange(plan.train_length + 1)
        starts = len(self.text.train) - plan.train_length
        for _ in range(plan.steps):
            first = torch.randint(0, starts, (plan.batch, 1), generator=generator)
            yield _shifted(self.text.train[first + window])

    def testing(self, plan: Plan, length: int) -> Batch:
        """Windows that end at the same places of the text for every length and every seed.

        So the last ``train_length`` symbols are the same at every length, and only the context
        before them grows.
        """
        ends = torch.linspace(plan.longest, len(self.text.held) - 1, plan.windows).long()
        return _shifted(self.text.held[ends[:, None] + torch.arange(-length, 1)])


class Game:
    """A string of letters, blanks, and a question.

    The string has eight of sixteen letters, or fewer if the training length is below 32. In
    training it begins anywhere before the question, in tests at the first position.
    """

    label: str
    about: str
    measure, lower_is_better = "accuracy", False

    def __init__(self, plan: Plan) -> None:
        self.size = min(8, plan.train_length // 4)
        self.letters = self.blank = 2 * self.size
        # The blank, and two signs of questions.
        self.symbols = self.letters + 3

    @classmethod
    def load(cls, plan: Plan) -> Game:
        """The game of a plan."""
        return cls(plan)

    def training(self, plan: Plan, seed: int) -> Iterator[Batch]:
        """New strings and questions at each step."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(plan.steps):
            yield self._draw(plan.batch, plan.train_length, generator, far=False)

    def testing(self, plan: Plan, length: int) -> Batch:
        """The same strings and questions at every length, as far apart as it allows."""
        generator = torch.Generator().manual_seed(_TEST_SEED)
        return self._draw(plan.windows, length, generator, far=True)

    def _ask(self, string: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The tokens of a question about strings ``(B, S)``, and which of them are to be found."""
        raise NotImplementedError

    def _draw(self, rows: int, length: int, generator: torch.Generator, *, far: bool) -> Batch:
        order = torch.rand(rows, self.letters, generator=generator).argsort(dim=1)
        string = order[:, : self.size]
        question, asked = self._ask(string, generator)
        # One more token than the length: what should follow the last.
        tokens = torch.full((rows, length + 1), self.blank)
        tokens[:, -question.shape[1] :] = question
        room = length + 2 - question.shape[1] - self.size
        begins = torch.zeros(rows, 1, dtype=torch.long)
        if not far:
            begins = torch.randint(0, room, (rows, 1), generator=generator)
        tokens.scatter_(1, begins + torch.arange(self.size), string)
        batch = _shifted(tokens)
        batch.targets[:, : -asked.shape[1]] = IGNORED
        batch.targets[:, -asked.shape[1] :].masked_fill_(~asked, IGNORED)
        return batch


class Copy(Game):
    """A sign, and the whole string again."""

    label = "copying at a distance"
    about = (
        "Repeat a string of distinct letters after blanks. Each letter is found by the one before "
        "it, at a distance that grows with the length."
    )

    def _ask(self, string: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        question = torch.nn.functional.pad(string, (1, 0), value=self.blank + 1)
        asked = torch.ones_like(question, dtype=torch.bool)
        asked[:, 0] = False
        return question, asked


class Index(Game):
    """Twice: a sign, a letter, and those after it, or for the other sign those before it."""

    label = "indexing by content and position"
    about = (
        "Given a letter of a string and a direction, name its neighbours one by one: each letter "
        "is found by what it is, and the next by where it is. After the indirect indexing of "
        "Gopalakrishnan et al., 2025, with shifts of one only, and blanks before the question."
    )

    def _ask(self, string: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows, size = string.shape
        steps, walks = size // 2, 2
        backwards = torch.randint(0, 2, (rows, walks, 1), generator=generator)
        first = torch.randint(0, size - steps, (rows, walks, 1), generator=generator)
        places = first + torch.arange(steps + 1)
        places = torch.where(backwards > 0, size - 1 - places, places)
        letters = string.gather(1, places.flatten(1)).view_as(places)
        asked = torch.tensor([False] * 2 + [True] * steps).repeat(rows, walks)
        return torch.cat([self.blank + 1 + backwards, letters], dim=2).flatten(1), asked


def _shifted(tokens: Tensor) -> Batch:
    """Predict each next token of ``(B, L + 1)``."""
    return Batch(tokens[:, :-1], tokens[:, 1:].clone())


Data: TypeAlias = Reading | Game
TASKS: dict[str, type[Data]] = {"text": Reading, "copy": Copy, "index": Index}
