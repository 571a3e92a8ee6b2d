"""What is measured: named shapes, and a shape with everything a run has to decide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

BASE = 10_000.0
EPS = 1e-6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = ("half", "interleaved")


@dataclass(frozen=True, slots=True)
class Case:
    """A shape that models have.

    Attributes:
        name: What the command line calls it.
        batch: Sequences ``B``.
        heads: Query heads ``H``.
        key_heads: Key heads; fewer than ``heads`` under grouped-query attention.
        length: Tokens ``T`` of one call.
        dim: Channels ``D`` of a head.
        offset: Position of the first token: what the cache holds.
        mode: ``forward`` without gradients, or ``train``, forward and backward.
        home: Device it was chosen for; it runs on the others too.
        qk_norm: Whether q and k are normalized (RMSNorm over ``D``, with a weight) first.
    """

    name: str
    batch: int
    heads: int
    key_heads: int
    length: int
    dim: int
    offset: int = 0
    mode: str = "forward"
    home: str = "cpu"
    qk_norm: bool = False

    def __str__(self) -> str:
        shape = f"B={self.batch} H={self.heads} Hk={self.key_heads} L={self.length} D={self.dim}"
        start = f" at {self.offset}" if self.offset else ""
        return f"{shape}{start}{', QK-norm' if self.qk_norm else ''}"


CASES = {
    case.name: case
    for case in (
        Case("prefill", 1, 32, 32, 2048, 128),
        Case("train", 4, 12, 12, 1024, 64, mode="train"),
        Case("decode", 8, 32, 32, 1, 128, offset=2047),
        # At position 0 nothing rotates, and nothing would be checked.
        Case("tiny", 1, 1, 1, 1, 64, offset=3),
        Case("qk-norm", 1, 32, 8, 2048, 128, qk_norm=True),
        Case("h200-long", 4, 32, 8, 8192, 128, home="cuda"),
        Case("h200-mid", 1, 32, 8, 4096, 128, home="cuda"),
        Case("h200-wide", 16, 16, 16, 2048, 64, home="cuda"),
        Case("h200-decode", 128, 32, 8, 1, 128, offset=4095, home="cuda"),
        Case("h200-train", 4, 32, 8, 8192, 128, mode="train", home="cuda"),
        Case("h200-qk-norm", 4, 32, 8, 8192, 128, home="cuda", qk_norm=True),
    )
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A case with its dtype, layout, device and way of naming positions.

    Examples:
        >>> work = Workload(CASES["decode"], torch.bfloat16, interleaved=False)
        >>> print(work)
        decode bf16 half forward
        >>> work.nbytes
        131072
        >>> work.positions()
        tensor([[2047]])
    """

    case: Case
    dtype: torch.dtype = torch.bfloat16
    interleaved: bool = False
    device: str = "cpu"
    ids: bool = False

    @property
    def dtype_name(self) -> str:
        """Key of :data:`DTYPES`."""
        return next(name for name, dtype in DTYPES.items() if dtype is self.dtype)

    @property
    def layout(self) -> str:
        """Which channels form a pair."""
        return LAYOUTS[self.interleaved]

    @property
    def training(self) -> bool:
        """Whether a step has a backward pass."""
        return self.case.mode == "train"

    @property
    def nbytes(self) -> int:
        """Bytes of q plus k: what a copy reads, and writes."""
        case = self.case
        heads = case.heads + case.key_heads
        return case.batch * heads * case.length * case.dim * self.dtype.itemsize

    @property
    def max_seq_len(self) -> int:
        """Table rows that cover every position of the workload."""
        return self.case.offset + self.case.length + (self.case.batch - 1 if self.ids else 0)

    def positions(self) -> Tensor:
        """int64 ``[1, T]``; with ``ids`` ``[B, T]``, where every sequence has its own start."""
        first = self.case.offset + torch.arange(self.case.batch if self.ids else 1)
        return (first[:, None] + torch.arange(self.case.length)).to(self.device)

    def pair(self, seed: int) -> tuple[Tensor, Tensor]:
        """Queries and keys ``[B, H, T, D]``, normally distributed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        case = self.case
        # Projections write [B, T, H, D], and models rotate a transposed view of that. On the CPU
        # the peers' published numbers are for plain [B, H, T, D] memory.
        on_cpu = self.device == "cpu"
        pair = []
        for heads in (case.heads, case.key_heads):
            inner = (heads, case.length) if on_cpu else (case.length, heads)
            shape = (case.batch, *inner, case.dim)
            x = torch.randn(shape, generator=generator, device=self.device).to(self.dtype)
            pair.append(x if on_cpu else x.transpose(1, 2))
        return pair[0], pair[1]

    def weights(self) -> tuple[Tensor, Tensor]:
        """RMSNorm weights ``[D]`` of queries and keys, around one."""
        generator = torch.Generator(self.device).manual_seed(7)
        rows = torch.rand(2, self.case.dim, generator=generator, device=self.device)
        q_weight, k_weight = (rows + 0.5).to(self.dtype).unbind()
        return q_weight, k_weight

    def __str__(self) -> str:
        words = f"{self.case.name} {self.dtype_name} {self.layout} {self.case.mode}"
        return words + (" ids" if self.ids else "")


def choose(
    names: Iterable[str] = (),
    *,
    dtype: str = "bf16",
    layout: str = "both",
    device: str = "cpu",
    positions: str = "offset",
    mode: str | None = None,
) -> list[Workload]:
    """Workloads of the named cases, or of every case at home on ``device``.

    Examples:
        >>> print(*choose(["tiny"], layout="both"), sep=", ")
        tiny bf16 half forward, tiny bf16 interleaved forward
    """
    names = list(names) or [case.name for case in CASES.values() if case.home == device]
    allowed: list[tuple[str, str, Iterable[str]]] = [
        *(("CASE", name, CASES) for name in names),
        ("--dtype", dtype, DTYPES),
        ("--layout", layout, (*LAYOUTS, "both")),
        ("--positions", positions, ("offset", "ids")),
        ("--device", device, ("cpu", "cuda")),
        ("--mode", mode or "forward", ("forward", "train")),
    ]
    for flag, got, known in allowed:
        if got not in known:
            raise ValueError(f"{flag} must be one of {', '.join(known)}, got {got!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this torch sees no CUDA device. Use --device cpu.")
    cases = [replace(CASES[name], mode=mode or CASES[name].mode) for name in names]
    if normed := [case.name for case in cases if case.qk_norm and case.mode == "train"]:
        raise ValueError(f"{', '.join(normed)} has no --mode train, only forward.")
    return [
        Workload(case, DTYPES[dtype], interleaved, device, ids=positions == "ids")
        for case in cases
        for interleaved in (False, True)
        if layout in ("both", LAYOUTS[interleaved])
    ]
