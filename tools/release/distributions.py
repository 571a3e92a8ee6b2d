"""The source distribution, and the wheel for platforms without one of their own, into dist/.

`python tools/release/distributions.py` builds them from the files that git tracks, so that nothing
left over from an earlier build is in them. The wheels with the C extension are cibuildwheel's.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from environment import ROOT, environment, pip, run

BUILD = ROOT / "build" / "release"


def tools() -> Path:
    """The Python of the environment with the packages of requirements.txt."""
    python = environment(BUILD / "tools")
    pip(python, "install", "--requirement", Path(__file__).with_name("requirements.txt"))
    return python


def tracked_files(folder: Path) -> Path:
    """A new copy of the files that git tracks, as they are now."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def build(python: Path, source: Path, out: Path, kind: str, extension: str = "required") -> Path:
    """Build a wheel or an sdist, in an environment without torch; return the file in `out`."""
    shutil.rmtree(out, ignore_errors=True)
    run(
        *(python, "-m", "build", f"--{kind}", "--outdir", out, source),
        folder=BUILD,
        POSENC_EXTENSION=extension,
    )
    (built,) = out.iterdir()
    return built


def main() -> None:
    """Build both."""
    python, source = tools(), tracked_files(BUILD / "source")
    (ROOT / "dist").mkdir(exist_ok=True)
    for kind in ("sdist", "wheel"):
        built = build(python, source, BUILD / kind, kind, extension="none")
        print(shutil.copy(built, ROOT / "dist"))


if __name__ == "__main__":
    main()
