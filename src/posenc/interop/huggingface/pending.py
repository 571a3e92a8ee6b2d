"""The result of an RMSNorm that waits for its rotation, so that one kernel can compute both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posenc import kernels
from posenc.kernels import Norm, Rows, Spec


class NormCall:
    """One call of a norm: what it was called with, and its result once that is computed."""

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        x: Tensor,
        weight: Tensor,
        eps: float,
        shift: float,
    ) -> None:
        self.forward, self.x, self.weight, self.eps, self.shift = forward, x, weight, eps, shift
        self.result: Tensor | None = None
        # A trial sets this, to be told whether one kernel takes the norm and the rotation.
        self.decided: Callable[[bool], None] | None = None


class Pending:
    """The result of a norm, in a view of it, that is computed when it is needed.

    ``transpose``, ``view``, ``reshape`` and ``unflatten`` give another view, and our rotation
    normalises and rotates in one kernel. Every other operation takes the result of the norm's own
    forward. This is no tensor, so code that knows nothing of it fails, rather than read what is not
    normalised.
    """

    def __init__(
        self, call: NormCall, x: Tensor, heads: int | None = None, views: tuple[Any, ...] = ()
    ) -> None:
        self.call, self.x, self._views = call, x, views
        # The axis of the heads, counted from the end, if the norm is over all of them.
        self._heads = heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*computed(args), **computed(kwargs or {}))

    @property
    def shape(self) -> torch.Size:
        """Shape of the view."""
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the result."""
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        """Device of the result."""
        return self.x.device

    def dim(self) -> int:
        """Axes of the view."""
        return self.x.dim()

    def transpose(self, a: int, b: int) -> Any:
        """Swap two axes."""
        a, b = (axis if axis < 0 else axis - self.dim() for axis in (a, b))
        moved: dict[int | None, int] = {a: b, b: a}
        heads = moved.get(self._heads, self._heads)
        return self._view("transpose", (a, b), heads, keeps_rows=-1 not in (a, b))

    def view(self, *shape: Any) -> Any:
        """Give it another shape."""
        return self._reshape("view", shape)

    def reshape(self, *shape: Any) -> Any:
        """Give it another shape."""
        return self._reshape("reshape", shape)

    def unflatten(self, dim: int, sizes: Any) -> Any:
        """Split an axis."""
        return self._reshape("unflatten", (dim, sizes))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself, if it has that dtype and device."""
        x = self.x.to(*args, **kwargs)
        same = x.dtype == self.dtype and x.device == self.device
        return self if same else self.tensor().to(*args, **kwargs)

    def _reshape(self, name: str, args: tuple[Any, ...]) -> Any:
        width, before = self.call.weight.shape[0], self.x
        after = _viewed(before, name, args) if self._heads is None else before
        if after.shape[-1] == width:
            return self._view(name, args, None, keeps_rows=self._heads is None)
        splits = after.dim() > 1 and after.shape[-2] * after.shape[-1] == width
        return self._view(name, args, -2, keeps_rows=self._heads is None and splits)

    def _view(self, name: str, args: tuple[Any, ...], heads: int | None, keeps_rows: bool) -> Any:
        if not keeps_rows:
            return getattr(self.tensor(), name)(*args)
        x = _viewed(self.x, name, args)
        return Pending(self.call, x, heads, (*self._views, (name, args)))

    def tensor(self) -> Tensor:
        """The result, computed by the norm's own forward if it was not yet."""
        call = self.call
        if call.result is None:
            call.result = call.forward(call.x)
            if call.decided is not None:
                call.decided(False)
        made = call.result
        for name, args in self._views:
            made = getattr(made, name)(*args)
        return made

    def is_waiting(self) -> bool:
        """Whether one kernel may compute the norm and the rotation, with nobody watching."""
        call = self.call
        return call.result is None and call.decided is None and self._heads in (None, -3)

    def rotate(self, cos: Tensor, sin: Tensor, spec: Spec) -> Tensor:
        """The result rotated; ``[B, H, T, D]`` in this view."""
        call = self.call
        if call.result is not None or self._heads not in (None, -3):
            return kernels.rotate([self.tensor()], cos, sin, Rows(), spec)[0]
        if call.decided is not None:
            call.decided(True)
        norm = Norm(call.eps, call.shift, self._heads is not None)
        return kernels.norm_rotate(self.x, call.weight, cos, sin, Rows(), spec, norm)


def _viewed(x: Tensor, name: str, args: tuple[Any, ...]) -> Tensor:
    # The input may have no such view where the result has one.
    viewed: Tensor = getattr(x, "reshape" if name == "view" else name)(*args)
    return viewed


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: Pending, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*computed(args))

    return operator


# Python looks operators up in the class, where __getattr__ is not asked.
for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    for _side in ("", "r"):
        setattr(Pending, f"__{_side}{_name}__", _operator(f"__{_side}{_name}__"))
for _name in ("__neg__", "__getitem__", "__setitem__", "__len__"):
    setattr(Pending, _name, _operator(_name))


def computed(value: Any) -> Any:
    """``value`` with tensors for what is pending in it, also inside lists and dictionaries."""
    if isinstance(value, Pending):
        return value.tensor()
    if isinstance(value, dict):
        return {key: computed(one) for key, one in value.items()}
    return type(value)(map(computed, value)) if type(value) in (list, tuple) else value


# A new function object for each patch would be compiled again.
@functools.cache
def taking_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, called with tensors for what is pending in its arguments."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*computed(args), **computed(kwargs))

    return called
