"""Kernels that are launched again and again: what a launch needs is worked out once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

# Out-of-range rows stop the kernel as torch's own indexing does; the overflow checks that Triton
# would add to every index along with it are not wanted. Nor is its choice of which product to fuse
# with a sum, which differs from shape to shape: kernels say so themselves.
OPTIONS: dict[str, Any] = {"debug": True, "sanitize_overflow": False, "enable_fp_fusion": False}

Made = TypeVar("Made")


class Launch:
    """A kernel with everything but its tensors, for calls of one kind.

    Args:
        kernel: Takes its tensors, the first row, numbers, and constants in the order given here.
        grid: Programs along each axis.
        numbers: Sizes and strides.
        constants: What the kernel is compiled for.
        options: How it is compiled.
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
        """Run it, with rows from ``start`` on."""
        device = tensors[0].device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            self._run(*tensors, start, *self.numbers)
        else:
            # Triton launches on the current device.
            with torch.cuda.device(device):
                self._run(*tensors, start, *self.numbers)

    def _run(self, *arguments: Any) -> None:
        if self.compiled is not None:
            # Straight to the launch: Triton's own look-up takes longer than a short kernel.
            self.compiled(*arguments, *self.values)
        elif 0 not in self.grid:
            made = self.kernel[self.grid](*arguments, **self.constants, **self.options)
            # Nothing was compiled if the kernel is interpreted.
            self.compiled = None if made is None else made[self.grid]


def known(
    launches: dict[Hashable, Made],
    described: tuple[Hashable, ...],
    tensors: tuple[Tensor, ...],
    make: Callable[[], Made],
) -> Made:
    """The launch for calls like this one: all that Triton specialises a kernel on is the key."""
    key = (
        *described,
        tensors[0].device,
        *[(t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors],
    )
    try:
        return launches[key]
    except KeyError:
        if len(launches) >= 4096:
            launches.clear()
        launch = launches[key] = make()
        return launch


def starts_early(device: torch.device) -> bool:
    """Whether a kernel can be set up before the one ahead of it has ended: Hopper and later."""
    cuda = device.type == "cuda" and torch.version.cuda is not None
    return cuda and torch.cuda.get_device_capability(device) >= (9, 0)
