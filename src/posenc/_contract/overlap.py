"""Checks before a tensor is written in place: shared memory, and the rules of autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.tracing import has_real_storage, view_base


def check_writable(who: str, xs: Sequence[Tensor], *, recorded_by: Sequence[Tensor]) -> None:
    """Refuse one or two tensors that must not be written in place.

    If a tensor in ``recorded_by`` requires a gradient, autograd records the write too.
    """
    real = has_real_storage(*xs)
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (*xs, *recorded_by))
    for x in xs:
        check_no_internal_overlap(who, x)
        if real:
            check_inference_mode(who, x)
        base = view_base(x)
        if recorded and x.requires_grad and (x if base is None else base).is_leaf:
            rule = "a leaf that requires a gradient must not be written in place"
            got = "one" if base is None else "a view of one"
            checks.fail(who, rule, got, "Rotate a clone of it.")
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
    """Whether ``a`` and ``b``, with the same number of axes, share an element.

    The answer is exact for tensors of equal strides, such as slices of one buffer; other tensors
    count as overlapping if their address ranges do.

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
    (a_start, a_end), (b_start, b_end) = _address_range(a), _address_range(b)
    if a_end <= b_start or b_end <= a_start:
        return False
    distance, misaligned = divmod(b_start - a_start, a.element_size())
    if misaligned or a.dtype != b.dtype:
        return True
    axes = []
    for step, size, step_b, size_b in zip(a.stride(), a.shape, b.stride(), b.shape, strict=True):
        if size > 1 and size_b > 1 and step != step_b:
            return True
        if size > 1 or size_b > 1:
            axes.append((step if size > 1 else step_b, size, size_b))
    # Two elements coincide if the index differences times the strides add up to the distance.
    # The smaller strides together span less than one larger stride, so that only two index
    # differences are possible along each axis.
    remaining = {distance}
    for step, size, size_b in sorted(axes, reverse=True):
        candidates = [(d, n) for d in remaining for n in (d // step, d // step + 1)]
        remaining = {d - n * step for d, n in candidates if -size_b < n < size}
    return 0 in remaining


def _address_range(x: Tensor) -> tuple[int, int]:
    """The address of the first element, and the address after the last."""
    start = x.data_ptr()
    if x.is_contiguous():
        return start, start + x.nbytes
    last = sum(step * (size - 1) for step, size in zip(x.stride(), x.shape, strict=True))
    return start, start + (last + 1) * x.element_size()
