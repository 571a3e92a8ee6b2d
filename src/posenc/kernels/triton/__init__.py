"""The kernels in Triton. Triton is imported at the first call with a CUDA tensor."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

# This is looked up at import, because torch.compile cannot trace find_spec.
installed = importlib.util.find_spec("triton") is not None
_MODULES = {
    "check_twins": "pairs",
    "rotate_into": "rotate",
    "norm_into": "norm",
    "norm_qk_into": "norm",
    "norm_backward_into": "norm",
    "cache_into": "cache",
    "phases_of": "polar",
    "polar_into": "polar",
    "polar_backward_into": "polar",
}


def status() -> tuple[bool, str]:
    """Whether these kernels can run here, and why."""
    if not installed:
        return False, "triton is not installed"
    cuda = torch.cuda.is_available()
    return cuda, "ready" if cuda else "torch sees no CUDA device"


def run_and_install(
    call: bytes, run: Callable[..., Any], arguments: tuple[Any, ...], repeats: bool
) -> Any:
    """Run an op, whose kernels native code launches from now on; ``call`` identifies the call."""
    from posenc.kernels.triton import launch

    run_and = launch.run_and_repeat if repeats else launch.run_and_install
    return run_and(call, run, arguments)


def rehearse(run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Have the kernels of ``run`` compiled, side by side in other threads, and run none of them."""
    from posenc.kernels.triton import launch

    # The call itself says what is wrong with its arguments; memory may suffice for it alone.
    with launch.rehearsal(), suppress(RuntimeError, TypeError, ValueError):
        run(*arguments)


def __getattr__(name: str) -> Any:
    """A kernel, which is imported when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return globals().setdefault(name, getattr(module, name))
