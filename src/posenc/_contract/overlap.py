"""Checks before a tensor is written in place: shared memory, and inference mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.tracing import has_real_storage


def check_writable(who: str, xs: Sequence[Tensor]) -> None:
    """Refuse one or two tensors that must not be written in place.

    A leaf that requires a gradient is refused by autograd.
    """
    real = has_real_storage(*xs)
    for x in xs:
        check_no_internal_overlap(who, x)
        if real:
            check_inference_mode(who, x)
    if len(xs) == 2 and (xs[0] is xs[1] or (real and overlaps(*xs))):
        rule = "q and k must not share memory to be written in place"
        got = f"{tuple(xs[0].shape)} and {tuple(xs[1].shape)}"
        checks.fail(who, rule, got, "Call clone() on one of them.")


def check_no_internal_overlap(who: str, x: Tensor) -> None:
    """Refuse an expanded tensor; overlapping windows are not detected, as in torch."""
    steps = () if x.is_contiguous() else zip(x.stride(), x.shape, strict=True)
    if any(step == 0 and size > 1 for step, size in steps):
        rule = "a tensor must not share memory with itself to be written in place"
        checks.fail(who, rule, f"strides {x.stride()}", "Call contiguous() first.")


def check_inference_mode(who: str, x: Tensor) -> None:
    """Refuse an inference tensor outside inference mode."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        rule = "an inference tensor must not be written in place outside inference mode"
        checks.fail(who, rule, "one", "Call clone() first.")


def overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` and ``b`` may share an element.

    They do not if their address ranges are apart, or if they are slices of one buffer along one
    axis, as queries and keys of a fused projection are. All other tensors count as overlapping.

    Examples:
        >>> qkv = torch.zeros(2, 5, 6, 8)
        >>> overlaps(qkv[:, :, :4], qkv[:, :, 4:5]), overlaps(qkv[:, :, :4], qkv[:, :, 3:])
        (False, True)
    """
    if a.numel() == 0 or b.numel() == 0 or a.is_meta:
        return False
    if a.device.type == "mps" and a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        # On MPS, data_ptr() is not an address in memory: it identifies the storage.
        return False
    distance = b.data_ptr() - a.data_ptr()
    if distance >= _extent(a) or -distance >= _extent(b):
        return False
    # In a buffer of rows of `row` bytes, each tensor has the same columns of every row.
    axes = _axes(a) + _axes(b)
    for row in {step for step, _ in axes if step}:
        first = distance % row
        apart = _extent(a, row) <= first and first + _extent(b, row) <= row
        if apart and all(step % row == 0 for step, _ in axes if step > row):
            return False
    return True


def _axes(x: Tensor) -> list[tuple[int, int]]:
    """The stride in bytes and the size of each axis that has more than one index."""
    steps = zip(x.stride(), x.shape, strict=True)
    return [(step * x.element_size(), size) for step, size in steps if size > 1]


def _extent(x: Tensor, row: int | None = None) -> int:
    """The bytes from the first element to beyond the last, or along strides below ``row`` only."""
    axes = [(step, size) for step, size in _axes(x) if row is None or step < row]
    return sum(step * (size - 1) for step, size in axes) + x.element_size()
