"""Learned position tables for another length, by interpolation or by extension."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from posenc._contract import checks

Table = TypeVar("Table", Tensor, dict[str, Tensor])
_WHO = "resize_learned"
# Names of position tables in models, with or without the `.weight` of an Embedding.
_TABLE = re.compile(
    r"(.*\.)?(pos_emb|pos_embed|wpe|embed_positions|position_embeddings?|pos_embedding)(\.weight)?"
)


def resize_learned(
    table: Table,
    length: int | tuple[int, int],
    *,
    method: Literal["interpolate", "extend"] = "interpolate",
    fill: Literal["normal", "repeat"] = "normal",
    prefix: int = 0,
    grid: tuple[int, int] | None = None,
    mode: Literal["bicubic", "bilinear"] = "bicubic",
    antialias: bool = False,
    std: float = 0.02,
    generator: torch.Generator | None = None,
    key: str | None = None,
) -> Table:
    r"""Resize a learned position table to another length.

    Interpolation stretches the trained positions over the new ones. Positions on a
    line are interpolated linearly, from the first to the last one (``align_corners=True``):

    .. math:: \text{new}_i = \text{old}\left(i\,\tfrac{T - 1}{L - 1}\right)

    A grid is interpolated between the centres of its cells (``align_corners=False``), bicubically
    as is usual for vision transformers. Both are computed in float64 and rounded once.

    Extension keeps every trained row, and fills the rest with small noise (``"normal"``, to be
    trained) or with the trained rows again (``"repeat"``: row ``i`` is row ``i mod T``).

    Args:
        table: ``(T, D)`` or ``(1, T, D)``, or a state dict that has it.
        length: Positions afterwards, or ``(height, width)`` for a table over a grid.
        method: ``"interpolate"`` or ``"extend"``.
        fill: How an extension fills its rows.
        prefix: Leading rows that are no positions and stay as they are: class tokens of a vision
            transformer, the two rows of RoBERTa's and OPT's offset. Not counted in ``length``.
        grid: Height and width of the trained grid; None means it is square.
        mode: How a grid is interpolated: ``"bicubic"``, or ``"bilinear"`` as for SigLIP 2.
        antialias: For a grid. True averages over the cells that a smaller one merges, and takes
            another cubic kernel (Keys' with -0.5, not -0.75), so that a larger grid differs too.
            timm and DINOv2 with registers have it; most models of transformers do not.
        std: Standard deviation of ``"normal"``.
        generator: Source of ``"normal"``.
        key: Name of the table in the state dict, if it has no usual name or there are several.

    Returns:
        A new table, or a new dict with it in place of the old.

    Examples:
        >>> resize_learned(torch.tensor([[0.0], [1.0], [2.0]]), 5).flatten()
        tensor([0.0000, 0.5000, 1.0000, 1.5000, 2.0000])
        >>> from posenc import LearnedPosEmbedding
        >>> state = LearnedPosEmbedding(max_len=512, embed_dim=8).state_dict()
        >>> resize_learned(state, 2048, method="extend", fill="repeat")["pos_emb.weight"].shape
        torch.Size([2048, 8])

    References:
        Dosovitskiy et al., *An Image is Worth 16x16 Words*, 2021, section 3.2 (the grid).
        Beltagy et al., *Longformer*, 2020, section 5 (repeating).
    """
    if isinstance(table, Mapping):
        how: dict[str, Any] = {"method": method, "fill": fill, "prefix": prefix, "grid": grid}
        how |= {"mode": mode, "antialias": antialias, "std": std, "generator": generator}
        name = _find(table, key)
        return {**table, name: resize_learned(table[name], length, **how)}
    checks.float_tensor(_WHO, "table", table)
    checks.rank(_WHO, "table", table, (2, 3), "(T, D) or (1, T, D)")
    if table.dim() == 3:
        checks.equal(_WHO, "the first dimension of table", table.shape[0], 1, "Pass one table.")
    rows = table.detach().reshape(table.shape[-2:])
    checks.integer(_WHO, "prefix", prefix, least=0)
    checks.integer(_WHO, "the positions of table", len(rows) - prefix)
    kept, trained = rows[:prefix], rows[prefix:]
    checks.choice(_WHO, "method", method, ("interpolate", "extend"))
    checks.choice(_WHO, "fill", fill, ("normal", "repeat"))
    checks.choice(_WHO, "mode", mode, ("bicubic", "bilinear"))
    checks.boolean(_WHO, "antialias", antialias)
    if isinstance(length, (tuple, list)) or grid is not None:
        size, grid = _pair("length", length), None if grid is None else _pair("grid", grid)
        if method != "interpolate":
            rule, hint = "a grid can only be interpolated", 'Pass method="interpolate".'
            checks.fail(_WHO, rule, f"method={method!r}", hint)
        new = _grid(trained, size, grid, mode, antialias)
    elif antialias or mode != "bicubic":
        rule, hint = "mode and antialias are for a grid", "Pass length=(height, width)."
        checks.fail(_WHO, rule, f"length={length}", hint)
    elif method == "interpolate":
        new = _line(trained, checks.integer(_WHO, "length", length))
    else:
        new = _extend(trained, checks.integer(_WHO, "length", length), fill, std, generator)
    return torch.cat((kept, new)).view(*table.shape[:-2], -1, table.shape[-1])


def _pair(name: str, pair: Any) -> tuple[int, int]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        rule = f"{name} must be (height, width)"
        checks.fail(_WHO, rule, checks.describe(pair), "Pass two ints.", TypeError)
    height, width = (checks.integer(_WHO, name, value) for value in pair)
    return height, width


def _line(trained: Tensor, length: int) -> Tensor:
    if length == 1:
        return trained[:1].clone()
    new = F.interpolate(trained.double().T[None], length, mode="linear", align_corners=True)
    return new[0].T.to(trained.dtype)


def _grid(
    trained: Tensor, size: tuple[int, int], grid: tuple[int, int] | None, mode: str, antialias: bool
) -> Tensor:
    side = math.isqrt(len(trained))
    height, width = grid or (side, side)
    if height * width != len(trained):
        rule = "the trained positions must fill a grid" if grid else "grid must be given"
        got = f"{len(trained)} rows" + (f" for {height} x {width}" if grid else ", not a square")
        hint = "Pass grid=(height, width), and prefix=1 if there is a class token."
        checks.fail(_WHO, rule, got, hint)
    cells = trained.double().view(1, height, width, -1).permute(0, 3, 1, 2)
    new = F.interpolate(cells, size=size, mode=mode, align_corners=False, antialias=antialias)
    return new[0].flatten(1).T.to(trained.dtype)


def _extend(
    trained: Tensor, length: int, fill: str, std: float, generator: torch.Generator | None
) -> Tensor:
    if length < len(trained):
        rule = f"an extension must have at least {len(trained)} positions"
        checks.fail(_WHO, rule, length, 'Slice the table, or pass method="interpolate".')
    if fill == "repeat":
        return trained[torch.arange(length, device=trained.device) % len(trained)]
    new = trained.new_empty(length - len(trained), trained.shape[1])
    new.normal_(0.0, checks.positive_float(_WHO, "std", std), generator=generator)
    return torch.cat((trained, new))


def _find(state: Mapping[str, Tensor], key: str | None) -> str:
    found = [name for name in state if (_TABLE.fullmatch(name) if key is None else name == key)]
    if len(found) != 1:
        rule = "the state must have one position table" if key is None else "key must be in state"
        got = f"{len(found)}: {', '.join(found[:4])}" if key is None else repr(key)
        checks.fail(_WHO, rule, got, "Pass key, the table's name.")
    return found[0]
