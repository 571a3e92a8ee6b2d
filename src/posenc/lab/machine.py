"""The machine that numbers came from."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch


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
    """What a reader needs to judge a time by."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu(),
        "cores": cores(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def cores() -> int:
    """Cores that this process may use."""
    # A container is often given fewer cores than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    """Model name as the kernel gives it; lscpu knows the names that ARM kernels do not."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    if not any(line.lower().startswith("model name") for line in lines) and shutil.which("lscpu"):
        lines = subprocess.run(["lscpu"], capture_output=True, text=True).stdout.splitlines()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
