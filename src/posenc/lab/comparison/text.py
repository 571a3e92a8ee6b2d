"""Text to train on: the built-in tales, or a file of the user's."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from posenc.lab.comparison.tales import tales

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
    """The text of ``file``, or the built-in one.

    Examples:
        >>> text = load()
        >>> text.name, len(text.train), len(text.held)
        ('the built-in tales', 471859, 52429)
    """
    content = tales() if file is None else _bytes(file)
    distinct, symbols = torch.unique(
        torch.frombuffer(bytearray(content or b"\n"), dtype=torch.uint8), return_inverse=True
    )
    cut = round(len(symbols) * (1 - _HELD_OUT))
    digest = hashlib.sha256(content).hexdigest()
    name = "the built-in tales" if file is None else file.name
    return Text(name, symbols[:cut], symbols[cut:], len(distinct), digest)


def _bytes(file: Path) -> bytes:
    # A device or a pipe may have no end, and a run that goes on must find the same text again.
    if file.exists() and not file.is_file():
        raise ValueError(f"--text {file} is not a regular file: copy the text into one.")
    return file.read_bytes()
