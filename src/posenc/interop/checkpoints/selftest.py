"""The self-test of a conversion: attention logits before and after, in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from posenc import functional
from posenc._contract import checks
from posenc.interop.checkpoints import families, layouts
from posenc.interop.checkpoints.families import Model
from posenc.interop.checkpoints.layouts import Layout

# Float64 rounding changes a logit by about 1e-14 of it; a row in the wrong place, by about 1.
_TOLERANCE = 1e-9
_TOKENS = 5
# Rows of a weight that are converted to float64 at a time.
_ROWS = 256

Read = Callable[[str], Tensor]


def modules(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of tensors, by the attention module they are in."""
    found: dict[str, list[str]] = {}
    for name in names:
        module, _ = families.module_of(name) or ("", "")
        found.setdefault(module, []).append(name)
    return found


def run(
    names: Mapping[str, Sequence[str]], model: Model, old: Read, new: Read, to: Layout, number: int
) -> dict[str, float]:
    """The largest difference of logits, relative to the largest logit, of ``number`` modules.

    The modules are evenly spaced over the depth.
    """
    number = min(number, len(names))
    chosen = {round(i * (len(names) - 1) / max(1, number - 1)) for i in range(number)}
    found = {}
    for module in (list(names)[i] for i in sorted(chosen)):
        before = _logits(names[module], model, old, layouts.OTHER[to])
        after = _logits(names[module], model, new, to)
        difference = float((after - before).abs().max()) / (float(before.abs().max()) or 1.0)
        if not difference <= _TOLERANCE:
            got = f"a difference of {difference:.2g}"
            way_out = "Check num_heads, head_dim and the fused layout; nothing was written."
            checks.fail("convert", f"logits of {module} must stay the same", got, way_out)
        found[module] = difference
    return found


def _logits(names: Sequence[str], model: Model, read: Read, layout: Layout) -> Tensor:
    """Logits ``(H, H, T, T)`` of every head of queries with every head of keys.

    Random hidden states are multiplied by every tensor that moved, norms last. If the checkpoint
    has only queries or only keys (an adapter), they are multiplied with themselves.
    """
    heads = model.heads(families.layer_of(names[0]))
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, dtype=torch.float64, device="cpu", generator=generator)
    norms = [name for name in names if model.kind(name) == "norm"]
    found: dict[str, Tensor] = {}
    for name in sorted(set(names) - set(norms)):
        tensor = read(name)
        weight = tensor.reshape(len(tensor), -1)
        hidden = draw(weight.shape[1], _TOKENS) / math.sqrt(weight.shape[1])
        out = torch.cat([rows.double().nan_to_num() @ hidden for rows in weight.split(_ROWS)])
        for part, x in layouts.blocks(model.kind(name) or "", heads).split(out.T):
            found[part] = found.get(part, 0) + x.flatten(1, 2).transpose(0, 1)
    found = dict.fromkeys("qk", next(iter(found.values()))) | found
    for name in norms:
        factors = read(name).double().view(-1, 1, heads.head_dim)
        part = "q" if families.module_of(name)[1].startswith("q") else "k"  # type: ignore[index]
        if len(factors) in (1, len(found[part])):
            found[part] = found[part] * factors
    angles = draw(_TOKENS, heads.rotated // 2)
    rotate = functools.partial(
        functional.rotate, interleaved=layout == "interleaved", last=heads.last
    )
    q, k = (rotate(found[part][None], angles.cos(), angles.sin())[0] for part in "qk")
    # A latent key has rotated channels alone, which are the last ones of the queries.
    width = min(q.shape[-1], k.shape[-1])
    return torch.einsum("htd,gsd->hgts", q[..., -width:], k[..., -width:])
