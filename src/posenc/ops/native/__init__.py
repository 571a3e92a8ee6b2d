"""The ops in C: on the CPU the kernels, in one pass over memory; on CUDA the plans of calls."""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

try:
    import posenc.ops.native._native as _native

    available, _error = True, ""
except ModuleNotFoundError:
    available = False
    _error = "not in this install: the wheel has none, or no C compiler was found to build it"
except ImportError as error:
    available, _error = False, f"built, but it does not load: {error}"

# Whether C carries out the plans of calls on CUDA, or why it does not.
carries_out_plans, _no_plans = False, ""
_LIBRARIES = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}


def register() -> None:
    """Implement the ops that C has on the CPU, and find what it needs for CUDA.

    The ops may be defined later.
    """
    global available, carries_out_plans, _error, _no_plans
    if available:
        name = _LIBRARIES.get(sys.platform, "libtorch_cpu.so")
        path = os.path.join(os.path.dirname(torch.__file__), "lib", name)
        missing = _native.register(path)
        if missing is not None:
            available, _error = False, f"built, but torch {torch.__version__} has no {missing}"
        elif torch.version.cuda is None or not hasattr(_native, "find_cuda"):
            _no_plans = "C launches only on Linux, and with a torch that was built with CUDA"
        else:
            path = os.path.join(os.path.dirname(path), "libtorch_cuda.so")
            missing = _native.find_cuda(path)
            carries_out_plans = missing is None
            _no_plans = f"neither torch {torch.__version__} nor the driver has {missing}"


def define_cuda(name: str, fields: str) -> None:
    """Have plans carried out for an op on CUDA; ``fields`` has a letter for each field."""
    if carries_out_plans:
        _native.define_cuda(name, fields)


def pop_missed() -> bytes | None:
    """The key of the call of this thread that was just refused, if it was for want of a plan."""
    return _native.pop_missed() if carries_out_plans else None


def install(key: bytes, numbers: list[int]) -> bool:
    """Keep a plan for the calls of a key; whether that can be done."""
    return _native.install(key, numbers)


def launching() -> str:
    """Whether C launches the kernels on CUDA, or Python and why."""
    if carries_out_plans:
        return "launched by C"
    why = _no_plans if available else f"the C extension is {_error}"
    return f"launched by Python, which takes longer: {why}"


def status() -> tuple[bool, str]:
    """Whether the extension is there, and the instruction set in use or why it is missing."""
    return available, f"compiled, using {_native.isa()}" if available else _error


def serves(x: Tensor, on_cpu: bool) -> bool:
    """Whether an op of ``x`` may have native code; ``on_cpu`` says whether it has some there."""
    return (available and on_cpu) if x.is_cpu else (x.is_cuda and carries_out_plans)


register()
