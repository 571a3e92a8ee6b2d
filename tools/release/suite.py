"""The suite with a choice of torch, in an environment of its own: `suite.py oldest`.

`oldest` is the first torch that pyproject.toml takes, `newest` the newest of every package, and
`pinned` what constraints.txt says. Further arguments go to pytest.
"""

from __future__ import annotations

import re
import sys

from environment import ROOT, environment, pip, run

CHOICES = ("oldest", "pinned", "newest")


def constraints(choice: str) -> list[str]:
    """What pip is told in addition to what is installed."""
    if choice == "newest":
        return ["--upgrade", "--upgrade-strategy", "eager"]
    if choice == "pinned":
        return ["--constraint", "constraints.txt"]
    first = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert first is not None, "pyproject.toml does not say which torch is the oldest"
    return [f"torch=={first[1]}.*"]


def main(choice: str, *arguments: str) -> None:
    """Install posenc with what its tests need, and run them."""
    python = environment(ROOT / "build" / "suite" / choice)
    pip(python, "install", *constraints(choice), "--editable", ".[test]")
    run(python, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", "not slow", *arguments)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in CHOICES:
        raise SystemExit(f"suite.py: say which torch: {', '.join(CHOICES)}")
    main(*sys.argv[1:])
