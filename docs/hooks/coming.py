"""Pages that are still being written: left out of the navigation, and links to them are words."""

import re
from pathlib import Path
from typing import Any

COMING = ("alibi.md", "models.md", "beyond-one-device.md")
_LINK = re.compile(r"\[(?P<words>[^\]]*)\]\((?:\.\./)*(?P<page>[\w-]+\.md)(?:#[\w-]*)?\)")


def missing(docs: Path) -> set[str]:
    """Those of them that are not there yet."""
    return {page for page in COMING if not (docs / page).exists()}


def without(nav: list[Any], pages: set[str]) -> list[Any]:
    """A navigation that leaves ``pages`` out.

    Examples:
        >>> without([{"A": "a.md"}, {"More": [{"B": "b.md"}, {"C": "c.md"}]}], {"b.md"})
        [{'A': 'a.md'}, {'More': [{'C': 'c.md'}]}]
    """
    kept: list[Any] = []
    for entry in nav:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            kept.append({title: without(target, pages)})
        elif target not in pages:
            kept.append(entry)
    return kept


def on_config(config: Any) -> None:
    """Leave missing pages out of the navigation."""
    config.nav = without(config.nav, missing(Path(config.docs_dir)))


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Turn links to missing pages into their words."""
    gone = missing(Path(config.docs_dir))
    return _LINK.sub(
        lambda found: found["words"] if found["page"] in gone else found.group(), markdown
    )
