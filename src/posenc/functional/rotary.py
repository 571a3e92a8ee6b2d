"""Rotary position embedding (RoPE)."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc import kernels
from posenc._contract import checks
from posenc.numerics.frequencies import Spectrum
from posenc.numerics.tables import cos_sin


def rotary_pos_embedding(
    input_: Tensor,
    position_ids: Tensor | None = None,
    interleaved: bool = True,
    *,
    base: float = 10_000.0,
) -> Tensor:
    r"""Rotate each channel pair of ``input_`` by its position.

    .. math:: (a, b) \mapsto (a \cos\phi - b \sin\phi,\; a \sin\phi + b \cos\phi),
              \qquad \phi = p\,\theta_i,\; \theta_i = \text{base}^{-2i/D}

    Angles are exact, the rotation is computed one precision up from the input's and rounded
    once: each output is within a hair of half an ulp, at any position.

    Args:
        input_: Floating tensor of shape ``(..., L, D)`` with even ``D``.
        position_ids: Integers of shape ``(L,)``, or ``(B, L)`` with ``B`` the first axis of
            ``input_``. None means ``0 .. L-1``.
        interleaved: Pairs are ``(0, 1), (2, 3), ...`` if true, ``(0, D/2), (1, D/2 + 1), ...``
            if false.
        base: Raising it slows every pair but the first.

    Returns:
        A new tensor with the shape and dtype of ``input_``.

    Examples:
        >>> rotary_pos_embedding(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        tensor([[1.0000, 0.0000],
                [0.5403, 0.8415]])

    References:
        Su et al., *RoFormer*, 2021, section 3.4.2.
    """
    who = "rotary_pos_embedding"
    check_rotary_input(who, "input_", input_)
    checks.boolean(who, "interleaved", interleaved)
    spectrum = Spectrum(input_.shape[-1], checks.positive_float(who, "base", base))
    if position_ids is None:
        at = torch.arange(input_.shape[-2], device=input_.device)
    else:
        at, _ = checks.position_ids(who, position_ids, input_.shape, input_.device)
    cos, sin = cos_sin(at, spectrum)
    return rotate_rows(input_, cos, sin, interleaved=interleaved)


def check_rotary_input(who: str, name: str, x: Tensor) -> None:
    """Refuse what cannot be rotated: not floating, not ``(..., L, D)``, or ``D`` odd."""
    checks.float_tensor(who, name, x)
    if x.dim() < 2:
        rule = f"{name} must have shape (..., L, D)"
        got = f"shape {tuple(x.shape)}"
        raise ValueError(checks.message(who, rule, got, f"A single token is {name}[None]."))
    checks.even(who, f"the last dimension of {name}", x.shape[-1])


def rotate_rows(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate ``x`` of ``(..., L, D)`` by rows ``[L, P]``, or ``[B, L, P]`` for its first axis."""
    if cos.dim() == 3:
        between = (1,) * (x.dim() - 3)
        shape = (cos.shape[0], *between, *cos.shape[1:])
        cos, sin = cos.view(shape), sin.view(shape)
    return kernels.rotate(x, cos, sin, interleaved=interleaved)
