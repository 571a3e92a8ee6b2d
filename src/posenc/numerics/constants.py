"""Constant tensors, copied to a device once, and descriptions that are compared by value."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from posenc._contract.tracing import is_plain, keep_alive_for_cuda_graph


def constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``numbers`` as a read-only tensor on ``device``, cached.

    The first call copies them there. A copy waits for the device, and cannot be captured in a
    CUDA graph.
    """
    if is_plain():
        cached = _cached(numbers, dtype, device)
        keep_alive_for_cuda_graph(None, (cached,))
        return cached
    return torch.tensor(numbers, dtype=dtype, device=device)


# A spectrum takes three entries, of 64 numbers each for heads of 128 channels.
@lru_cache(maxsize=256)
def _cached(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # An inference tensor could not be used in a training step later.
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


class ByValue:
    """Base class: two objects are equal if their class and attributes are, fields or not.

    Rules and axes are part of the keys of tables.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), frozenset(vars(self).items())))
