"""Several processes of one machine, joined by gloo: started, bounded in time, and cleaned up.

`run` is for tests. As a script this file imports what the processes need once, and forks them.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
# A collective that waits longer for a rank than this is an error on the ranks that wait.
PATIENCE = 20


class Outcome(NamedTuple):
    """How the ranks ended.

    Attributes:
        codes: Exit code of each rank; negative for a signal.
        failures: What each rank reports, ``{case: traceback}``; None where it reported nothing.
        log: What was printed.
    """

    codes: list[int]
    failures: list[dict[str, str] | None]
    log: str


def run(world: int, job: str, folder: Path, *, limit: float = 240) -> Outcome:
    """Run ``job`` (``module:function`` under tests/) on ``world`` ranks that share ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    # One thread, one interface, and no GPU that a fork could not use.
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | own
    command = [sys.executable, str(Path(__file__)), str(world), job, str(folder)]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(timeout=limit)
    finally:
        # The group outlives its first process where ranks were left behind.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    codes = json.loads((folder / "codes.json").read_text())
    reports = [folder / f"failures-{rank}.json" for rank in range(world)]
    failures = [json.loads(r.read_text()) if r.exists() else None for r in reports]
    return Outcome(codes, failures, log)


def assert_passed(outcome: Outcome) -> None:
    """Every rank finished, and none reported a failure."""
    found = [
        f"rank {rank}, {case}:\n{text}"
        for rank, failures in enumerate(outcome.failures)
        for case, text in (failures or {}).items()
    ]
    assert not found, "\n".join(found)
    assert set(outcome.codes) == {0}, outcome.log
    assert None not in outcome.failures, outcome.log


def each(cases: dict[str, Callable[[], None]]) -> dict[str, str]:
    """Run the cases; those that fail, with why."""
    failures = {}
    for name, case in cases.items():
        began = time.monotonic()
        try:
            case()
        except Exception:
            failures[name] = traceback.format_exc(limit=-6)
            if time.monotonic() - began > PATIENCE:
                # The ranks are out of step, and would wait as long in every case that is left.
                break
    return failures


def _rank(
    rank: int, world: int, store: Path, job: Callable[[Path], dict[str, str]], folder: Path
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE),
    )
    failures = job(folder)
    (folder / f"failures-{rank}.json").write_text(json.dumps(failures))
    dist.barrier()
    dist.destroy_process_group()


def _main(world: int, job: str, folder: Path) -> None:
    import torch.distributed  # noqa: F401 (once, before the ranks are forked)

    sys.path.insert(0, str(TESTS))
    module, function = job.split(":")
    work = getattr(importlib.import_module(module), function)
    store, pids = folder / f"store-{os.getpid()}", []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _rank(rank, world, store, work, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
