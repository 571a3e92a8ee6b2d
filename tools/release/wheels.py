"""The wheels with the C extension for this platform, into dist/: `python tools/release/wheels.py`.

cibuildwheel builds them as pyproject.toml says; on Linux that needs Docker. Further arguments go to
it, for example --print-build-identifiers.
"""

from __future__ import annotations

import sys

from environment import ROOT, environment, pip, run

CIBUILDWHEEL = "cibuildwheel==4.3.3"

if __name__ == "__main__":
    python = environment(ROOT / "build" / "release" / "cibuildwheel")
    pip(python, "install", CIBUILDWHEEL)
    run(python, "-m", "cibuildwheel", "--output-dir", "dist", *sys.argv[1:])
