"""Keys that somebody mistyped."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


def is_slip(key: str, meant: str) -> bool:
    """Whether one letter is wrong, missing or too many, or two are swapped; not at the ends."""
    if abs(len(key) - len(meant)) > 1 or meant in key or key in meant:
        return False
    if len(key) == len(meant):
        apart = [i for i, (a, b) in enumerate(zip(key, meant, strict=True)) if a != b]
        swapped = sorted(key) == sorted(meant) and len(apart) == 2
        return swapped or len(apart) == 1
    short, long = sorted((key, meant), key=len)
    return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))


def nearest(key: object, known: Sequence[str]) -> str | None:
    """The known key that was probably meant."""
    near = get_close_matches(str(key), known, 1)
    return near[0] if near else None
