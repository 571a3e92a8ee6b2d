"""Files that are whole or not there, whenever the process ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``: under another name first, then renamed when it is on disk.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "numbers.txt"
        >>> write(path, b"1 2 3")
        >>> path.read_bytes()
        b'1 2 3'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # One name for each target, so that a killed run leaves at most one, and the next takes it.
    half = path.with_name(f".{path.name}.partial")
    try:
        with half.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise
    # The name too must outlive a power cut. Not every system lets a folder be opened.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
