"""Defaults of each model type: ``models.json``, which ``tools/configs`` writes."""

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
    """The defaults of a model type; empty for an unknown one."""
    return _rows().get(model_type, {}) if isinstance(model_type, str) else {}


def types_with(key: str) -> frozenset[str]:
    """The model types that have a default for ``key``."""
    return frozenset(model_type for model_type, row in _rows().items() if key in row)
