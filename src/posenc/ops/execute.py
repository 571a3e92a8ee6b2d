"""Plans carried out by Python: kernels are compiled from what a plan says, and nothing else.

Triton is imported when the first call on a GPU is planned.
"""

from __future__ import annotations

import functools
import importlib.util
import struct
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc._contract import triton_private
from posenc.ops import native
from posenc.ops.plan import (
    START,
    Constant,
    Copy,
    Launch,
    Operand,
    Plan,
    Step,
    Target,
    plan_of,
)

# This is looked up at import, because torch.compile cannot trace find_spec.
installed = importlib.util.find_spec("triton") is not None

# `debug` enables device_assert, which stops a kernel at a row out of range, as torch's indexing
# does. Overflow checks are off. FP fusion is off, because Triton's choice of products differs
# from shape to shape: the kernels call fma themselves.
OPTIONS: dict[str, Any] = {"debug": True, "sanitize_overflow": False, "enable_fp_fusion": False}
_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
}
# In the order of TORCH_DTYPES in native/torch.h.
_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
_DTYPES += [torch.float8_e5m2, torch.int8, torch.int32, torch.int64]
_ALIGNED = [["tt.divisibility", 16]]
# The kernels of this process, which Triton would keep too: one for each request, and none for a
# length.
_compiled: dict[Any, Future[Any]] = {}
# Where the extension is not there, plans are found by Python; the oldest go first.
MOST_PLANS = 1024
_plans: OrderedDict[Any, Plan] = OrderedDict()


def status() -> tuple[bool, str]:
    """Whether the kernels in Triton can run here, and why."""
    if not installed:
        return False, "triton is not installed"
    cuda = torch.cuda.is_available()
    return cuda, "ready" if cuda else "torch sees no CUDA device"


@functools.cache
def target_of(device: torch.device) -> Target:
    """What plans for a device depend on."""
    if device.type != "cuda":
        return Target("interpreter")
    about = torch.cuda.get_device_properties(device)
    vendor = "nvidia" if torch.version.cuda is not None else "amd"
    return Target(vendor, (about.major, about.minor), about.multi_processor_count)


# Where a parameter of a kernel comes from, as `run_step` of native/plans.h reads it.
_TENSOR, _START, _NUMBER = range(3)


class Described(NamedTuple):
    """A launch as Triton and C read it."""

    types: list[Any]  # of arguments; that of a tuple is a tuple
    aligned: list[tuple[int, ...]]  # places of pointers and numbers that are multiples of 16
    constants: list[tuple[tuple[int, ...], Any]]
    # Where each parameter comes from, its bytes, and the place of a tensor or the number.
    parameters: list[tuple[int, int, int]]


def described(launch: Launch) -> Described:
    """The types of a launch's arguments, and the parameters that they become."""
    names = launch.kernel.arg_names
    constants: list[Any] = [((names.index(n),), value) for n, value in launch.constants.items()]
    found = Described([], [], constants, [])
    found.types.extend([_describe(x, (i,), found) for i, x in enumerate(launch.arguments)])
    return found


def _describe(value: Any, path: tuple[int, ...], found: Described) -> Any:
    """The type of an argument, after what else is to be known of it."""
    kind = type(value)
    if kind is Constant:
        found.constants.append((path, value.of))
        return "constexpr"
    if kind is Operand:
        if value.is_aligned:
            found.aligned.append(path)
        found.parameters.append((_TENSOR, 8, value.place))
        return _POINTERS[value.dtype]
    if kind is float:
        bits: int = struct.unpack("i", struct.pack("f", value))[0]
        found.parameters.append((_NUMBER, 4, bits))
        return "fp32"
    if value is START:
        found.parameters.append((_START, 4, 0))
        return "i32"
    if isinstance(value, tuple) and kind is not Step:
        parts = [_describe(part, (*path, i), found) for i, part in enumerate(value)]
        return kind(*parts) if hasattr(value, "_fields") else tuple(parts)
    number = int(value.value if kind is Step else value)
    if kind is Step and value.is_multiple:
        found.aligned.append(path)
    is_narrow = -(2**31) <= number < 2**31
    found.parameters.append((_NUMBER, 4 if is_narrow else 8, number))
    return "i32" if is_narrow else "i64"


