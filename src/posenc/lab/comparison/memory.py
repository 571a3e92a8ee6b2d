"""How much memory a call holds at its worst."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import profile


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most bytes that ``call`` had allocated at one time, and not given back.

    Every allocation and release of torch's CPU allocator is counted, those inside operations too;
    the sum is the same on a busy machine.

    Examples:
        >>> import torch
        >>> x = torch.zeros(1000)
        >>> peak_bytes(lambda: (x + 1) * 2) // 1000
        8
    """
    # The profiler writes a line to stderr when it starts and when it stops, unless told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(profile_memory=True) as watched:
        call()
    held = peak = 0
    for event in watched.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
