"""The machine that numbers came from."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

_MODEL = re.compile(r"^model name\s*:(.+)$", re.IGNORECASE | re.MULTILINE)


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run with ``count`` CPU threads, or as many as torch has."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe() -> dict[str, str | int | None]:
    """Hardware and software that times depend on."""
    # A container often has fewer cores than the machine; macOS does not report them.
    given = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "cpu": _cpu(),
        "cores": given or os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu() -> str:
    """Model name from /proc/cpuinfo, or from lscpu, because ARM kernels do not report it."""
    known = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if not _MODEL.search(known) and shutil.which("lscpu"):
        known = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    found = _MODEL.search(known)
    return found[1].strip() if found else platform.processor() or platform.machine()
