"""Tables and tensors in the shapes that models pass them, brought to the one rotation."""

from __future__ import annotations

from torch import Tensor

from posenc._contract import checks
from posenc.functional.rotary import halved, turn_all
from posenc.kernels import Rows, Spec

_WHO = "the patched model"


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys: a drop-in for the function of this name in transformers' models.

    For code of your own that was written after theirs; models of theirs are for :func:`patch`.

    Args:
        q: ``(B, H, L, D)``, or ``(B, L, H, D)``.
        k: As ``q``; the head count may differ.
        cos: ``(B, L, D)`` or ``(1, L, D)`` with both numbers of a pair, as their rotary modules
            give them. A narrower table rotates the first channels.
        sin: As ``cos``.
        unsqueeze_dim: Where the heads are: 1, or 2 for ``(B, L, H, D)``.

    Returns:
        New tensors like ``q`` and ``k``.

    Examples:
        >>> import torch
        >>> q = k = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
        >>> cos, sin = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
        >>> apply_rotary_pos_emb(q, k, cos, sin)[0].flatten()
        tensor([0., 1.])
    """
    who = "apply_rotary_pos_emb"
    if unsqueeze_dim not in (1, 2):
        rule, way_out = "unsqueeze_dim must be 1 or 2", "Pass 2 for tensors of (B, L, H, D)."
        raise ValueError(checks.message(who, rule, unsqueeze_dim, way_out))
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        checks.float_tensor(who, name, x)
    tables = [
        halved(who, name, table, False).unsqueeze(unsqueeze_dim)
        for name, table in (("cos", cos), ("sin", sin))
    ]
    a, b = rotate_all([q, k], tables[0], tables[1], interleaved=False, interleaved_out=False)
    return a, b


def rotate_all(
    xs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    interleaved_out: bool,
    last: bool = False,
    backwards: bool = False,
) -> list[Tensor]:
    """Rotate ``xs`` by tables that broadcast against them.

    Raises ValueError where they do not.

    Args:
        xs: Tensors ``[..., D]``, with heads before tokens, after them, or not yet split.
        cos: ``[..., P]``, whose other axes broadcast against those of ``xs``.
        sin: As ``cos``.
        interleaved: Pairs of the input are ``(2i, 2i + 1)``, else ``(i, P + i)``.
        interleaved_out: The same for the output.
        last: Rotate the last ``2P`` channels instead of the first.
        backwards: Spec by the negative angle.
    """
    # Tokens before heads: the op wants them after, and does not mind the strides.
    swapped = cos.dim() > 2 and cos.shape[-2] == 1 and cos.shape[-3] != 1
    if swapped:
        cos, sin = cos.transpose(-2, -3), sin.transpose(-2, -3)
        xs = [x.transpose(-2, -3) for x in xs]
    column = xs[0].shape[-1] - 2 * cos.shape[-1] if last else 0
    how = Spec(interleaved, interleaved_out, column, backwards)
    first, *others = xs
    together = cos.dim() < 4 or cos.shape[-3] == 1
    for x in others:
        together = together and x.dim() == first.dim() == 4 and _alike(first, x)
    if together and first.dim() == 4:
        tables = _tables(first, cos, sin)
        ys = turn_all(_WHO, "the rows of cos", xs, *tables, Rows(), how)
    else:
        ys = [_turn_one(x, cos, sin, how) for x in xs]
    return [y.transpose(-2, -3) for y in ys] if swapped else ys


def _alike(q: Tensor, k: Tensor) -> bool:
    return q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:]


def _turn_one(x: Tensor, cos: Tensor, sin: Tensor, how: Spec) -> Tensor:
    four = x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, -4)
    if x.dim() > 4 and cos.dim() > 3:
        lead = (*x.shape[:-3], *cos.shape[-3:])
        cos, sin = cos.expand(lead).flatten(0, -4), sin.expand(lead).flatten(0, -4)
    if cos.dim() > 2 and cos.shape[-3] != 1:
        # A table for each head: every head is a sequence of its own.
        lead = (*four.shape[:2], *cos.shape[-2:])
        cos, sin = cos.expand(lead).flatten(0, 1), sin.expand(lead).flatten(0, 1)
        four = four.flatten(0, 1).unsqueeze(1)
        tables = cos, sin
    else:
        tables = _tables(four, cos, sin)
    (y,) = turn_all(_WHO, "the rows of cos", [four], *_rows(four, *tables), Rows(), how)
    return y.reshape(x.shape)


def _tables(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables ``[T, P]`` or ``[B, T, P]`` for ``x`` of ``[B, H, T, D]``."""
    if cos.dim() > 2:
        cos, sin = cos.squeeze(-3), sin.squeeze(-3)
    if cos.dim() == 3 and cos.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    return _rows(x, cos, sin)


def _rows(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    rows, length = cos.shape[-2], x.shape[-2]
    if rows not in (1, length) or (cos.dim() == 3 and cos.shape[0] != x.shape[0]) or cos.dim() > 3:
        rule = f"cos and sin must broadcast against queries and keys of shape {tuple(x.shape)}"
        got = f"shape {tuple(cos.shape)}"
        raise ValueError(checks.message(_WHO, rule, got, "Call unpatch, and report the model."))
    if rows != length:
        wide = (*cos.shape[:-2], length, cos.shape[-1])
        return cos.expand(wide), sin.expand(wide)
    return cos, sin
