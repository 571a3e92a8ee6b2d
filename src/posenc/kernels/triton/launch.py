"""Launches of Triton kernels, prepared once for each kind of call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

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

    def __call__(self, tensors: tuple[Tensor, ...], start: int) -> None:
        """Run the kernel, with table rows from ``start`` on."""
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            # Triton launches on the current device.
            with torch.cuda.device(device):
                self(tensors, start)
        elif self.compiled is not None:
            # Triton's own look-up of the compiled kernel takes longer than a short kernel.
            self.compiled(*tensors, start, *self.numbers, *self.values)
        elif 0 not in self.grid:
            arguments = (*tensors, start, *self.numbers)
            made = self.kernel[self.grid](*arguments, **self.constants, **self.options)
            # Triton's interpreter compiles nothing and returns None.
            self.compiled = None if made is None else made[self.grid]


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
