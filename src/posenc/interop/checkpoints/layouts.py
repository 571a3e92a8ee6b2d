"""Pair layouts: which rows of a projection form pairs, and how they move between layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from posenc._contract import checks

Layout = Literal["half", "interleaved"]
LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")
OTHER: dict[Layout, Layout] = {"half": "interleaved", "interleaved": "half"}
# Rows of any dtype are moved as integers of its size, because not all dtypes can be indexed.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True)
class Heads:
    """How a projection's rows are divided into heads, and which of their channels rotate.

    Args:
        num_heads: Heads of queries.
        head_dim: Channels of a head.
        num_kv_heads: Heads of keys; None means ``num_heads``.
        rotary_dim: Channels of a head that are rotated; None means all.
        last: The rotated channels are a head's last ones (multi-head latent attention).
        latent: Rows before the shared rotated key, for kind ``"kv_a"``: DeepSeek's
            ``kv_lora_rank``.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    rotary_dim: int | None = None
    last: bool = False
    latent: int = 0

    def __post_init__(self) -> None:
        checks.integer("Heads", "num_heads", self.num_heads)
        checks.integer("Heads", "head_dim", self.head_dim)
        checks.integer("Heads", "num_kv_heads", self.kv_heads)
        checks.even("Heads", "rotary_dim", self.rotated)
        checks.integer("Heads", "latent", self.latent, least=0)
        if self.rotated > self.head_dim:
            rule = f"rotary_dim must be at most head_dim={self.head_dim}"
            checks.fail("Heads", rule, self.rotated, "Check the config.")
        if self.num_heads % self.kv_heads:
            rule = f"num_heads must be a multiple of num_kv_heads={self.kv_heads}"
            checks.fail("Heads", rule, self.num_heads, "Check the config.")

    @property
    def kv_heads(self) -> int:
        """Heads of keys."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def rotated(self) -> int:
        """Channels of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


class ProjectionRows(NamedTuple):
    """The rows of a projection: ``runs`` one after the other, all of them ``repeats`` times.

    A run is ``(part, heads, width)``, with part "q" for queries, "k" for keys, "" for other rows.
    """

    repeats: int
    runs: Sequence[tuple[str, int, int]]

    @property
    def total(self) -> int:
        """How many rows there are."""
        return self.repeats * sum(heads * width for _, heads, width in self.runs)


