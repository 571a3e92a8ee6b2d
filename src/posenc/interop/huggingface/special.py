"""Rotating functions of single models, found by the names of their parameters.

Each of ours has the parameters of the one it replaces. ``PROBES`` maps those parameters to our
function and to arguments on which the two are compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from posenc.interop.huggingface import rotation
from posenc.interop.huggingface.probing import WIDEN, Known
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import cos_sin


def _adjacent(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotation.rotate_all([x], cos, sin, interleaved=True, interleaved_out=True)[0]


def sine_first(
    sinusoidal_pos: Tensor,
    query_layer: Tensor,
    key_layer: Tensor,
    value_layer: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """RoFormer: one table, sines and then cosines; values are rotated as well if given."""
    sin, cos = sinusoidal_pos.chunk(2, dim=-1)
    xs = (query_layer, key_layer, value_layer)
    return tuple(_adjacent(x, cos, sin) for x in xs if x is not None)


def before_the_heads(
    self: Any, hidden_states: Tensor, relative_position_embeddings: Tensor
) -> Tensor:
    """Speech conformers: hidden states are rotated before the projections."""
    length, pairs = hidden_states.shape[1], self.head_size // 2
    cos, sin = relative_position_embeddings[:, :length, 0, :, :pairs].unbind(0)
    states = hidden_states.unflatten(-1, (self.num_heads, self.head_size))
    layout = {"interleaved": False, "interleaved_out": False}
    return rotation.rotate_all([states], cos, sin, **layout)[0].flatten(-2)


def memories(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_k_exclude_rope: int = 0,
    repeat_freqs_k: bool = False,
) -> tuple[Tensor, Tensor]:
    """SAM 2: the last keys are not rotated, and the others may be several frames of one grid."""
    frames = (k.shape[-2] - num_k_exclude_rope) // q.shape[-2] if repeat_freqs_k else 1
    return grouped_memories(q, k, cos, sin, cos, sin, num_k_exclude_rope, frames)


def grouped_memories(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor,
    sin_k: Tensor,
    num_k_exclude_rope: int = 0,
    repeat_freqs_k: int = 1,
) -> tuple[Tensor, Tensor]:
    """EdgeTAM: the last keys of each group are rotated, one by each row of ``cos_k``."""
    y = _adjacent(q, cos[..., ::2], sin[..., ::2])
    rotating = k.shape[-2] - num_k_exclude_rope
    if rotating == 0:
        return y, k
    groups = k[..., :rotating, :].unflatten(-2, (repeat_freqs_k, -1))
    first = groups.shape[-2] - cos_k.shape[-2]
    c, s = cos_k[..., ::2].unsqueeze(-3), sin_k[..., ::2].unsqueeze(-3)
    rotated = _adjacent(groups[..., first:, :], c, s)
    keys = torch.cat((groups[..., :first, :], rotated), dim=-2).flatten(-3, -2)
    return y, torch.cat((keys, k[..., rotating:, :]), dim=-2)


def two_angles(x: Tensor, pos: Tensor) -> Tensor:
    """V-JEPA 2: channel ``c`` has rate ``c`` modulo ``P``, so a pair has two angles.

    The result is the even channels of one rotation and the odd channels of another.
    """
    tables = cos_sin(pos.long(), Spectrum(x.shape[-1]))
    c, s = (torch.cat((t, t), dim=-1).to(x.dtype) for t in tables)
    even = _adjacent(x, c[..., ::2], s[..., ::2])
    odd = _adjacent(x, c[..., 1::2], s[..., 1::2])
    return torch.stack((even[..., ::2], odd[..., 1::2]), dim=-1).flatten(-2)


def _random(*shape: int) -> Tensor:
    made = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=made, dtype=torch.float32, device="cpu")


def _tables(form: str, *shape: int) -> tuple[Tensor, Tensor]:
    phi = WIDEN[form](_random(*shape))
    return phi.cos(), phi.sin()


def _probes() -> Iterator[tuple[Known, list[tuple[Any, ...]]]]:
    q, k, more = _random(2, 3, 5, 8), _random(2, 1, 5, 8), _random(2, 1, 12, 8)
    ids = torch.tensor([[0, 3, 1, 2, 6], [5, 4, 3, 2, 1]])
    line = torch.cat(_tables("single", 1, 1, 5, 4)[::-1], dim=-1)
    yield Known("sine first", "interleaved", sine_first), [(line, q, k), (line, q, k, q)]
    conformer = SimpleNamespace(num_heads=3, head_size=8)
    states, both = _random(2, 5, 24), torch.stack(_tables("doubled", 7, 1, 1, 4))
    yield Known("before the heads", "half", before_the_heads), [(conformer, states, both)]
    grid, keys = _tables("repeated", 1, 1, 5, 4), _tables("repeated", 1, 1, 3, 4)
    memory = [(q, k, *grid), (q, more[..., :7, :], *grid, 2), (q, more, *grid, 2, True)]
    yield Known("memories", "interleaved", memories), [*memory, (q, k, *grid, 5)]
    groups = [(q, more[..., :3, :], *grid, *keys), (q, more, *grid, *keys, 2, 2)]
    groups += [(q, k, *grid, *keys, 5)]
    yield Known("grouped memories", "interleaved", grouped_memories), groups
    angles = [(q, torch.arange(5)), (k, ids[:, None])]
    yield Known("two angles to a pair", "interleaved", two_angles), angles


# Probes are CPU tensors, whatever the caller's default device is.
with torch.device("cpu"):
    PROBES = {
        tuple(inspect.signature(known.function).parameters): (known, tries)
        for known, tries in _probes()
    }
