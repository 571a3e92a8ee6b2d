"""Launches that only have their kernel compiled."""

from contextlib import nullcontext

import pytest
import torch

from posenc.kernels.triton import rehearse
from posenc.kernels.triton.launch import Launch


class Kernel:
    """What a launch uses of a kernel, written down."""

    def __init__(self):
        self.seen = []

    def warmup(self, *arguments, grid, **options):
        self.seen.append(("compiled", arguments, grid))

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.seen.append(("run", arguments, grid))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return Kernel()


def test_a_rehearsal_compiles_once_and_runs_nothing(kernel):
    launch, x = Launch(kernel, (2, 1, 1), (7,), {}), torch.ones(3)
    for _ in range(2):
        rehearse(lambda: launch((x,), 5), ())
    launch.ahead.result()
    assert kernel.seen == [("compiled", (torch.float32, 5, 7), (2, 1, 1))]
    launch((x,), 5)
    assert kernel.seen[1:] == [("run", (x, 5, 7), (2, 1, 1))]


def test_a_rehearsal_that_fails_is_over(kernel):
    launch, x = Launch(kernel, (1, 1, 1), (), {}), torch.ones(3)

    def refuse():
        raise ValueError("these do not fit")

    rehearse(refuse, ())
    launch((x,), 0)
    assert [what for what, *_ in kernel.seen] == ["run"]


def test_a_kernel_that_does_not_compile_says_so_when_it_is_launched(kernel):
    def fail(*arguments, **options):
        raise RuntimeError("no such instruction")

    kernel.warmup = fail
    launch, x = Launch(kernel, (1, 1, 1), (), {}), torch.ones(3)
    rehearse(lambda: launch((x,), 0), ())
    with pytest.raises(RuntimeError, match="no such instruction"):
        launch((x,), 0)
