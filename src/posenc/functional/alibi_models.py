"""ALiBi as published models compute it, for their checkpoints."""

from __future__ import annotations

import math

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
    who = "alibi_model_slopes"
    checks.choice(who, "model", model, ("bloom", "falcon", "mpt"))
    heads = checks.integer(who, "num_heads", num_heads)
    if model != "falcon":
        return head_slopes(heads, checks.positive_float(who, "bias_max", bias_max))
    if head_dim is None:
        hint = "Pass head_dim: Falcon divides its slopes by sqrt(head_dim)."
        checks.fail(who, "head_dim must be given for falcon", None, hint)
    root = math.sqrt(checks.integer(who, "head_dim", head_dim))
    return head_slopes(heads).bfloat16().double() / root
