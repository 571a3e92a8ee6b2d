"""Files that are whole or not there, whenever the process ends."""

from __future__ import annotations

import os
from pathlib import Path

from posenc._contract import files


def partial(path: Path) -> Path:
    """The name under which :func:`write` prepares ``path``.

    There is one for each target, so a killed process leaves at most one, and the next takes it.
    """
    return path.with_name(f".{path.name}.partial")


def write(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``: under another name first, then renamed when it is on disk.

    A link at either name is replaced; what it leads to is left as it is.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "numbers.txt"
        >>> write(path, b"1 2 3")
        >>> path.read_bytes()
        b'1 2 3'
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
