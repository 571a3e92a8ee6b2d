"""ALiBi as published models compute it, for their checkpoints."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.numerics.slopes import head_slopes


def alibi_model_slopes(
    model: str, num_heads: int, *, head_dim: int | None = None, bias_max: float = 8.0
) -> Tensor:
    r"""The slopes of a published model, float64 of shape ``(H,)``.

    BLOOM and MPT have the paper's. Falcon rounds them to bfloat16 and adds its bias before the
    scores are scaled by :math:`1/\sqrt{D}`, so its slopes are :math:`m_h / \sqrt{D}`.

    Args:
        model: ``bloom``, ``mpt`` or ``falcon``.
        num_heads: Heads ``H``.
        head_dim: Falcon's ``D``; the others do not need it.
        bias_max: MPT's ``alibi_bias_max``.

    Examples:
        >>> alibi_model_slopes("bloom", 2)
        tensor([0.0625, 0.0039], dtype=torch.float64)
        >>> alibi_model_slopes("falcon", 2, head_dim=64)
        tensor([0.0078, 0.0005], dtype=torch.float64)
    """
    slopes, root = _slopes_and_root("alibi_model_slopes", model, num_heads, head_dim, bias_max)
    return slopes / root


def alibi_model_bias(
    model: str,
    num_heads: int,
    attention_mask: Tensor,
    *,
    head_dim: int | None = None,
    bias_max: float = 8.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    r"""Key-only bias of a published model, rounded as the model does, to add to scaled scores.

    BLOOM and Falcon count positions over the tokens that ``attention_mask`` keeps, MPT over all
    keys, back from the last. Falcon multiplies bfloat16 slopes by bfloat16 positions, so that
    neighbours past 256 have the same bias, and divides by :math:`\sqrt{D}`. The bias hides no
    keys, and is right only together with a causal mask.

    Args:
        model: ``bloom``, ``mpt`` or ``falcon``.
        num_heads: Heads ``H``.
        attention_mask: ``(B, K)``, one for tokens and zero for padding.
        head_dim: Falcon's ``D``; the others do not need it.
        bias_max: MPT's ``alibi_bias_max``.
        dtype: A floating dtype for the result.

    Returns:
        Tensor of shape ``(B, H, 1, K)`` on the device of ``attention_mask``.

    Examples:
        >>> alibi_model_bias("bloom", 1, torch.tensor([[0, 1, 1, 1]])) * 256
        tensor([[[[0., 0., 1., 2.]]]])
        >>> alibi_model_bias("mpt", 1, torch.tensor([[0, 1, 1, 1]])) * 256
        tensor([[[[-3., -2., -1.,  0.]]]])
    """
    who = "alibi_model_bias"
    slopes, root = _slopes_and_root(who, model, num_heads, head_dim, bias_max)
    checks.float_dtype(who, "dtype", dtype)
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        rule, got = "attention_mask must be a (B, K) tensor", checks.describe(attention_mask)
        checks.fail(who, rule, got, "Pass torch.ones(B, K) if there is no padding.")
    mask = attention_mask.long()
    positions = (mask.cumsum(-1) - 1) * mask
    if model == "mpt":
        positions = torch.arange(1 - mask.shape[1], 1, device=mask.device).expand_as(mask)
    rounded = slopes.to(torch.bfloat16 if model == "falcon" else torch.float32).to(mask.device)
    return (rounded[:, None, None] * positions[:, None, None]).to(dtype) / root


def _slopes_and_root(
    who: str, model: Any, num_heads: Any, head_dim: Any, bias_max: Any
) -> tuple[Tensor, float]:
    """A model's slopes in float64, and their divisor: Falcon's ``sqrt(head_dim)``, otherwise 1."""
    checks.choice(who, "model", model, ("bloom", "falcon", "mpt"))
    heads = checks.integer(who, "num_heads", num_heads)
    if model != "falcon":
        return head_slopes(heads, checks.positive_float(who, "bias_max", bias_max)), 1.0
    if head_dim is None:
        way_out = "Pass head_dim: Falcon divides its slopes by sqrt(head_dim)."
        checks.fail(who, "head_dim must be given for falcon", None, way_out)
    root = math.sqrt(checks.integer(who, "head_dim", head_dim))
    return head_slopes(heads).bfloat16().double(), root
