"""Launches of Triton kernels, prepared once for each kind of call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

# Out-of-range rows stop the kernel as torch's own indexing does, but Triton adds no overflow checks
# to the indices. Nor does it choose which products to fuse with a sum, since its choice differs
# from shape to shape: the kernels call fma themselves.
OPTIONS: dict[str, Any] = {"debug": True, "sanitize_overflow": False, "enable_fp_fusion": False}
# Every prompt length is a kind of call. When there are too many, all are prepared anew.
MOST_LAUNCHES = 4096
_launches: dict[Hashable, Any] = {}


class Launch:
    """A kernel with its grid, sizes and constants, for calls that differ in their tensors alone.

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
            # Straight to the launch: Triton's own look-up takes longer than a short kernel.
            self.compiled(*tensors, start, *self.numbers, *self.values)
        elif 0 not in self.grid:
            arguments = (*tensors, start, *self.numbers)
            made = self.kernel[self.grid](*arguments, **self.constants, **self.options)
            # Nothing was compiled if the kernel is interpreted.
            self.compiled = None if made is None else made[self.grid]


def launch_for(
    described: tuple[Hashable, ...], tensors: tuple[Tensor, ...], prepare: Callable[[], Any]
) -> Any:
    """What ``prepare`` returned for a call like this one; Triton specialises a kernel on no more.

    ``described`` begins with the name of the kernel.
    """
    key = (
        *described,
        tensors[0].device,
        *[(t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors],
    )
    try:
        return _launches[key]
    except KeyError:
        if len(_launches) >= MOST_LAUNCHES:
            _launches.clear()
        launch = _launches[key] = prepare()
        return launch
