"""What an op does on a GPU, as data: a pure function of the call, the device and a step.

A plan is a list of steps over the tensors of a call and those that it makes: to launch a kernel, to
copy a tensor to dense rows, to fill one with zeros. It reads dtypes, shapes, strides, alignment and
flags, and no tensor's values or address, so the plan of one call serves all calls that agree in
these. `native/plans.h` makes the key of a call from all of them, and `execute.py` compiles
the kernels and carries plans out where the extension is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Target(NamedTuple):
    """What a plan depends on of a device."""

    vendor: str  # "nvidia", "amd", or "interpreter"
    capability: tuple[int, int] = (0, 0)
    processors: int = 4

    def has(self, major: int, minor: int = 0) -> bool:
        """Whether this is a GPU of NVIDIA of this compute capability, or a later one."""
        return self.vendor == "nvidia" and self.capability >= (major, minor)


class Operand:
    """A tensor of a plan: which one it is, and how it lies in memory.

    It has those attributes and views of a tensor that do not need its values. Strides of axes of
    one element are zero here: no kernel steps along them.

    Attributes:
        place: Which one, of the call's tensors and then of those that the plan makes.
        layout: A tensor of the meta device that lies in memory in the same way.
        device: That of the tensor.
        is_aligned: Whether its address is a multiple of 16.
    """

    __slots__ = ("_steps", "device", "is_aligned", "layout", "place", "shape")

    def __init__(
        self, place: int, layout: Tensor, device: torch.device, is_aligned: bool = True
    ) -> None:
        self.place, self.layout, self.device = place, layout, device
        self.is_aligned, self.shape = is_aligned, layout.shape
        pairs = zip(self.shape, layout.stride(), strict=True)
        self._steps = tuple([0 if size == 1 else step for size, step in pairs])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.layout.dtype

    def dim(self) -> int:
        """The number of axes."""
        return self.layout.dim()

    def numel(self) -> int:
        """The number of elements."""
        return self.layout.numel()

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.layout.element_size()

    def is_contiguous(self) -> bool:
        """Whether the elements are in order and without gaps."""
        return self.layout.is_contiguous()

    def stride(self, axis: int | None = None) -> Any:
        """All strides, or that of an axis."""
        return self._steps if axis is None else self._steps[axis]

    def viewed(self, layout: Tensor) -> Operand:
        """The same memory as another tensor sees it, from the same place on."""
        assert layout.storage_offset() == 0
        return Operand(self.place, layout, self.device, self.is_aligned)

    def __getitem__(self, index: Any) -> Operand:
        return self.viewed(self.layout[index])

    def __len__(self) -> int:
        return len(self.layout)

    def transpose(self, a: int, b: int) -> Operand:
        """With two axes exchanged."""
        return self.viewed(self.layout.transpose(a, b))

    def reshape(self, *shape: int) -> Operand:
        """With other axes."""
        return self.viewed(self.layout.view(shape))

    def expand(self, shape: Sequence[int]) -> Operand:
        """With larger axes, whose strides are zero."""
        return self.viewed(self.layout.expand(tuple(shape)))

    def view(self, dtype: torch.dtype) -> Operand:
        """The same bits as another dtype."""
        return self.viewed(self.layout.view(dtype))

    def has_dense_rows(self) -> bool:
        """Whether the elements of a row are neighbours, as kernels read them."""
        return self.shape[-1] == 1 or self.stride(-1) == 1


class Step(NamedTuple):
    """A stride as a kernel gets it, and whether all of its tensor's are multiples of 16.

    Such strides tell a compiler that rows are aligned. That does not change with the length of a
    tensor, as it would if each stride were asked by itself, and so neither does the kernel.
    """

    value: int
    is_multiple: bool


class Constant(NamedTuple):
    """A part of an aggregate that a kernel is compiled for: a number, a device function, or None.

    A None is something that the call does not have, and the kernel has no code for it.
    """

    of: Any


class _Start:
    """Stands for the start of a call, the one number that is not part of its plan."""


START = _Start()


class Launch(NamedTuple):
    """A kernel, what it gets in the order of its parameters, and how it is compiled.

    An argument is an `Operand`, a `Step`, an int, a float, `START`, or a tuple of these and of
    `Constant`s.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]


