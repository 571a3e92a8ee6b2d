"""The ops in C: on the CPU the kernels, in one pass over memory; on CUDA their launches."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor

try:
    import posenc.kernels.native._native as _native

    available, _error = True, ""
except ModuleNotFoundError:
    available = False
    _error = "not in this install: the wheel has none, or no C compiler was found to build it"
except ImportError as error:
    available, _error = False, f"built, but it does not load: {error}"

# Whether ops on CUDA launch their kernels themselves, once these are compiled, or why they do not.
launches_kernels, _no_launches = False, ""
_LIBRARIES = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}


def register() -> None:
    """Implement the ops that C has, on the CPU and on CUDA; they may be defined later."""
    global available, launches_kernels, _error, _no_launches
    if available:
        name = _LIBRARIES.get(sys.platform, "libtorch_cpu.so")
        path = os.path.join(os.path.dirname(torch.__file__), "lib", name)
        missing = _native.register(path)
        if missing is not None:
            available, _error = False, f"built, but torch {torch.__version__} has no {missing}"
        elif torch.version.cuda is None or not hasattr(_native, "register_cuda"):
            _no_launches = "C launches only on Linux, and with a torch that was built with CUDA"
        else:
            path = os.path.join(os.path.dirname(path), "libtorch_cuda.so")
            missing = _native.register_cuda(path)
            launches_kernels = missing is None
            _no_launches = f"neither torch {torch.__version__} nor the driver has {missing}"


def serves(x: Tensor, devices: tuple[str, ...]) -> bool:
    """Whether native code may run an op of ``x`` that it has for ``devices``."""
    if x.is_cpu:
        return available and "cpu" in devices
    return x.is_cuda and launches_kernels and "cuda" in devices


def missed() -> bytes | None:
    """What identifies the call of this thread that was just refused for want of a launch."""
    return _native.missed() if launches_kernels else None


def install(
    call: bytes, launches: tuple[Any, ...], made: tuple[Any, ...] = (), results: int = 0
) -> None:
    """Launch kernels from now on in calls like the one that was :func:`missed`.

    An op that repeats what Python did has the tensors to make, the results before the others.
    Without launches, such calls stay Python's.
    """
    _native.install(call, launches, made, results)


def prepare(launch: tuple[int, ...]) -> Any:
    """What :func:`launch` takes for a launch that Python described, or None."""
    return _native.prepare(*launch) if launches_kernels else None


def launch(prepared: Any, tensors: tuple[Tensor, ...], start: int) -> bool:
    """Launch a kernel on the current stream of the current device; whether that worked."""
    device = tensors[0].get_device()
    return _native.launch(prepared, device, start, *[t.data_ptr() for t in tensors])


def launching() -> str:
    """Whether C launches the kernels on CUDA, or Python and why."""
    if launches_kernels:
        return "launched by C"
    why = _no_launches if available else f"the C extension is {_error}"
    return f"launched by Python, which takes longer: {why}"


def status() -> tuple[bool, str]:
    """Whether the extension is there, and the instruction set in use or why it is missing."""
    return available, f"compiled, using {_native.isa()}" if available else _error
