"""Processes beside that of the tests: started, bounded in time, and cleaned up.

`run` has several ranks, joined by gloo, and `python` is a command line. As a script this file
imports torch once, and forks a process for each of them.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

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
    _, log = _run_apart("_join_ranks", world, job, str(folder), limit=limit)
    found = folder / "codes.json"
    codes = json.loads(found.read_text()) if found.exists() else []
    reports = [folder / f"failures-{rank}.json" for rank in range(world)]
    failures = [json.loads(r.read_text()) if r.exists() else None for r in reports]
    return Outcome(codes, failures, log)


def python(*arguments: str, limit: float = 240, **environment: str) -> tuple[int, str]:
    """The exit code of ``python`` with these arguments, ``-c`` or a path first, and what it prints.

    Its process has imported torch and posenc. Without a GPU, kernels of Triton are not interpreted
    there, but can be compiled.
    """
    return _run_apart("_run_script", arguments, os.getcwd(), environment, limit=limit)


def _run_apart(function: str, *arguments: Any, limit: float) -> tuple[int, str]:
    """The exit code and the output of a function of this file, in a process of its own."""
    starter = _starter()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        starter.stdin.write(json.dumps((str(log), function, *arguments)).encode() + b"\n")
        pid = int(starter.stdout.readline())
        try:
            if not select.select([starter.stdout], [], [], limit)[0]:
                raise TimeoutError(f"{function}{arguments} takes more than {limit} s")
        finally:
            # The group outlives its first process where ranks were left behind.
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            code = int(starter.stdout.readline())
        return code, log.read_text()


@cache
def _starter() -> subprocess.Popen[bytes]:
    """A process that starts others, and ends with this one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # One thread, one interface, and no GPU that a fork could not use.
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__))],
        env=environment | own,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A line that was read ahead would be waited for.
        bufsize=0,
    )

    def end() -> None:
        process.stdin.close()
        process.wait()
        process.stdout.close()

    atexit.register(end)
    return process


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


def _join_ranks(world: int, job: str, folder: str) -> None:
    module, function = job.split(":")
    work = getattr(importlib.import_module(module), function)
    store, pids = Path(folder, f"store-{os.getpid()}"), []
    for rank in range(world):
        pids.append(_fork(partial(_rank, rank, world, store, work, Path(folder))))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    Path(folder, "codes.json").write_text(json.dumps(codes))


def _run_script(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _fork(work: Callable[[], None]) -> int:
    """A process that does ``work`` and ends; its id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def _work_in_a_group(log: str, function: str, *arguments: Any) -> None:
    os.setsid()
    written = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(written, stream)
    globals()[function](*arguments)


def _start_processes() -> None:
    """For each line of the input, the id of a process, and its exit code when it has ended."""
    # What most of them import, and what torch.autograd.grad and others import when first called.
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    import posenc  # noqa: F401

    sys.path.insert(0, str(TESTS))
    for line in sys.stdin:
        pid = _fork(partial(_work_in_a_group, *json.loads(line)))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    _start_processes()
