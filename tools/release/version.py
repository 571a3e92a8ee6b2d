"""The version is the same in pyproject.toml, the changelog and CITATION.cff: `version.py`.

`version.py v0.1.0` also compares it with a tag, for which the changelog must have a date and
pyproject.toml the addresses of the project.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = {
    "pyproject.toml": r'version = "(.+)"',
    "CITATION.cff": r'version: "?([^"\s]+)"?',
    "CHANGELOG.md": r"## (\S+).*",
}


URLS = r'^\[project\.urls\]\n(?:[^\[\n]*\n)*?(?:Repository|Source) = "https://'


def versions(root: Path = ROOT) -> dict[str, str]:
    """What each file says; of the changelog, the first heading."""
    found = {}
    for name, line in PLACES.items():
        match = re.search(f"^{line}$", (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        found[name] = match[1] if match else "no version"
    return found


def problem(root: Path = ROOT, tag: str | None = None) -> str | None:
    """Why a release must not be made, or None."""
    found = versions(root)
    if len(set(found.values())) > 1:
        return f"the versions differ: {found}. Set them to that of pyproject.toml."
    version = found["pyproject.toml"]
    if tag is None:
        return None
    if tag != f"v{version}":
        return f"the tag is {tag}, the version {version}. Name the tag v{version}."
    return unready(root)


def unready(root: Path = ROOT) -> str | None:
    """What a release needs and an untagged tree may lack, or None."""
    version = versions(root)["pyproject.toml"]
    dated = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$"
    if not re.search(dated, (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE):
        return f"CHANGELOG.md has no date. Write its heading as ## {version} (YEAR-MONTH-DAY)."
    if not re.search(URLS, (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE):
        return (
            "pyproject.toml does not say where the project is. Add [project.urls] with "
            'Repository = "https://…", and repository-code to CITATION.cff.'
        )
    return None


if __name__ == "__main__":
    why = problem(tag=sys.argv[1] if len(sys.argv) > 1 else None)
    if why:
        raise SystemExit(f"version.py: {why}")
    print(f"version {versions()['pyproject.toml']}")