class Copy(NamedTuple):
    """Copy the elements of a tensor to another of its shape."""

    to: Operand
    source: Operand


class FillWithZeros(NamedTuple):
    """Fill a tensor with zeros."""

    to: Operand


class Plan:
    """Tensors to make, the results before the others, and steps."""

    def __init__(self, tensors: int, results: Sequence[Tensor], device: torch.device) -> None:
        self.tensors, self.device = tensors, device  # of the call
        self.made: list[Tensor] = []
        self.steps: list[Launch | Copy | FillWithZeros] = []
        self.results = [self._make(x) for x in results]
        # The starts that the plan is for, and the error of others.
        self.least, self.most = 0, 2**31 - 1
        self.wrong_start: Callable[[int], Exception] = ValueError

    def _make(self, like: Tensor) -> Operand:
        self.made.append(like)
        return Operand(self.tensors + len(self.made) - 1, like, self.device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Operand:
        """A new contiguous tensor."""
        return self._make(torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        **options: Any,
    ) -> None:
        """Launch a kernel, unless the grid is empty."""
        if 0 not in grid:
            x, y, z, *_ = *grid, 1, 1
            self.steps.append(Launch(kernel, (x, y, z), arguments, constants, options))

    def copy(self, to: Operand, source: Operand) -> None:
        """Copy a tensor."""
        if to.numel():
            self.steps.append(Copy(to, source))

    def fill_with_zeros(self, to: Operand) -> None:
        """Fill a tensor with zeros."""
        if to.numel():
            self.steps.append(FillWithZeros(to))

    def contiguous(self, x: Operand) -> Operand:
        """A contiguous copy."""
        made = self.empty(x.shape, x.dtype)
        self.copy(made, x)
        return made

    def with_dense_rows(self, x: Operand) -> Operand:
        """The tensor itself, or a copy with dense rows."""
        return x if x.has_dense_rows() else self.contiguous(x)


def strides(*tensors: Operand) -> tuple[Step, ...]:
    """Strides of the batch, the heads and the tokens of each tensor."""
    found = []
    for x in tensors:
        steps = x.stride()
        whole = x.is_aligned and all(s % 16 == 0 for s in steps[:-1])
        found += [Step(s, whole) for s in steps[:3]]
    return tuple(found)


def power_of_two(n: int) -> int:
    """The least power of two that is not below ``n``, and not below one."""
    # Triton's own takes 5 us, and so does its cdiv.
    return 1 << max(n - 1, 0).bit_length()


def cdiv(n: int, size: int) -> int:
    """The number of pieces of a size."""
    return -(-n // size)


def layout_of(x: Tensor) -> Tensor:
    """A tensor of the meta device that lies in memory as ``x`` does."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def plan_of(op: Any, call: Any, target: Target) -> Plan:
    """The plan of a call of an op."""
    layouts = [layout_of(x) if isinstance(x, Tensor) else x for x in call]
    tensors = [x for x in call if isinstance(x, Tensor)]
    # What stands for a tensor that is yet to be made is on the device of the others.
    device = next((x.device for x in tensors if not x.is_meta), call[0].device)
    # torch works out in Python what is like a tensor of the meta device: not for every length.
    is_ahead = any(x.is_meta for x in tensors)
    results = op.results(op.call(*layouts) if is_ahead else call)
    plan = Plan(len(op.tensors), [layout_of(x) for x in results], device)
    places = {i: place for place, i in enumerate(op.tensors)}
    given: list[Any] = []
    for i, (field, x, layout) in enumerate(zip(op.fields, call, layouts, strict=True)):
        if isinstance(x, Tensor):
            if x.is_meta:
                given.append(Operand(places[i], layout, device))
            else:
                is_aligned = x.data_ptr() % 16 == 0
                given.append(Operand(places[i], layout, x.device, is_aligned))
        else:
            given.append(START if field.letter == "s" else x)
    op.plan(op.call(*given), plan, target)
    return plan
