"""Workloads to measure: named shapes, with dtype, layout, device and mode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

BASE = 10_000.0
EPS = 1e-6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = ("half", "interleaved")


@dataclass(frozen=True, slots=True)
class Workload:
    """A shape that occurs in models, with its dtype, layout, device and kind of positions."""

    name: str
    batch: int
    heads: int
    key_heads: int
    length: int
    dim: int
    # Position of the first token: the number of tokens in the cache.
    offset: int = 0
    # forward, without gradients; or train, forward and backward.
    mode: str = "forward"
    # Device it was chosen for; it runs on the others too.
    home: str = "cpu"
    # Whether q and k are normalized first: RMSNorm over D, with a weight.
    qk_norm: bool = False
    dtype: torch.dtype = torch.bfloat16
    interleaved: bool = False
    device: str = "cpu"
    # Whether positions are a tensor, with a start of its own for every sequence.
    ids: bool = False

    def __str__(self) -> str:
        return named(self.as_dict())

    @property
    def shape(self) -> str:
        """The sizes, in words."""
        sizes = f"B={self.batch} H={self.heads} Hk={self.key_heads} L={self.length} D={self.dim}"
        start = f" at {self.offset}" if self.offset else ""
        return f"{sizes}{start}{', QK-norm' if self.qk_norm else ''}"

    @property
    def training(self) -> bool:
        """Whether a step has a backward pass."""
        return self.mode == "train"

    @property
    def nbytes(self) -> int:
        """Bytes of q plus k."""
        heads = self.heads + self.key_heads
        return self.batch * heads * self.length * self.dim * self.dtype.itemsize

    @property
    def max_seq_len(self) -> int:
        """Table rows that cover every position of the workload."""
        return self.offset + self.length + (self.batch - 1 if self.ids else 0)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        names = [each.name for each in fields(self)]
        return {
            "case": {name: getattr(self, name) for name in names[: names.index("dtype")]},
            "dtype": next(name for name in DTYPES if DTYPES[name] is self.dtype),
            "layout": LAYOUTS[self.interleaved],
            "device": self.device,
            "positions": "ids" if self.ids else "offset",
            "bytes": self.nbytes,
        }

    def positions(self) -> Tensor:
        """int64 ``[1, T]``, or ``[B, T]`` under ``ids``."""
        first = self.offset + torch.arange(self.batch if self.ids else 1)
        return (first[:, None] + torch.arange(self.length)).to(self.device)

    def pair(self, seed: int) -> tuple[Tensor, Tensor]:
        """Queries and keys ``[B, H, T, D]``, normally distributed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        # Projections write [B, T, H, D], and models rotate a transposed view of that. On the CPU
        # the peers' published numbers are for plain [B, H, T, D] memory.
        on_cpu = self.device == "cpu"

        def draw(heads: int) -> Tensor:
            inner = (heads, self.length) if on_cpu else (self.length, heads)
            shape = (self.batch, *inner, self.dim)
            x = torch.randn(shape, generator=generator, device=self.device).to(self.dtype)
            return x if on_cpu else x.transpose(1, 2)

        return draw(self.heads), draw(self.key_heads)

    def weights(self) -> tuple[Tensor, Tensor]:
        """RMSNorm weights ``[D]`` of queries and keys, around one."""
        generator = torch.Generator(self.device).manual_seed(7)
        rows = torch.rand(2, self.dim, generator=generator, device=self.device)
        q_weight, k_weight = (rows + 0.5).to(self.dtype).unbind()
        return q_weight, k_weight


CASES = {
    case.name: case
    for case in (
        Workload("prefill", 1, 32, 32, 2048, 128),
        Workload("train", 4, 12, 12, 1024, 64, mode="train"),
        Workload("decode", 8, 32, 32, 1, 128, offset=2047),
        # At position 0 nothing rotates, and nothing would be checked.
        Workload("tiny", 1, 1, 1, 1, 64, offset=3),
        Workload("qk-norm", 1, 32, 8, 2048, 128, qk_norm=True),
        Workload("h200-long", 4, 32, 8, 8192, 128, home="cuda"),
        Workload("h200-mid", 1, 32, 8, 4096, 128, home="cuda"),
        Workload("h200-wide", 16, 16, 16, 2048, 64, home="cuda"),
        Workload("h200-decode", 128, 32, 8, 1, 128, offset=4095, home="cuda"),
        Workload("h200-train", 4, 32, 8, 8192, 128, mode="train", home="cuda"),
        Workload("h200-qk-norm", 4, 32, 8, 8192, 128, home="cuda", qk_norm=True),
    )
}


def named(measurement: dict[str, Any]) -> str:
    """The workload of a measurement, in words."""
    case = measurement["case"]
    ids = " ids" if measurement["positions"] == "ids" else ""
    return f"{case['name']} {measurement['dtype']} {measurement['layout']} {case['mode']}{ids}"


def choose(
    names: Iterable[str],
    *,
    dtype: str,
    layout: str,
    device: str,
    positions: str,
    mode: str | None,
) -> list[Workload]:
    """Workloads of the named cases, or of every case at home on ``device``."""
    names = list(names) or [case.name for case in CASES.values() if case.home == device]
    chosen: dict[str, Any] = {"dtype": DTYPES[dtype], "device": device, "ids": positions == "ids"}
    return [
        replace(CASES[name], mode=mode or CASES[name].mode, interleaved=interleaved, **chosen)
        for name in names
        for interleaved in (False, True)
        if layout in ("both", LAYOUTS[interleaved])
    ]
