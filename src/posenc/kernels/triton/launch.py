"""Kernels that are launched again and again: what a launch needs is worked out once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

# Out-of-range rows stop the kernel as torch's own indexing does; the overflow checks that Triton
# would add to every index along with it are not wanted.
ASSERTING: dict[str, Any] = {"debug": True, "sanitize_overflow": False}


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
        self.options = {**ASSERTING, **options}
        self.compiled: Any = None

    def __call__(self, tensors: tuple[Tensor, ...], start: int) -> None:
        """Run it, with rows from ``start`` on."""
        if 0 in self.grid:
            return
        arguments = (*tensors, start, *self.numbers)
        with _on_device(tensors[0]):
            if self.compiled is None:
                run = self.kernel[self.grid]
                self.compiled = run(*arguments, **self.constants, **self.options)
            else:
                # Straight to the launch: Triton's own look-up takes longer than a short kernel.
                self.compiled[self.grid](*arguments, *self.constants.values())


def known(
    launches: dict[Hashable, Launch],
    described: tuple[Hashable, ...],
    tensors: tuple[Tensor, ...],
    make: Callable[[], Launch],
) -> Launch:
    """The launch for calls like this one: all that Triton specialises a kernel on is the key."""
    key = (
        *described,
        tensors[0].device,
        *[(t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors],
    )
    launch = launches.get(key)
    if launch is None:
        if len(launches) >= 4096:
            launches.clear()
        launch = launches[key] = make()
    return launch


def starts_early(device: torch.device) -> bool:
    """Whether a kernel can be set up before the one ahead of it has ended: Hopper and later."""
    cuda = device.type == "cuda" and torch.version.cuda is not None
    return cuda and torch.cuda.get_device_capability(device) >= (9, 0)


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the device of ``x`` the current one, which is where Triton launches."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
