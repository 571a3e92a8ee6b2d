"""Numbers that a device is given once."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from posenc._contract.tracing import is_plain, keep_alive_for_cuda_graph


def constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``numbers`` as a tensor on ``device``, not to be written to.

    They are copied there at the first call and kept: a copy waits for the device, and a CUDA graph
    cannot hold one.

    Examples:
        >>> constant((1.0, 0.25), torch.float64, torch.device("cpu"))
        tensor([1.0000, 0.2500], dtype=torch.float64)
    """
    if is_plain():
        kept = _kept(numbers, dtype, device)
        keep_alive_for_cuda_graph(None, (kept,))
        return kept
    return torch.tensor(numbers, dtype=dtype, device=device)


# A spectrum takes three of these, of 64 numbers for heads of 128 channels.
@lru_cache(maxsize=256)
def _kept(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # A tensor born in inference mode could not serve a training step later.
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)
