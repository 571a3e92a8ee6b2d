"""The rotation for tables and tensors in the shapes that transformers' models have."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from posenc._contract import checks
from posenc._contract.position_checks import UNLIMITED
from posenc.functional.rotary import halved, rotate_rows
from posenc.interop.huggingface.pending import Pending
from posenc.kernels import Rows, Spec
from posenc.kernels.rotation import norm_rotate_qk_op, rotate_qk_op
from posenc.kernels.spec import TOKENS_FIRST

_WHO = "the patched model"


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys: a drop-in for the function of this name in transformers' models.

    Use it in your own model code; for a transformers model, call :func:`patch`.

    Args:
        q: ``(B, H, L, D)``, or ``(B, L, H, D)``.
        k: As ``q``; the head count may differ.
        cos: ``(B, L, D)`` or ``(1, L, D)``, one number per channel, as their rotary modules
            return it. A narrower table rotates only the first channels.
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
        rule, hint = "unsqueeze_dim must be 1 or 2", "Pass 2 for tensors of (B, L, H, D)."
        checks.fail(who, rule, unsqueeze_dim, hint)
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        checks.float_tensor(who, name, x)
    if q.shape[-1:] == cos.shape[-1:]:
        layout = 0 if unsqueeze_dim == 1 else TOKENS_FIRST
        rotated = rotate_qk_op.at_once(q, k, cos, sin, None, 0, layout)
        if rotated is not None:
            return rotated  # type: ignore[no-any-return]
    c = halved(who, "cos", cos, False).unsqueeze(unsqueeze_dim)
    s = halved(who, "sin", sin, False).unsqueeze(unsqueeze_dim)
    a, b = rotate_all([q, k], c, s, interleaved=False, interleaved_out=False)
    return a, b


def rotate_at_once(q: Any, k: Any, cos: Any, sin: Any, layout: int) -> tuple[Tensor, Tensor] | None:
    """Rotate queries and keys by native code, together with their norms; None if it cannot."""
    rotated: tuple[Tensor, Tensor] | None
    if type(q) is Pending:
        if type(k) is not Pending or not (q.is_waiting() and k.is_waiting()):
            return None
        norm, of_k = q.call, k.call
        if norm.eps != of_k.eps or norm.shift != of_k.shift:
            return None
        weights = norm.weight, of_k.weight
        how = None, 0, layout, norm.eps, norm.shift
        rotated = norm_rotate_qk_op.at_once(q.x, k.x, *weights, cos, sin, *how)
    elif type(k) is Pending:
        return None
    else:
        rotated = rotate_qk_op.at_once(q, k, cos, sin, None, 0, layout)
    return rotated


def rotate_all(
    xs: list[Any],
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    interleaved_out: bool,
    last: bool = False,
    backwards: bool = False,
) -> list[Tensor]:
    """Rotate ``xs [..., D]`` by tables ``[..., P]``; ValueError if they do not broadcast.

    Those of ``xs`` that are `Pending` are normalised as well, in the same kernel.
    ``last`` rotates the last ``2P`` channels instead of the first, ``backwards`` by ``-angle``.
    """
    if cos.dim() == 4 and cos.shape[-3] != 1 and xs[0].dim() == 3:
        # LTX-2 rotates before it splits the heads, by tables of (B, H, L, P).
        split = [x.unflatten(-1, (cos.shape[-3], -1)).transpose(-2, -3) for x in xs]
        flags = {"interleaved": interleaved, "interleaved_out": interleaved_out}
        ys = rotate_all(split, cos, sin, **flags, last=last, backwards=backwards)
        return [y.transpose(-2, -3).flatten(-2) for y in ys]
    # The op takes heads before tokens, with any strides.
    swapped = cos.dim() > 2 and cos.shape[-2] == 1 and cos.shape[-3] != 1
    if swapped:
        cos, sin = cos.transpose(-2, -3), sin.transpose(-2, -3)
        xs = [x.transpose(-2, -3) for x in xs]
    first_channel = xs[0].shape[-1] - 2 * cos.shape[-1] if last else 0
    spec = Spec(interleaved, interleaved_out, first_channel, backwards)
    # The op takes one tensor, or queries and keys.
    if len(xs) <= 2 and all(_alike(x, xs[0], cos) for x in xs[1:]):
        ys = _rotate(xs, cos, sin, spec)
    else:
        ys = [y for x in xs for y in _rotate([x], cos, sin, spec)]
    return [y.transpose(-2, -3) for y in ys] if swapped else ys


def _has_heads(cos: Tensor) -> bool:
    """Whether each head has a table of its own."""
    return cos.dim() > 2 and cos.shape[-3] != 1


def _alike(x: Tensor, y: Tensor, cos: Tensor) -> bool:
    """Whether one call may rotate both: their shapes agree, head counts aside."""
    heads = not _has_heads(cos) or x.shape == y.shape
    return heads and x.shape[:-3] == y.shape[:-3] and x.shape[-2:] == y.shape[-2:]


def _rotate(xs: list[Any], cos: Tensor, sin: Tensor, spec: Spec) -> list[Tensor]:
    """Rotate tensors of like shapes in one call of the op, which takes ``[B, H, T, D]``."""
    cos_rows, sin_rows = _rows(xs[0], cos), _rows(xs[0], sin)
    fours = xs
    if _has_heads(cos):
        # Each head becomes a sequence, because sequences may have their own tables.
        fours = [x.reshape(math.prod(x.shape[:-2]), 1, *x.shape[-2:]) for x in xs]
    elif xs[0].dim() > 4:
        fours = [x.flatten(0, -4) for x in xs]
    elif xs[0].dim() < 4:
        fours = [x.reshape((1,) * (4 - x.dim()) + x.shape) for x in xs]
    if any(isinstance(x, Pending) for x in fours):
        ys = [_rotate_one(x, cos_rows, sin_rows, spec) for x in fours]
    else:
        ys = rotate_rows(_WHO, UNLIMITED, fours, cos_rows, sin_rows, Rows(), spec)
    return ys if fours is xs else [y.reshape(x.shape) for x, y in zip(xs, ys, strict=True)]


def _rotate_one(x: Tensor | Pending, cos: Tensor, sin: Tensor, spec: Spec) -> Tensor:
    if isinstance(x, Pending):
        return x.rotate(cos, sin, spec)
    return rotate_rows(_WHO, UNLIMITED, [x], cos, sin, Rows(), spec)[0]


def _rows(x: Tensor, table: Tensor) -> Tensor:
    """``table`` as the op takes it: ``[T, P]``, or ``[B, T, P]`` with rows for each sequence."""
    batch = table.shape[:-2]
    lead: tuple[int, ...] = x.shape[:-2]
    if all(size == 1 for size in batch):
        table, lead = table[(0,) * len(batch)], ()
    elif batch[-1] == 1:
        table, lead = table.squeeze(-3), x.shape[:-3]
    try:
        table = table.expand(*lead, x.shape[-2], table.shape[-1])
    except RuntimeError:
        rule = f"cos and sin must broadcast against queries and keys of shape {tuple(x.shape)}"
        checks.fail(_WHO, rule, tuple(batch), "Call unpatch, and report the model.")
    return table.flatten(0, -3) if lead else table
