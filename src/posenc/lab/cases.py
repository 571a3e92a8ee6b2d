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
MODES = ("forward", "train")
POSITIONS = ("offset", "ids")


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

    @property
    def decode(self) -> bool:
        """One token a call: the launch is the cost, and q and k are in the cache in truth too."""
        return self.length == 1

    @property
    def elements(self) -> int:
        """Numbers in q and k together."""
        return self.batch * (self.heads + self.key_heads) * self.length * self.dim

    def __str__(self) -> str:
        shape = f"B={self.batch} H={self.heads} Hk={self.key_heads} L={self.length} D={self.dim}"
        return shape + (f" at {self.offset}" if self.offset else "")


CASES = {
    case.name: case
    for case in (
        Case("prefill", 1, 32, 32, 2048, 128),
        Case("train", 4, 12, 12, 1024, 64, mode="train"),
        Case("decode", 8, 32, 32, 1, 128, offset=2047),
        # At position 0 nothing turns, and nothing would be checked.
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
        tensor([2047])
    """

    case: Case
    dtype: torch.dtype = torch.bfloat16
    interleaved: bool = False
    device: str = "cpu"
    ids: bool = False

    @property
    def layout(self) -> str:
        """Which channels form a pair."""
        return LAYOUTS[self.interleaved]

    @property
    def nbytes(self) -> int:
        """Bytes of q plus k: what a copy reads, and writes."""
        return self.case.elements * self.dtype.itemsize

    @property
    def max_seq_len(self) -> int:
        """Table rows that cover every position of the workload."""
        return self.case.offset + self.case.length + (self.case.batch - 1 if self.ids else 0)

    def positions(self) -> Tensor:
        """int64 ``[T]``, or ``[B, T]`` with a start of its own for every sequence under ``ids``."""
        case = self.case
        row = torch.arange(case.offset, case.offset + case.length, device=self.device)
        return row + torch.arange(case.batch, device=self.device)[:, None] if self.ids else row

    def pair(self, seed: int) -> tuple[Tensor, Tensor]:
        """Queries and keys ``[B, H, T, D]``, normally distributed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        case = self.case
        pair = []
        for heads in (case.heads, case.key_heads):
            # Projections write [B, T, H, D], and models rotate a transposed view of that. On the
            # CPU the peers' published numbers are for plain [B, H, T, D] memory.
            on_cpu = self.device == "cpu"
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
        dtype = next(name for name, dtype in DTYPES.items() if dtype is self.dtype)
        words = [self.case.name, dtype, self.layout, self.case.mode]
        return " ".join(words + (["ids"] if self.ids else []))


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

    Args:
        names: Keys of :data:`CASES`.
        dtype: Key of :data:`DTYPES`.
        layout: ``half``, ``interleaved`` or ``both``.
        device: ``cpu`` or ``cuda``.
        positions: ``offset``, one int for all sequences, or ``ids``, a tensor ``[B, T]``.
        mode: ``forward`` or ``train`` instead of what each case says.

    Examples:
        >>> print(*choose(["tiny"], layout="both"), sep=", ")
        tiny bf16 half forward, tiny bf16 interleaved forward
    """
    names = list(names) or [case.name for case in CASES.values() if case.home == device]
    for name in names:
        _one_of("CASE", name, CASES)
    _one_of("--dtype", dtype, DTYPES)
    _one_of("--layout", layout, (*LAYOUTS, "both"))
    _one_of("--positions", positions, POSITIONS)
    _one_of("--device", device, ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this torch sees no CUDA device. Use --device cpu.")
    if mode is not None:
        _one_of("--mode", mode, MODES)
        normed = [name for name in names if CASES[name].qk_norm]
        if mode == "train" and normed:
            raise ValueError(f"{', '.join(normed)} has no --mode train, only forward.")
    return [
        Workload(
            CASES[name] if mode is None else replace(CASES[name], mode=mode),
            DTYPES[dtype],
            interleaved=interleaved,
            device=device,
            ids=positions == "ids",
        )
        for name in names
        for interleaved in (False, True)
        if layout in ("both", LAYOUTS[interleaved])
    ]


def _one_of(what: str, got: str, known: Iterable[str]) -> None:
    if got not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}, got {got!r}.")
