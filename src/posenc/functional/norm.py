"""RMSNorm and rotation of queries and keys in one kernel."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from posenc import ops
from posenc._contract import checks
from posenc.functional._positions import run_kernel
from posenc.functional.rotary import check_arguments, native_arguments, swap_heads
from posenc.ops.rotation.rotation import norm_rotate_qk_op


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    seq_dim: int = -2,
    interleaved: bool = True,
    interleaved_out: bool | None = None,
    last: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""RMSNorm of queries and keys, then rotation: in one kernel on CUDA, and in C on the CPU.

    .. math:: x \mapsto R_\phi \left( \frac{x}{\sqrt{\text{mean}(x^2) + \epsilon}} \odot w \right)

    Qwen3, Gemma 3 and OLMo 2 do this. It is computed in the next wider dtype and rounded once.
    Gradients reach ``q``, ``k`` and the weights.

    Args:
        q: Queries ``(B, H, L, D)``.
        k: Keys ``(B, H', L, D)``.
        q_weight: ``(D,)`` for a norm of each head, ``(H * D,)`` for one over all heads of a
            token (OLMo 2).
        k_weight: ``(D,)`` or ``(H' * D,)``.
        cos: ``(T, P)`` or ``(B, T, P)``, as in :func:`rotate`.
        sin: As ``cos``.
        eps: Added to the mean square.
        zero_centered: Multiply by ``1 + weight`` (Gemma).
        offset: As in :func:`rotate`, and so are all that follow.
        position_ids: Instead of ``offset``.
        seq_dim: The dimension of the tokens.
        interleaved: The pairs.
        interleaved_out: The pairs of the result.
        last: Rotate the last channels.

    Returns:
        New tensors like ``q`` and ``k``.

    Examples:
        >>> import torch
        >>> x = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2)
        >>> still = torch.ones(1, 1), torch.zeros(1, 1)
        >>> qk_norm_rope(x, x, torch.ones(2), torch.ones(2), *still)[0].flatten()
        tensor([0.8485, 1.1314])

    References:
        Henry et al., *Query-Key Normalization for Transformers*, 2020.
    """
    arguments = native_arguments(
        q, cos, sin, offset, position_ids, seq_dim, interleaved, interleaved_out, last
    )
    if arguments is not None and is_norm(eps, zero_centered):
        norm = eps, 1.0 if zero_centered else 0.0
        rotated = norm_rotate_qk_op.try_native(q, k, q_weight, k_weight, *arguments, *norm)
        if rotated is not None:
            return rotated  # type: ignore[no-any-return]
    who = "qk_norm_rope"
    options = offset, position_ids, seq_dim, interleaved, interleaved_out, last
    limit, (q, k), cos, sin, rows, spec = check_arguments(who, "qk", [q, k], cos, sin, *options)
    eps = checks.positive_float(who, "eps", eps)
    shift = 1.0 if checks.boolean(who, "zero_centered", zero_centered) else 0.0
    for name, x, weight in (("q_weight", q, q_weight), ("k_weight", k, k_weight)):
        check_weight(who, name, weight, x)
    kernel, weights = ops.norm_rotate_qk, (q_weight, k_weight)
    tables = cos, sin, rows, spec
    both = run_kernel(who, limit, kernel, q, k, *weights, *tables, ops.Norm(eps, shift))
    normed_q, normed_k = swap_heads(list(both), seq_dim)
    return normed_q, normed_k


def is_norm(eps: Any, zero_centered: Any) -> bool:
    """Whether native code takes these numbers as they are."""
    return type(eps) is float and 0 < eps < math.inf and type(zero_centered) is bool


def check_weight(who: str, name: str, weight: Tensor, x: Tensor) -> None:
    """Refuse a weight that is not for one head of ``x``, ``(B, H, L, D)``, or for all of them."""
    checks.float_tensor(who, name, weight)
    heads, width = x.shape[1], x.shape[3]
    # Two comparisons, because torch.compile cannot search a tuple for a symbolic size.
    if weight.dim() != 1 or (weight.shape[0] != width and weight.shape[0] != heads * width):
        rule = f"{name} must have shape ({width},) or ({heads * width},)"
        checks.fail(who, rule, f"shape {tuple(weight.shape)}", "Give each channel one weight.")
    if weight.device != x.device:
        rule = f"{name} must be on the device of q and k"
        checks.fail(who, rule, weight.device, f"Move it to {x.device}.")
