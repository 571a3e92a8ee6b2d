"""The self-test of a conversion: attention logits before and after, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from posenc import functional
from posenc.interop.checkpoints import families, layouts
from posenc.interop.checkpoints.families import Model
from posenc.interop.checkpoints.layouts import Heads, Layout

_TOKENS = 5
_ROWS = 256

Read = Callable[[str], Tensor]


def modules(names: Iterable[str], model: Model) -> dict[str, list[str]]:
    """Names of what moves, by the attention module it is in."""
    found: dict[str, list[str]] = {}
    for name in names:
        place = families.module_of(name)
        if place is not None and model.kind(name) is not None:
            found.setdefault(place[0], []).append(name)
    return found


def difference(names: list[str], model: Model, old: Read, new: Read, to: Layout) -> float:
    r"""How far the logits of one attention module differ, relative to the largest.

    .. math:: \frac{\max |R'q' \cdot R'k' - Rq \cdot Rk|}{\max |Rq \cdot Rk|}

    Random hidden states meet every tensor that moved: weights as weights, biases and scales as
    further columns, norms as factors. Where the checkpoint has only queries or only keys (an
    adapter), the partner is random.

    Args:
        names: Tensors of the module.
        model: What is known about the checkpoint.
        old: Reads a tensor as it was.
        new: Reads a tensor as it is now.
        to: The new layout.
    """
    heads = model.heads(families.layer_of(names[0]))
    was: Layout = "half" if to == "interleaved" else "interleaved"
    before = _queries_and_keys(names, model, heads, old, was)
    after = _queries_and_keys(names, model, heads, new, to)
    scores = _scores(before, heads, was), _scores(after, heads, to)
    largest = float(scores[0].abs().max())
    return float((scores[1] - scores[0]).abs().max()) / (largest or 1.0)


def _queries_and_keys(
    names: list[str], model: Model, heads: Heads, read: Read, layout: Layout
) -> dict[str, Tensor]:
    """Queries and keys ``(1, H, T, D)`` of random hidden states."""
    found: dict[str, Tensor] = {}
    for name in sorted(names):
        kind = model.kind(name)
        if kind is None or kind == "norm":
            continue
        tensor = read(name)
        rows = layouts.count(kind, heads)
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            continue
        out = _project(tensor.reshape(rows, -1), seed=len(name)).T
        start, parts = 0, {"q": [], "k": []}  # type: tuple[int, dict[str, list[Tensor]]]
        for part, width in layouts.blocks(kind, heads):
            if part:
                parts[part].append(out[:, start : start + width])
            start += width
        for part, those in parts.items():
            if those:
                x = torch.stack(those)[None]
                found[part] = found[part] + x if part in found else x
    generator = torch.Generator().manual_seed(0)
    for part in ("q", "k"):
        if part not in found:
            found[part] = _partner(heads, layout, generator)
    for name in sorted(names):
        if model.kind(name) == "norm":
            _normalise(found, name, read(name).double(), heads)
    return found


def _normalise(found: dict[str, Tensor], name: str, weight: Tensor, heads: Heads) -> None:
    part = "q" if families.module_of(name)[1].startswith("q") else "k"  # type: ignore[index]
    x = found[part]
    if weight.numel() == heads.head_dim:
        found[part] = x * weight.flatten()
    elif weight.numel() == x.shape[1] * heads.head_dim:
        found[part] = x * weight.view(1, x.shape[1], 1, heads.head_dim)


def _draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)


def _project(weight: Tensor, seed: int) -> Tensor:
    """``weight @ hidden``, with float64 copies of a few rows at a time."""
    generator = torch.Generator().manual_seed(seed)
    width = weight.shape[1]
    hidden = _draw(generator, width, _TOKENS)
    hidden /= math.sqrt(width)
    return torch.cat([some.double().nan_to_num() @ hidden for some in weight.split(_ROWS)])


def _scores(found: dict[str, Tensor], heads: Heads, layout: Layout) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    width = min(x.shape[-1] for x in found.values())
    # A latent key has the rotated channels alone: those of the queries are their last.
    q, k = (found[part][..., found[part].shape[-1] - width :] for part in ("q", "k"))
    angles = _draw(generator, _TOKENS, heads.turned // 2)
    q, k = functional.rotate_qk(
        q.contiguous(),
        k.contiguous(),
        angles.cos(),
        angles.sin(),
        interleaved=layout == "interleaved",
        last=heads.last,
    )
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT


def _partner(heads: Heads, layout: Layout, generator: torch.Generator) -> Tensor:
    """A random head, the same in either layout: drawn pair by pair, then laid out."""
    pairs = heads.turned // 2
    drawn = _draw(generator, 1, 1, _TOKENS, pairs, 2)
    still = heads.head_dim - heads.turned
    rest = _draw(generator, 1, 1, _TOKENS, still)
    turned = (drawn if layout == "interleaved" else drawn.mT).flatten(-2)
    return torch.cat((rest, turned) if heads.last else (turned, rest), dim=-1)
