"""The numbers of record: `python benchmarks/record.py NAME --device cuda`.

Runs every benchmark of the device, one after the other, and writes `record/NAME/*.json`, each with
the machine, the versions and the date. Then it writes the tables of README.md and of the manual
from these files, which `--pages` does without measuring. On an H200 all of it takes 11 minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import record_pages

HERE = Path(__file__).parent
PARTS = {
    "cuda": {
        "rotation": (
            "rotation.py", "h200-long", "h200-train", "h200-decode", "h200-qk-norm",
            "--dtype", "bf16", "--rounds", "7",
        ),
        "biases": ("biases.py",),
        "terms": ("terms.py", "--matrix", "4096"),
        "serving": ("serving.py",),
        "pope": ("pope.py", "--device", "cuda"),
        "calls": ("calls.py", "--device", "cuda"),
        "generate": ("calls.py", "--device", "cuda", "--generate", "--rounds", "7"),
    },
    "cpu": {
        "rotation-fp32-1t": ("rotation.py", "--device", "cpu", "--dtype", "fp32", "--threads", "1"),
        "rotation-bf16-1t": ("rotation.py", "--device", "cpu", "--dtype", "bf16", "--threads", "1"),
        "rotation-fp32-2t": ("rotation.py", "--device", "cpu", "--dtype", "fp32", "--threads", "2"),
        "rotation-bf16-2t": ("rotation.py", "--device", "cpu", "--dtype", "bf16", "--threads", "2"),
        "pope": ("pope.py", "--device", "cpu", "--threads", "2"),
        "calls": ("calls.py", "--device", "cpu"),
        "generate": ("calls.py", "--device", "cpu", "--generate"),
    },
}  # fmt: skip


def record(name: str, parts: dict[str, tuple[str, ...]]) -> list[str]:
    """Run ``parts`` into the folder of ``name``; those that failed."""
    folder, failed = HERE / "record" / name, []
    folder.mkdir(parents=True, exist_ok=True)
    for n, (part, (script, *options)) in enumerate(parts.items(), 1):
        print(f"[{n}/{len(parts)}] {part}: {script} {' '.join(options)}", flush=True)
        begin, path = time.perf_counter(), folder / f"{part}.json"
        command = [sys.executable, str(HERE / script), *options, "--json", str(path)]
        if subprocess.run(command).returncode:
            failed.append(part)
        print(f"[{n}/{len(parts)}] {part}: {time.perf_counter() - begin:.0f} s", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is asked for, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", help="of the machine: a folder of benchmarks/record")
    parser.add_argument("--device", choices=PARTS, default="cuda")
    parser.add_argument("--only", nargs="*", metavar="PART", help="measure only these")
    parser.add_argument("--pages", action="store_true", help="write the pages, measure nothing")
    given = parser.parse_args(arguments)
    if not given.pages:
        if given.name is None:
            parser.error("NAME of the machine must be given, for example h200")
        parts = PARTS[given.device]
        unknown = set(given.only or ()) - set(parts)
        if unknown:
            parser.error(f"PART must be one of {', '.join(parts)}, got {', '.join(unknown)}")
        chosen = {part: how for part, how in parts.items() if part in (given.only or parts)}
        if failed := record(given.name, chosen):
            sys.exit(f"failed: {', '.join(failed)}")
    for path in record_pages.write():
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
