"""What a model type does where its config is silent: ``models.json``, by ``tools/configs``."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@functools.cache
def _rows() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("models.json").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = json.loads(text)["models"]
    return rows


def facts_of(model_type: Any) -> Mapping[str, Any]:
    """The row of a type, empty for one that is not known.

    Examples:
        >>> facts_of("phimoe")["rope_theta"], facts_of("phimo")
        (1000000.0, {})
    """
    return _rows().get(model_type, {}) if isinstance(model_type, str) else {}


def types_with(key: str) -> frozenset[str]:
    """The types whose rows have ``key``."""
    return frozenset(model_type for model_type, row in _rows().items() if key in row)
