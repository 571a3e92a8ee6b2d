"""Text to train on: what every Python carries, or a file of the user's."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_HELD_OUT = 0.1


class Text(NamedTuple):
    """Bytes as symbols: each distinct byte is one.

    Attributes:
        name: Where it is from.
        train: int64 symbols of the first nine tenths.
        held: int64 symbols of the last tenth, that no model is trained on.
        symbols: How many distinct ones there are.
        sha256: Of the bytes, so that a run is never continued on others.
    """

    name: str
    train: Tensor
    held: Tensor
    symbols: int
    sha256: str


def load(file: Path | None = None) -> Text:
    """The text of ``file``, or of ``pydoc_data.topics`` from the standard library.

    Examples:
        >>> text = load()
        >>> text.name, len(text.train) > 100_000
        ('pydoc_data.topics', True)
    """
    content = _topics() if file is None else file.read_bytes()
    distinct, symbols = torch.unique(
        torch.frombuffer(bytearray(content or b"\n"), dtype=torch.uint8), return_inverse=True
    )
    cut = round(len(symbols) * (1 - _HELD_OUT))
    digest = hashlib.sha256(content).hexdigest()
    name = "pydoc_data.topics" if file is None else file.name
    return Text(name, symbols[:cut], symbols[cut:], len(distinct), digest)


def _topics() -> bytes:
    """Python's help, each paragraph once: topics quote each other, and a test must be unseen."""
    from pydoc_data.topics import topics

    parts = (part for topic in sorted(topics) for part in topics[topic].split("\n\n"))
    return "\n\n".join(dict.fromkeys(part.strip("\n") for part in parts)).encode()
