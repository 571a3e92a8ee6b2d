"""Launches of Triton kernels, prepared once for each kind of call."""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from posenc._contract.tracing import SeenOperations
from posenc.kernels import native

# `debug` enables device_assert, which stops a kernel at a row out of range, as torch's indexing
# does. Overflow checks are off. FP fusion is off, because Triton's choice of products differs
# from shape to shape: the kernels call fma themselves.
OPTIONS: dict[str, Any] = {"debug": True, "sanitize_overflow": False, "enable_fp_fusion": False}
# Each prompt length has a launch of its own. At this number of launches, the cache is cleared.
MOST_LAUNCHES = 4096
_launches: dict[Hashable, Any] = {}


class Launch:
    """A kernel with its grid, sizes and constants, for calls that differ only in tensors and row.

    The kernel takes its tensors, the first row, ``numbers`` and ``constants``, in this order.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        numbers: tuple[float, ...],
        constants: dict[str, Any],
        **options: Any,
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.options = {**OPTIONS, **options}
        self.values = tuple(constants.values())
        self.compiled: Any = None
        self.binary: Any = None
        self.prepared: Any = None
        self.ahead: Future[Any] | None = None

    def __call__(self, tensors: tuple[Tensor, ...], start: int) -> None:
        """Run the kernel, with table rows from ``start`` on."""
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            # Triton launches on the current device.
            with torch.cuda.device(device):
                self(tensors, start)
            return
        if getattr(_record, "rehearses", False):
            self._compile_ahead(tensors, start)
            return
        if (record := getattr(_record, "launches", None)) is not None:
            record.append((self, tensors))
        if self.prepared is not None and native.launch(self.prepared, tensors, start):
            # Triton's own launch reads all arguments, which takes longer than a short kernel.
            pass
        elif self.compiled is not None:
            self.compiled(*tensors, start, *self.numbers, *self.values)
        elif 0 not in self.grid:
            if self.ahead is not None:
                self.ahead.result()
            arguments = (*tensors, start, *self.numbers)
            self.binary = self.kernel[self.grid](*arguments, **self.constants, **self.options)
            # Triton's interpreter compiles nothing and returns None.
            self.compiled = None if self.binary is None else self.binary[self.grid]
            described = self.described(range(len(tensors)))
            self.prepared = None if described is None else native.prepare(described)

    def _compile_ahead(self, tensors: tuple[Tensor, ...], start: int) -> None:
        """Begin to compile the kernel in another thread, for tensors that are aligned."""
        if self.binary is not None or self.ahead is not None or 0 in self.grid:
            return
        arguments, device = [t.dtype for t in tensors], tensors[0].device

        def compile() -> None:
            with torch.cuda.device(device):
                how = {**self.constants, **self.options}
                self.kernel.warmup(*arguments, start, *self.numbers, grid=self.grid, **how)

        self.ahead = _compilers().submit(compile)

    def described(self, sources: Sequence[int]) -> tuple[int, ...] | None:
        """The launch as native code reads it, `launches.h`; None if it needs more than that.

        ``sources`` are the places of its tensors among those that native code has.
        """
        binary = self.binary
        if binary is None:
            return None
        about = binary.metadata
        unusual = about.global_scratch_size or about.profile_scratch_size
        if unusual or about.num_ctas != 1 or about.launch_cooperative_grid:
            return None
        threads = about.num_warps * about.target.warp_size
        description = [binary.function, *self.grid, threads, about.shared, int(about.launch_pdl)]
        values = [*sources, 0, *self.numbers]
        for i, (kind, value) in enumerate(zip(binary.src.signature.values(), values, strict=False)):
            if kind == "constexpr":
                continue
            if i < len(sources):
                description += (_TENSOR, 8, value)
            elif i == len(sources):
                description += (_START, _SIZES[kind], 0)
            else:
                description += (_NUMBER, _SIZES[kind], bits_of(kind, value))
        return tuple(description)


_TENSOR, _START, _NUMBER = range(3)
_SIZES = {"i32": 4, "i64": 8, "fp32": 4, "fp64": 8}


def bits_of(kind: str, value: float) -> int:
    """A number as a parameter of a kernel holds it."""
    if kind in ("fp32", "fp64"):
        form = "fi" if kind == "fp32" else "dq"
        bits: int = struct.unpack(form[1], struct.pack(form[0], value))[0]
        return bits
    return int(value)


_record = threading.local()


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    # LLVM and ptxas, which take most of the time, run without Python's lock.
    return ThreadPoolExecutor(8, "posenc-compiler")


@contextmanager
def rehearsal() -> Iterator[None]:
    """In this context launches only have their kernels compiled, side by side in other threads."""
    _record.rehearses = True
    try:
        yield
    finally:
        _record.rehearses = False


@contextmanager
def _recorded() -> Iterator[list[tuple[Launch, tuple[Tensor, ...]]]]:
    """Collect the launches of this thread in this context, and their tensors."""
    _record.launches = []
    try:
        yield _record.launches
    finally:
        _record.launches = None


def run_and_install(call: bytes, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run an op, whose kernels native code launches from now on; ``call`` identifies the call.

    Native code makes the results, and has the tensors in the order of the kernel.
    """
    with _recorded() as launches:
        result = run(*arguments)
    described = tuple([one.described(range(len(tensors))) for one, tensors in launches])
    if None not in described:
        native.install(call, described)
    return result


