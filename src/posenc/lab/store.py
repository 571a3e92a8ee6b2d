"""Files that are whole or not there, whenever the process ends."""

from __future__ import annotations

import os
from pathlib import Path

from posenc._contract import files


def partial(path: Path) -> Path:
    """The one name under which :func:`write` prepares ``path``, for the next to take over."""
    return path.with_name(f".{path.name}.partial")


def write(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``: under another name first, then renamed when it is on disk.

    A link at either name is replaced; what it leads to is left as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    half = partial(path)
    half.unlink(missing_ok=True)
    try:
        with files.create(half) as file:
            file.write(content)
        os.replace(half, path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise
