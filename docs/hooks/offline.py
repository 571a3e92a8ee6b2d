"""Nothing that a page loads may come from elsewhere: the manual is read without a network."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LOADED = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|url\(["']?((?:https?:)?//[^"')]+)|@import\s+["']((?:https?:)?//[^"']+)"""
)


def from_elsewhere(text: str) -> Iterator[str]:
    """What a page or a style sheet would load from another host.

    Examples:
        >>> list(from_elsewhere('<a href="https://a.org">x</a> <script src="//b.org/c.js">'))
        ['//b.org/c.js']
    """
    for found in _LOADED.finditer(text):
        yield next(filter(None, found.groups()))


def on_post_build(config: Any) -> None:
    """Refuse a site that would load something."""
    from mkdocs.exceptions import BuildError

    for path in sorted(Path(config.site_dir).rglob("*.*")):
        if path.suffix in (".html", ".css"):
            for address in from_elsewhere(path.read_text(encoding="utf-8")):
                raise BuildError(f"{path.name} would load {address}; the manual must load nothing.")
