"""Whether tensors that are to be written in place share elements."""

from __future__ import annotations

import torch
from torch import Tensor


def meets_itself(x: Tensor) -> bool:
    """Whether two elements of ``x`` may be one: a step no longer than what lies within it.

    Examples:
        >>> meets_itself(torch.zeros(2, 3)), meets_itself(torch.zeros(1, 3).expand(2, 3))
        (False, True)
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


def meet(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` and ``b``, neither of which meets itself, share an element.

    Slices of one tensor are told apart exactly. Views of one storage that walk it differently are
    taken to meet where their ranges do.

    Examples:
        >>> qkv = torch.zeros(2, 5, 6, 8)
        >>> meet(qkv[:, :, :4], qkv[:, :, 4:5]), meet(qkv[:, :, :4], qkv[:, :, 3:])
        (False, True)
    """
    if a.numel() == 0 or b.numel() == 0 or a.is_meta:
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    if a.element_size() != b.element_size():
        return max(a.data_ptr(), b.data_ptr()) < min(_end(a), _end(b))
    if a.storage_offset() > b.storage_offset():
        a, b = b, a
    ahead = int(b.storage_offset() - a.storage_offset())
    if ahead > sum(step * (size - 1) for step, size in zip(a.stride(), a.shape, strict=True)):
        return False
    walks = []
    for step, size, other, count in zip(a.stride(), a.shape, b.stride(), b.shape, strict=True):
        if size > 1 and count > 1 and step != other:
            return True
        if size > 1 or count > 1:
            walks.append((step if size > 1 else other, size - 1, count - 1))
    return a.dtype != b.dtype or _reached(ahead, sorted(walks, reverse=True))


def _end(x: Tensor) -> int:
    """The address past the last element."""
    last = sum(step * (size - 1) for step, size in zip(x.stride(), x.shape, strict=True))
    return x.data_ptr() + (last + 1) * x.element_size()


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
