"""Read JSON files that others wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posenc._contract import checks


def read_json(who: str, path: Path) -> dict[str, Any]:
    """The object in a JSON file; every error is a ValueError that names the file."""
    rule, hint = f"{path} must hold a JSON object", "Download the file again."
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        reason = checks.printable(f"{who}: cannot read {path}: {error.strerror}")
        where = "Pass the path of a file, or a model's name on the hub (org/name)."
        raise ValueError(f"{reason}.\n  {where}") from error
    except (ValueError, RecursionError) as error:
        checks.fail(who, rule, f"text that is not JSON: {error}", hint)
    if not isinstance(content, dict):
        checks.fail(who, rule, checks.describe(content), hint)
    return content
