"""Attention without a bias."""

from __future__ import annotations

from typing import Any, NamedTuple


class NoBias(NamedTuple):
    """No bias."""

    def is_valid(self, q: Any, k: Any, causal: bool) -> bool:
        """Whether the fields fit beyond their axes."""
        return True
