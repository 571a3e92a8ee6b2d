"""Read files that others wrote, with limits on their kind and size."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from posenc._contract import checks

# More bytes than any config, index or list of results has.
LARGEST_JSON = 100_000_000


def open_regular(who: str, path: Path) -> BinaryIO:
    """Open ``path`` for reading, if it is a regular file: no device, pipe or folder."""
    # Opening a pipe would wait for its writer, and a device may have no end.
    if os.path.exists(path) and not os.path.isfile(path):
        rule, got = f"{path} must be a regular file", "a device, a pipe or a folder"
        checks.fail(who, rule, got, "Copy its content into a file first.")
    return open(path, "rb")


def read_json(who: str, path: Path) -> dict[str, Any]:
    """The object in a JSON file; every error is a ValueError that names the file."""
    try:
        with open_regular(who, path) as file:
            size = os.fstat(file.fileno()).st_size
            text = file.read(size) if size <= LARGEST_JSON else b""
    except OSError as wrong:
        reason = checks.printable(f"{who}: cannot read {path}: {wrong.strerror}")
        hint = "Pass the path of a file on this machine: nothing is downloaded."
        raise ValueError(f"{reason}.\n  {hint}") from wrong
    if size > LARGEST_JSON:
        rule = f"{path} must have at most {LARGEST_JSON} bytes"
        checks.fail(who, rule, size, "Pass a config.json or an index.")
    try:
        return _parse_json(text)
    except ValueError as wrong:
        checks.fail(who, f"{path} must hold a JSON object", wrong, "Download the file again.")


def _parse_json(text: bytes) -> dict[str, Any]:
    """The JSON object in ``text``; every error is a ValueError that says what it is instead."""
    try:
        found = json.loads(text)
        # Half of a surrogate pair can be neither printed nor written.
        json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("lists or dicts that are nested too deep") from None
    except UnicodeEncodeError:
        raise ValueError("text with half of a surrogate pair, which is no character") from None
    except ValueError as wrong:
        raise ValueError(f"text that is not JSON ({wrong})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{checks.describe(found)}, which is not a JSON object")
    return found
