"""The smoke test of wheels, each in an environment with torch only: `install.py`.

It takes the wheels that are named, or those of dist/.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from environment import ROOT, environment, pip, run

FOLDER = ROOT / "build" / "release" / "torch-only"


def try_wheel(wheel: Path) -> None:
    """Install a wheel, run the smoke test from outside the checkout, and uninstall it."""
    python = environment(FOLDER)
    pip(python, "install", "--constraint", ROOT / "constraints.txt", "torch")
    pip(python, "install", "--force-reinstall", "--no-deps", wheel)
    # What the wheel says that it needs is there: torch is enough.
    pip(python, "check")
    smoke = shutil.copy(Path(__file__).with_name("smoke.py"), FOLDER)
    run(python, smoke, "pure" if wheel.name.endswith("-none-any.whl") else "c", folder=FOLDER)
    pip(python, "uninstall", "--yes", "posenc")


if __name__ == "__main__":
    wheels = [Path(name).resolve() for name in sys.argv[1:]] or [*(ROOT / "dist").glob("*.whl")]
    if not wheels:
        raise SystemExit(
            "install.py: there is no wheel in dist: run tools/release/distributions.py"
        )
    for each in wheels:
        try_wheel(each)
