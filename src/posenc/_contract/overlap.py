"""What may be written in place: tensors that share no elements, and that autograd lets go."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.tracing import has_real_storage


def check_writable(who: str, xs: Sequence[Tensor], *, recorded_by: Sequence[Tensor]) -> None:
    """Refuse one or two tensors that must not be written where they stand.

    Args:
        who: The caller, for the error.
        xs: What is to be written.
        recorded_by: What else it is made of: a gradient to it is recorded too.
    """
    real = has_real_storage(*xs)
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (*xs, *recorded_by))
    for x in xs:
        if has_internal_overlap(x):
            rule = "a tensor must not share memory with itself to be written in place"
            got = f"strides {x.stride()}"
            raise ValueError(checks.message(who, rule, got, "Call contiguous() first."))
        if real and x.is_inference() and not torch.is_inference_mode_enabled():
            rule = "what was made in inference mode must not be written in place outside of it"
            raise ValueError(checks.message(who, rule, "such a tensor", "Call clone() first."))
        if recorded and x.requires_grad and (x if x._base is None else x._base).is_leaf:
            rule = "a leaf that requires a gradient must not be written in place"
            got = "one" if x._base is None else "a view of one"
            raise ValueError(checks.message(who, rule, got, "Rotate what is made of it."))
    if len(xs) == 2 and (xs[0] is xs[1] or (real and overlaps(*xs))):
        rule = "q and k must not share memory to be written in place"
        got = f"{tuple(xs[0].shape)} and {tuple(xs[1].shape)}"
        raise ValueError(checks.message(who, rule, got, "Call clone() on one of them."))


def copy_if_overlapping(xs: Sequence[Tensor], *read: Tensor) -> list[Tensor]:
    """What is ``read`` while ``xs`` are written, copied if it would be written over."""
    if not has_real_storage(*xs, *read):
        return list(read)
    written = [_range(x) for x in xs]
    kept = list(read)
    for i, t in enumerate(read):
        start, end = _range(t)
        for low, high in written:
            if start < high and low < end:
                kept[i] = t.clone()
    return kept


def has_internal_overlap(x: Tensor) -> bool:
    """Whether two elements of ``x`` may be one: a step no longer than what lies within it.

    Examples:
        >>> has_internal_overlap(torch.zeros(1, 3).expand(2, 3))
        True
    """
    if x.is_contiguous():
        return False
    axes = list(zip(x.stride(), x.shape, strict=True))
    if torch.compiler.is_compiling():
        # A compiler that leaves sizes open cannot sort them.
        return any(step == 0 and size > 1 for step, size in axes)
    reach = 0
    for step, size in sorted(axes):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` and ``b``, of as many axes and neither meeting itself, share an element.

    Slices of one tensor are told apart exactly. Views that walk their memory differently are
    taken to meet where their ranges do. Addresses are compared, because a buffer of somebody
    else's may have several storages.

    Examples:
        >>> qkv = torch.zeros(2, 5, 6, 8)
        >>> overlaps(qkv[:, :, :4], qkv[:, :, 4:5]), overlaps(qkv[:, :, :4], qkv[:, :, 3:])
        (False, True)
    """
    if a.numel() == 0 or b.numel() == 0 or a.is_meta:
        return False
    if a.device.type == "mps" and a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        # There it points to an object that knows the address.
        return False
    (start, end), (low, high) = _range(a), _range(b)
    if start >= high or low >= end:
        return False
    if start > low:
        a, b, start, low = b, a, low, start
    ahead, rest = divmod(low - start, a.element_size())
    if rest or a.dtype != b.dtype:
        return True
    walks = []
    for step, size, other, count in zip(a.stride(), a.shape, b.stride(), b.shape, strict=True):
        if size > 1 and count > 1 and step != other:
            return True
        if size > 1 or count > 1:
            walks.append((step if size > 1 else other, size - 1, count - 1))
    return _reached(ahead, sorted(walks, reverse=True))


def _range(x: Tensor) -> tuple[int, int]:
    """The addresses of the first element, and past the last."""
    start = x.data_ptr()
    if x.is_contiguous():
        return start, start + x.nbytes
    last = sum(step * (size - 1) for step, size in zip(x.stride(), x.shape, strict=True))
    return start, start + (last + 1) * x.element_size()


def _reached(ahead: int, walks: list[tuple[int, int, int]]) -> bool:
    """Whether steps, so many forth and so many back of each, can add up to ``ahead``."""
    if not walks:
        return ahead == 0
    (step, forth, back), *shorter = walks
    # All shorter steps together stay within one of these, so only two counts can do.
    return any(
        -back <= count <= forth and _reached(ahead - count * step, shorter)
        for count in (ahead // step, ahead // step + 1)
    )