def run_and_repeat(call: bytes, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """As :func:`run_and_install`; native code makes the tensors too, and repeats all that is done.

    That is possible if nothing is done but launches, on the arguments and on new tensors.
    """
    with _recorded() as launches, SeenOperations() as seen:
        result = run(*arguments)
    results = result if isinstance(result, tuple) else (result,)
    used = {t.data_ptr() for _, tensors in launches for t in tensors if t.numel()}
    created = {t.data_ptr(): t for t in seen.created if t.numel()}
    returned = {t.data_ptr() for t in results}
    new = [*results, *[t for at, t in created.items() if at in used and at not in returned]]
    row = [t for t in (*arguments, *new) if t is None or isinstance(t, Tensor)]
    places = {t.data_ptr(): i for i, t in enumerate(row) if t is not None and t.numel()}
    if len(places) < sum(t is not None and t.numel() > 0 for t in row):
        # Which of two arguments at one address a kernel reads cannot be told.
        return result
    are_new = [t.numel() == 0 or _is_whole(t, created.get(t.data_ptr())) for t in results]
    if seen.others or not all(are_new) or not used <= places.keys():
        native.install(call, ())
        return result
    # A kernel reads nothing of an empty tensor.
    described = tuple(
        [one.described([places.get(t.data_ptr(), 0) for t in tensors]) for one, tensors in launches]
    )
    if None not in described:
        shapes = [(str(t.dtype).removeprefix("torch."), *t.shape, *t.stride()) for t in new]
        native.install(call, described, tuple(shapes), len(results))
    return result


def _is_whole(x: Tensor, created: Tensor | None) -> bool:
    """Whether ``x`` is all of a new tensor."""
    return created is not None and x.numel() == created.numel() and x.dtype == created.dtype


def launch_for(
    described: tuple[Hashable, ...], tensors: tuple[Tensor, ...], prepare: Callable[[], Any]
) -> Any:
    """The cached result of ``prepare`` for this kind of call; see :func:`find_launch`."""
    return find_launch((*described, *signature(tensors)), prepare)


def signature(tensors: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """All that Triton specialises on, and the launches' sizes and strides."""
    return (
        tensors[0].device,
        *[(t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors],
    )


def find_launch(key: tuple[Hashable, ...], prepare: Callable[[], Any]) -> Any:
    """The cached result of ``prepare``; the key begins with the kernel's name."""
    try:
        return _launches[key]
    except KeyError:
        if len(_launches) >= MOST_LAUNCHES:
            _launches.clear()
        launch = _launches[key] = prepare()
        return launch
