"""Links of the manual and of the pages beside it that lead nowhere.

mkdocs checks the links of Markdown. These are those of the pages as built, with what hooks and
signatures wrote into them, and those of README.md and its neighbours.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_MARKDOWN = re.compile(r"\]\(([^)\s]+)\)")


class _Page(HTMLParser):
    """The links of a page, and the places that links may lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places = {"", "__search"}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the links and the places of an element."""
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


def dead_links_of_site(site: Path) -> list[str]:
    """Links between pages whose page or place does not exist."""
    pages = {path.resolve(): _Page(path) for path in sorted(site.rglob("*.html"))}
    dead = []
    for path, page in pages.items():
        # The page of a server for what it does not find links from the root of a host.
        for link in page.links if path.name != "404.html" else ():
            scheme, host, target, _, place = urlsplit(link)
            if scheme or host:
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            known = pages.get(file)
            if not file.is_file() or (known and unquote(place) not in known.places):
                dead.append(f"{path.relative_to(site.resolve())}: {link}")
    return dead


def dead_links_of_pages(root: Path) -> list[str]:
    """Links of the Markdown files in a folder to files that do not exist."""
    dead = []
    for page in sorted(root.glob("*.md")):
        for link in _MARKDOWN.findall(page.read_text(encoding="utf-8")):
            scheme, _, target, _, _ = urlsplit(link)
            if not scheme and target and not (root / target).is_file():
                dead.append(f"{page.name}: {link}")
    return dead