def request_of(launch: Launch, found: Described | None = None) -> tuple[Any, ...]:
    """All that a kernel is compiled from: types, alignments, constants and options."""
    types, aligned, constants, _ = found or described(launch)
    options = tuple(sorted({**OPTIONS, **launch.options}.items()))
    return launch.kernel, tuple(types), tuple(aligned), tuple(constants), options


def compile_request(request: tuple[Any, ...], target: Any) -> Any:
    """The kernel of a request, in no process's memory yet."""
    kernel, types, aligned, constants, options = request
    names = kernel.arg_names
    signature: dict[str, Any] = dict.fromkeys(names, "constexpr")
    signature |= dict(zip(names, types, strict=False))
    attributes = dict.fromkeys(aligned, _ALIGNED)
    return triton_private.compile(
        kernel, signature, dict(constants), attributes, target, dict(options)
    )


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    # LLVM and ptxas, which take most of the time, run without Python's lock.
    return ThreadPoolExecutor(8, "posenc-compiler")


def compile_ahead(plan: Plan, device: torch.device) -> None:
    """Begin to compile the kernels of a plan in other threads; none of them is loaded."""
    if device.type != "cuda":
        return  # Triton's interpreter compiles nothing
    with torch.cuda.device(device):
        target = triton_private.target()
    for step in plan.steps:
        if isinstance(step, Launch):
            request = request_of(step)
            key = request, device.index
            if key not in _compiled:
                _compiled[key] = _compilers().submit(compile_request, request, target)


def loaded(request: tuple[Any, ...], device: torch.device) -> Any:
    """The compiled kernel of a request, in the memory of the current device."""
    key = request, device.index
    if (found := _compiled.get(key)) is None:
        found = Future()
        try:
            found.set_result(compile_request(request, triton_private.target()))
        except BaseException as error:
            found.set_exception(error)
            raise
        _compiled[key] = found
    kernel = found.result()
    if not triton_private.is_loaded(kernel):
        try:
            triton_private.load(kernel)
        except RuntimeError as error:
            if not torch.cuda.is_current_stream_capturing():
                raise
            raise RuntimeError(
                "posenc: a kernel could not be loaded while a CUDA graph is captured.\n"
                "  Make a call of the same kind once before the capture."
            ) from error
    return kernel


