"""Read files that others wrote."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from posenc._contract import checks

# Bytes of a JSON file. The index of a model with 100 000 tensors has about a tenth of it.
LARGEST_JSON = 64 * 2**20


def open_regular(path: Path) -> BinaryIO:
    """Open a file, or what a link leads to, for reading; OSError if it is not a regular file."""
    # Without O_NONBLOCK, opening a named pipe waits for its writer. Windows has another flag.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise OSError(errno.EINVAL, "a folder, a pipe or a device, not a regular file", str(path))


def read_json(who: str, path: Path) -> dict[str, Any]:
    """The object in a JSON file; every error is a ValueError that names the file."""
    rule, hint = f"{path} must hold a JSON object", "Download the file again."
    try:
        with open_regular(path) as file:
            # Files of /proc, some of which have no end, say that they are empty.
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_JSON:
                raise OSError(errno.EFBIG, f"more than {LARGEST_JSON} bytes")
            content = json.loads(file.read(size))
    except OSError as error:
        reason = checks.printable(f"{who}: cannot read {path}: {error.strerror}")
        where = "Pass the path of a file, or a model's name on the hub (org/name)."
        raise ValueError(f"{reason}.\n  {where}") from error
    except (ValueError, RecursionError) as error:
        checks.fail(who, rule, f"text that is not JSON: {error}", hint)
    if not isinstance(content, dict):
        checks.fail(who, rule, checks.describe(content), hint)
    return content
