"""Environments that the scripts of this folder make under build/, and commands run in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PYTHON = "Scripts/python.exe" if os.name == "nt" else "bin/python"


def environment(folder: Path) -> Path:
    """The Python of a virtual environment, which is made if it is not there or another Python's."""
    python = folder / _PYTHON
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    settings = folder / "pyvenv.cfg"
    if not settings.is_file() or f"version = {version}." not in settings.read_text():
        run(sys.executable, "-m", "venv", "--clear", folder)
    return python


def pip(python: Path, *arguments: str | Path) -> None:
    """Run pip of an environment."""
    run(python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def run(*command: str | Path, folder: Path = ROOT, **variables: str) -> None:
    """Run a command that must succeed, in a folder and with variables, and without PYTHONPATH."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(list(map(str, command)), cwd=folder, env=inherited | variables, check=True)
