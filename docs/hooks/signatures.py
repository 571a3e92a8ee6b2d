"""The page of all public signatures, read from the library."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOMS = {
    "posenc": "Modules",
    "posenc.functional": "Functions",
    "posenc.attention": "Attention",
    "posenc.cache": "Caches",
    "posenc.positions": "Positions",
    "posenc.scaling": "Scaling rules",
    "posenc.axes": "Axes",
    "posenc.interop.huggingface": "Hugging Face models",
    "posenc.interop.checkpoints": "Checkpoints",
}


def signatures() -> Iterator[tuple[str, str, inspect.Signature]]:
    """The room, the name and the signature of everything public that is called."""
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in module.__all__:
            thing = getattr(module, name)
            is_error = inspect.isclass(thing) and issubclass(thing, Exception)
            if not callable(thing) or is_error:
                continue
            yield room, name, inspect.signature(thing)
            for method, function in inspect.getmembers(thing if inspect.isclass(thing) else None):
                if _is_public_method(thing, method, function):
                    yield room, f"{name}.{method}", inspect.signature(function)


def _is_public_method(owner: Any, name: str, function: Any) -> bool:
    """Whether a class of this library defines the method."""
    if name.startswith("_") or not (inspect.isfunction(function) or inspect.ismethod(function)):
        return False
    return any(name in c.__dict__ for c in owner.__mro__ if c.__module__.startswith("posenc"))


def written(name: str, signature: inspect.Signature) -> str:
    """A call as a user writes it, without types."""
    bare = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in signature.parameters.values()
        if p.name != "self"
    ]
    return name + str(inspect.Signature(bare))


def fill(markdown: str) -> str:
    """Put all signatures at the mark of the page."""
    parts: dict[str, list[str]] = {room: [] for room in ROOMS}
    for room, name, signature in signatures():
        parts[room].append(written(name, signature))
    blocks = [
        f"## {ROOMS[room]}\n\n`{room}`\n\n```python\n" + "\n".join(lines) + "\n```\n"
        for room, lines in parts.items()
    ]
    return markdown.replace("<!-- signatures -->", "\n".join(blocks))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill the page of signatures."""
    return fill(markdown) if page.file.src_uri == "api/signatures.md" else markdown


def on_post_build(config: Any) -> None:
    """Refuse a site in which something public has no entry, an inherited method for example."""
    from mkdocs.exceptions import BuildError

    pages = Path(config.site_dir, "api").glob("*.html")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    shown = set(re.findall(r'id="?(posenc[\w.]+)', text))
    for room, name, _ in signatures():
        if f"{room}.{name}" not in shown and not name.endswith(".extra_repr"):
            raise BuildError(f"{room}.{name} has no entry in the pages of docs/api.")