def projection_rows(kind: str, heads: Heads, shape: Sequence[int] = ()) -> ProjectionRows:
    """The rows of a projection of this kind, or the channels of a norm of this shape."""
    size, h, kv, d = math.prod(shape), heads.num_heads, heads.kv_heads, heads.head_dim
    kinds = {
        # q_proj, q_b_proj; a gated one has a gate after each head (Qwen3-Next).
        "q": ProjectionRows(1, [("q", h, d)]),
        "q_gated": ProjectionRows(h, [("q", 1, d), ("", 1, d)]),
        "k": ProjectionRows(1, [("k", kv, d)]),
        # All queries, all keys, all values (Phi-3, Baichuan, DBRX).
        "qkv": ProjectionRows(1, [("q", h, d), ("k", kv, d), ("", kv, d)]),
        # For each key head: its queries, the key, the value (GPT-NeoX, Falcon, InternLM2).
        "qkv_grouped": ProjectionRows(kv, [("q", h // kv, d), ("k", 1, d), ("", 1, d)]),
        # Written for four accelerators: each quarter has its own queries, values, keys.
        "qkv_codegen": ProjectionRows(4, [("q", h // 4, d), ("", h // 4, d), ("k", h // 4, d)]),
        # The latent, then one key that every head shares (DeepSeek's kv_a_proj_with_mqa).
        "kv_a": ProjectionRows(1, [("", 1, heads.latent), ("k", 1, heads.rotated)]),
        # A weight for each channel of one head, or of all.
        "norm": ProjectionRows(1, [("q", size // d, d)]),
    }
    checks.choice("permute", "kind", kind, tuple(kinds))
    sizes = sorted({d, h * d, kv * d})
    if kind == "norm" and size not in sizes:
        rule = f"a norm of queries or keys must have {' or '.join(map(str, sizes))} weights"
        checks.fail("permute", rule, f"shape {tuple(shape)}", f"Check {heads}.")
    return kinds[kind]


def order(rows: ProjectionRows, heads: Heads, to: Layout) -> Tensor:
    """Where each row of the result comes from: ``new = old[order]``."""
    index = torch.arange(rows.total, device="cpu")
    # Half holds all first channels of the pairs, then all second.
    grid = (2, -1) if to == "interleaved" else (-1, 2)
    sizes = [count * width for _, count, width in rows.runs]
    runs = index.view(rows.repeats, -1).split(sizes, dim=-1)
    for (part, count, width), run in zip(rows.runs, runs, strict=True):
        if part:
            first = width - heads.rotated if heads.last else 0
            channels = run.unflatten(-1, (count, width))[..., first : first + heads.rotated]
            # A single pair is a view of itself.
            channels.copy_(channels.unflatten(-1, grid).mT.flatten(-2).clone())
    return index


def permute(tensor: Tensor, kind: str, heads: Heads, *, to: Layout, dim: int = 0) -> Tensor:
    r"""Move the channels of queries and keys from the other layout ``to`` this one.

    .. math:: \text{half } (i, P + i) \longleftrightarrow \text{interleaved } (2i, 2i + 1),
              \qquad i = 0, \dots, P - 1

    Rows move and no bit of them changes, so the way back is exact, in every dtype. Weights,
    biases, ``lora_B`` and scales for each row take the same ``kind``; ``lora_A`` stays as it is.

    Args:
        tensor: A weight ``(rows, in)``, a bias ``(rows,)``, or anything else with those rows.
        kind: ``"q"``, ``"k"``, ``"q_gated"``; fused ``"qkv"`` (all queries, all keys, all
            values), ``"qkv_grouped"`` (key head by key head: GPT-NeoX, Falcon),
            ``"qkv_codegen"``; ``"kv_a"`` (DeepSeek's latent and shared key); ``"norm"`` for the
            weight of a norm of queries or keys, ``(D,)``, ``(H * D,)`` or ``(H, D)``.
        heads: How the rows are divided.
        to: The layout the result has; the input has the other one.
        dim: The axis of the rows.

    Returns:
        A new tensor like ``tensor``.

    Examples:
        >>> bias = torch.arange(8)
        >>> permute(bias, "q", Heads(num_heads=1, head_dim=8), to="interleaved")
        tensor([0, 4, 1, 5, 2, 6, 3, 7])
        >>> permute(bias, "k", Heads(num_heads=2, head_dim=4, rotary_dim=2), to="half")
        tensor([0, 1, 2, 3, 4, 5, 6, 7])

    References:
        Su et al., *RoFormer*, 2021, section 3.4.2, pairs neighbours; Wang & Komatsuzaki's GPT-J
        does too, and Black et al., *GPT-NeoX-20B*, 2022, pairs halves.
    """
    checks.choice("permute", "to", to, LAYOUTS)
    if not (isinstance(tensor, Tensor) and isinstance(kind, str) and isinstance(heads, Heads)):
        rule = "tensor must be a torch.Tensor, kind a string and heads a Heads"
        got = ", ".join(map(checks.describe, (tensor, kind, heads)))
        checks.fail("permute", rule, got, "Pass one weight, 'q' and Heads(32, 128).", TypeError)
    rows = projection_rows(kind, heads, tensor.shape)
    if kind == "norm":
        return take(tensor, order(rows, heads, to))
    if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != rows.total:
        rule = f"a tensor of kind {kind!r} must have {rows.total} rows in dimension {dim}"
        got = f"shape {tuple(tensor.shape)}"
        checks.fail("permute", rule, got, f"Check kind, dim and {heads}.")
    return take(tensor, order(rows, heads, to), dim)


def take(tensor: Tensor, rows: Tensor, dim: int = 0) -> Tensor:
    """``tensor`` with its rows in this order, or its elements if ``rows`` has one for each."""
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
    if tensor.shape[dim] != len(rows):
        bits, dim = bits.flatten(), 0
    moved = bits.index_select(dim, rows.to(tensor.device))
    return moved.view(tensor.shape).view(tensor.dtype)
