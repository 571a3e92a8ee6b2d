"""Files that are whole or not there, whenever the process ends."""

from __future__ import annotations

import os
from pathlib import Path

from posenc._contract import files


def write(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``: under another name first, then renamed when it is on disk.

    A link at either name is replaced; what it leads to is left as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Always the same name, for the next write to take over what a killed one leaves.
    half = path.with_name(f".{path.name}.partial")
    half.unlink(missing_ok=True)
    try:
        with files.create(half) as file:
            file.write(content)
        os.replace(half, path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise
