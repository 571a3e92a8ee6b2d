"""Rotating functions with a form of their own: found by their parameters, then tried like any.

Each of ours keeps the parameters of the one it replaces. ``PROBES`` holds, for those parameters,
our function, its variant and layout in words, and arguments to compare the two on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from posenc.interop.huggingface.rotation import rotate_all
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import cos_sin

_HALVES = {"interleaved": False, "interleaved_out": False}
_ADJACENT = {"interleaved": True, "interleaved_out": True}


def with_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, ...]:
    """CLVP: values turn as well, by rows picked from a table."""
    pairs = cos.shape[-1] // 2
    tables = (t[..., :pairs][position_ids].unsqueeze(unsqueeze_dim) for t in (cos, sin))
    c, s = tables
    return tuple(rotate_all([x], c, s, **_HALVES)[0] for x in (q, k, v))


def sine_first(
    sinusoidal_pos: Tensor,
    query_layer: Tensor,
    key_layer: Tensor,
    value_layer: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """RoFormer: one table, sines and then cosines; values turn as well if they are given."""
    sin, cos = sinusoidal_pos.chunk(2, dim=-1)
    xs = [x for x in (query_layer, key_layer, value_layer) if x is not None]
    return tuple(rotate_all([x], cos, sin, **_ADJACENT)[0] for x in xs)


def before_the_heads(
    self: Any, hidden_states: Tensor, relative_position_embeddings: Tensor
) -> Tensor:
    """The conformers of speech: states turn before queries and keys are made of them."""
    length, pairs = hidden_states.shape[1], self.head_size // 2
    cos, sin = relative_position_embeddings[:, :length, 0, :, :pairs].unbind(0)
    states = hidden_states.unflatten(-1, (self.num_heads, self.head_size))
    return rotate_all([states], cos, sin, **_HALVES)[0].flatten(-2)


def memories(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_k_exclude_rope: int = 0,
    repeat_freqs_k: bool = False,
) -> tuple[Tensor, Tensor]:
    """SAM 2: the last keys do not spec, and the others may be several frames of one grid."""
    cos, sin = cos[..., ::2], sin[..., ::2]
    (y,) = rotate_all([q], cos, sin, **_ADJACENT)
    rotating = k.shape[-2] - num_k_exclude_rope
    if rotating == 0:
        return y, k
    if repeat_freqs_k and rotating != q.shape[-2]:
        cos, sin = _repeated(cos, sin, rotating // q.shape[-2])
    (rotated,) = rotate_all([k[..., :rotating, :]], cos, sin, **_ADJACENT)
    return y, torch.cat((rotated, k[..., rotating:, :]), dim=-2)


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
    """EdgeTAM: of each group of keys the last spec, one for each row of their own table."""
    (y,) = rotate_all([q], cos[..., ::2], sin[..., ::2], **_ADJACENT)
    rotating = k.shape[-2] - num_k_exclude_rope
    if rotating == 0:
        return y, k
    groups = k[..., :rotating, :].unflatten(-2, (repeat_freqs_k, -1))
    still = groups.shape[-2] - cos_k.shape[-2]
    c, s = cos_k[..., ::2].unsqueeze(-3), sin_k[..., ::2].unsqueeze(-3)
    (rotated,) = rotate_all([groups[..., still:, :]], c, s, **_ADJACENT)
    keys = torch.cat((groups[..., :still, :], rotated), dim=-2).flatten(-3, -2)
    return y, torch.cat((keys, k[..., rotating:, :]), dim=-2)


def two_angles(x: Tensor, pos: Tensor) -> Tensor:
    """V-JEPA 2: channel ``c`` turns by rate ``c`` modulo ``P``, so a pair has two angles.

    No rotation, but two halves of two: even channels of one, odd channels of the other.
    """
    pairs = x.shape[-1] // 2
    cos, sin = (t.to(x.dtype) for t in cos_sin(pos.long(), Spectrum(2 * pairs)))
    wide = (torch.cat((t, t), dim=-1) for t in (cos, sin))
    c, s = wide
    (even,) = rotate_all([x], c[..., ::2], s[..., ::2], **_ADJACENT)
    (odd,) = rotate_all([x], c[..., 1::2], s[..., 1::2], **_ADJACENT)
    return torch.stack((even[..., ::2], odd[..., 1::2]), dim=-1).flatten(-2)


def _repeated(cos: Tensor, sin: Tensor, times: int) -> tuple[Tensor, Tensor]:
    return torch.cat((cos,) * times, dim=-2), torch.cat((sin,) * times, dim=-2)


def _random(*shape: int) -> Tensor:
    made = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=made, dtype=torch.float32, device="cpu")


def _tables(*shape: int, doubled: bool = False) -> tuple[Tensor, Tensor]:
    phi = _random(*shape)
    wide = torch.cat((phi, phi), dim=-1) if doubled else phi.repeat_interleave(2, dim=-1)
    return wide.cos(), wide.sin()


def _probes() -> Iterator[tuple[Callable[..., Any], str, str, list[tuple[Any, ...]]]]:
    q, k, five = _random(2, 3, 5, 8), _random(2, 1, 5, 8), _random(2, 1, 12, 8)
    ids = torch.tensor([[0, 3, 1, 2, 6], [5, 4, 3, 2, 1]])
    yield with_values, "values too", "half", [(q, k, q, *_tables(7, 4, doubled=True), ids)]
    phi = _random(1, 1, 5, 4)
    line = torch.cat((phi.sin(), phi.cos()), dim=-1)
    yield sine_first, "sine first", "interleaved", [(line, q, k), (line, q, k, q)]
    conformer = SimpleNamespace(num_heads=3, head_size=8)
    both = torch.stack(_tables(7, 1, 1, 4, doubled=True))
    yield before_the_heads, "before the heads", "half", [(conformer, _random(2, 5, 24), both)]
    grid = _tables(1, 1, 5, 4)
    frames = torch.cat((k, k, five[..., :2, :]), dim=-2)
    memory = [(q, k, *grid), (q, five[..., :7, :], *grid, 2), (q, frames, *grid, 2, True)]
    yield memories, "memories", "interleaved", [*memory, (q, k, *grid, 5)]
    keys = _tables(1, 1, 3, 4)
    groups = [(q, five[..., :3, :], *grid, *keys), (q, five, *grid, *keys, 2, 2)]
    yield grouped_memories, "grouped memories", "interleaved", [*groups, (q, k, *grid, *keys, 5)]
    yield (
        two_angles,
        "two angles to a pair",
        "interleaved",
        [(q, torch.arange(5)), (k, ids[:, None])],
    )


# Whatever device is the default where this is first imported.
with torch.device("cpu"):
    PROBES = {tuple(inspect.signature(probe[0]).parameters): probe for probe in _probes()}
