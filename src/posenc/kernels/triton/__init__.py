"""The kernels in Triton. Triton is imported when the first call on a GPU is planned."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

# This is looked up at import, because torch.compile cannot trace find_spec.
installed = importlib.util.find_spec("triton") is not None


def status() -> tuple[bool, str]:
    """Whether these kernels can run here, and why."""
    if not installed:
        return False, "triton is not installed"
    cuda = torch.cuda.is_available()
    return cuda, "ready" if cuda else "torch sees no CUDA device"


def run(op: Any, call: Any, key: bytes | None) -> tuple[Tensor, ...]:
    """The results of a call by its plan, see `execute.run`."""
    from posenc.kernels.triton import execute

    return execute.run(op, call, key)