def execute(plan: Plan, tensors: Sequence[Tensor | None], start: int) -> list[Tensor]:
    """Carry a plan out for the tensors of a call; return its results."""
    like = tensors[0]
    assert like is not None
    made = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=like.device)
        for x in plan.made
    ]
    row: list[Any] = [*tensors, *made]

    def given(value: Any) -> Any:
        if isinstance(value, Operand):
            x = row[value.place]
            return x if x.dtype == value.dtype else x.view(value.dtype)
        if value is START:
            return start
        if isinstance(value, Step):
            return value.value
        if isinstance(value, Constant):
            return value.of if like.is_cuda else triton_private.interpreted(value.of)
        if isinstance(value, tuple):
            parts = [given(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    for step in plan.steps:
        if isinstance(step, Launch):
            arguments = [given(value) for value in step.arguments]
            if like.is_cuda:
                with torch.cuda.device(like.device):
                    kernel = loaded(request_of(step), like.device)
                    triton_private.run(kernel, step.grid, (*arguments, *step.constants.values()))
            else:
                step.kernel[step.grid](*arguments, **step.constants, **{**OPTIONS, **step.options})
        elif isinstance(step, Copy):
            row[step.to.place].copy_(row[step.source.place])
        else:
            row[step.to.place].zero_()
    return made[: len(plan.results)]


def numbers_of(plan: Plan, device: torch.device) -> list[int] | None:
    """A plan as `install` of native/plans.h reads it; None if C cannot carry it out."""
    found = [
        plan.tensors,
        len(plan.made),
        len(plan.results),
        plan.least,
        plan.most,
        len(plan.steps),
    ]
    for x in plan.made:
        found += [_DTYPES.index(x.dtype), x.dim(), *x.shape, *x.stride()]
    for step in plan.steps:
        if isinstance(step, Launch):
            about = described(step)
            kernel = triton_private.about(loaded(request_of(step, about), device))
            if kernel is None:
                return None
            found += [
                0,
                kernel.function,
                *step.grid,
                kernel.threads,
                kernel.shared,
                kernel.overlaps,
            ]
            found.append(len(about.parameters))
            for parameter in about.parameters:
                found += parameter
        elif isinstance(step, Copy):
            found += [1, step.to.place, step.source.place]
        else:
            found += [2, step.to.place]
    return found


def run(op: Any, call: Any, key: bytes | None) -> tuple[Tensor, ...]:
    """The results of a call on a GPU that has no plan, or whose plans C does not carry out.

    ``key`` is that of C, which gets the plan.
    """
    given, call = call, op.call(*[_plain(x) for x in call])
    target = target_of(call[0].device)
    plan = find_plan(op, call, target) if key is None else plan_of(op, call, target)
    starts = [x for field, x in zip(op.fields, call, strict=True) if field.letter == "s"]
    start = starts[0] if starts else 0
    if not plan.least <= start <= plan.most:
        raise plan.wrong_start(start)
    if op.backward_call is not None and any(_is_recorded(x) for x in call):
        backward, later = op.backward_call(call, tuple(plan.made[: len(plan.results)]))
        compile_ahead(plan_of(backward, backward.call(*later), target), call[0].device)
    if key is not None:
        with torch.cuda.device(call[0].device):
            numbers = numbers_of(plan, call[0].device)
        if numbers is not None and native.install(key, numbers):
            result = op.run_native(call)
            results = [result] if isinstance(result, Tensor) else list(result or ())
            return _written_back(op, given, call, results)
    results = execute(plan, [call[i] for i in op.tensors], start)
    op.count_writes(call)
    return _written_back(op, given, call, results)


def _written_back(op: Any, given: Any, call: Any, results: list[Tensor]) -> tuple[Tensor, ...]:
    """The results, after what was written to copies of :func:`_plain` is where it belongs."""
    for i in op.writes:
        if given[i] is not call[i]:
            given[i].copy_(call[i])
    return tuple(results)


def _is_recorded(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _plain(x: Any) -> Any:
    """A tensor whose memory holds its numbers: without a negative bit, and with memory."""
    if not isinstance(x, Tensor):
        return x
    if x.is_neg() or (x.numel() and not x.data_ptr()):
        return x.resolve_neg().clone(memory_format=torch.contiguous_format)
    return x


def find_plan(op: Any, call: Any, target: Target) -> Plan:
    """The plan of a call, where C keeps none."""
    key = op, key_of(op, call)
    if (plan := _plans.get(key)) is None:
        plan = _plans[key] = plan_of(op, call, target)
        if len(_plans) > MOST_PLANS:
            _plans.popitem(last=False)
    else:
        _plans.move_to_end(key)
    return plan


def key_of(op: Any, call: Any) -> tuple[Any, ...]:
    """All of a call but its start, and the addresses of its tensors; C makes it in the same way."""
    pairs = zip(op.fields, call, strict=True)
    return tuple([None if field.letter == "s" else _described(x) for field, x in pairs])


def _described(x: Any) -> Any:
    """All that a plan may know of an argument."""
    if isinstance(x, Tensor):
        return x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16 == 0
    return x
