"""Several trainings at a time, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from typing import Any

from posenc.lab import machine
from posenc.lab.comparison.plan import Plan, Unit
from posenc.lab.comparison.tasks import TASKS, Data
from posenc.lab.comparison.training import train_and_test


def train_all(units: list[Unit], plan: Plan, jobs: int) -> Iterator[tuple[Unit, dict[str, Any]]]:
    """Train ``units`` in ``jobs`` processes, and yield the numbers of each as it ends.

    The numbers are those of one process. When the caller stops, so do the processes.
    """
    others = set(multiprocessing.active_children())
    # A forked process cannot use CUDA, nor the threads of its parent.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _ignore_interrupt)
    try:
        futures = {pool.submit(_train, unit, plan): unit for unit in units}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
            process.join()


def _ignore_interrupt() -> None:
    # A terminal sends Ctrl-C to every process; the first of them ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _train(unit: Unit, plan: Plan) -> dict[str, Any]:
    with machine.threads(plan.threads):
        return train_and_test(unit, plan, _data(unit.task, plan), lambda label, done: None)


@lru_cache(maxsize=1)
def _data(task: str, plan: Plan) -> Data:
    return TASKS[task].load(plan)
