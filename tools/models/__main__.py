"""Which models of the installed transformers run on our rotation: builds, drives and compares each.

    python tools/models                   # every rotary folder that has no result yet
    python tools/models llama sam2_video  # these, afresh, with what went wrong

Each folder has a process of its own, with a limit on its time. Results are kept in
``build/models``, by version, and ``docs/models.md`` is written from them once there is one for
every folder. Nothing is downloaded. About five minutes on two cores.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

# Read when transformers is first imported: with the kernels package it wraps functions in modules,
# and calls of these are not seen here.
os.environ.setdefault("USE_HUB_KERNELS", "NO")

import study
import table
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "models" / transformers.__version__
PAGE = ROOT / "docs" / "models.md"
SECONDS = 240


def main() -> None:
    """Study the folders that are asked for, or every one that was not studied yet."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    asked, known = sys.argv[1:], study.folders()
    if unknown := set(asked) - set(known):
        sys.exit(f"No rotary folder of transformers: {', '.join(sorted(unknown))}.\n\n{__doc__}")
    KEPT.mkdir(parents=True, exist_ok=True)
    todo = asked or [f for f in known if not (KEPT / f"{f}.json").exists()]
    with ThreadPoolExecutor(2) as pool:
        for number, result in enumerate(pool.map(partial(_apart, known), todo), 1):
            print(f"{number}/{len(todo)} {result['folder']}: {table.verdict(result)}", flush=True)
            for line in result["trouble"] if asked else ():
                print("    ", line)
    results = [json.loads(p.read_text()) for f in known if (p := KEPT / f"{f}.json").exists()]
    if len(results) == len(known):
        PAGE.write_text(table.page(results))
        print(f"{table.summary(results)} Written to {PAGE.relative_to(ROOT)}.")


def _apart(known: dict[str, list[str]], folder: str) -> dict[str, Any]:
    """Study a folder in a process of its own, so that its end is not ours."""
    path = KEPT / f"{folder}.json"
    path.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(
        target=_keep, args=(path, folder, known[folder])
    )
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    if not path.exists():
        said = f"took more than {SECONDS} s" if process.exitcode == -9 else "crashed"
        path.write_text(json.dumps({"folder": folder, "driven": [], "need": [], "trouble": [said]}))
    return json.loads(path.read_text())


def _keep(path: Path, folder: str, modules: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30,) * 2)
    try:
        result = study.study(folder, modules)
    except Exception as error:
        result = {"folder": folder, "driven": [], "need": [], "trouble": [study.said(error)]}
    path.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
