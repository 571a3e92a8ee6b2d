"""The implementations of the kernels, and which one serves a device."""

from __future__ import annotations

from typing import NamedTuple

from posenc.ops import execute, native


class Backend(NamedTuple):
    """One implementation of the kernels, and whether it can run here."""

    name: str
    serves: str
    available: bool
    why: str


def backends() -> list[Backend]:
    """The implementations of the kernels, which devices they serve, and why one is missing.

    That of CUDA also says whether C launches its kernels, or Python and why.

    Examples:
        >>> for backend in backends():
        ...     print(backend.name, "serves", backend.serves)
        c serves cpu
        triton serves cuda
        reference serves every device
    """
    runs, why = execute.status()
    return [
        Backend("c", "cpu", *native.status()),
        Backend("triton", "cuda", runs, f"{why}, {native.launching()}" if runs else why),
        Backend("reference", "every device", True, "plain torch operations"),
    ]
