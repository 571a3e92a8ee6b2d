"""Polar coordinate position embedding (PoPE)."""

from __future__ import annotations

from torch import Tensor

from posenc import ops
from posenc._contract import checks
from posenc.functional._positions import rows_of, run_kernel
from posenc.functional.rotary import check_heads, check_seq_dim, check_tables, swap_heads


def polar(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    delta: Tensor | None = None,
    *,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    seq_dim: int = -2,
) -> Tensor:
    r"""PoPE of queries, or of keys, by tables of your own.

    .. math:: x_c \mapsto (\mu_c \cos(\phi_c + \delta_c),\; \mu_c \sin(\phi_c + \delta_c)),
              \qquad \mu_c = \ln(1 + e^{x_c})

    Computed in the next wider dtype and rounded once: the error is hardly more than half an ulp at
    the magnitude of :math:`\mu_c`. Gradients reach ``x``, ``delta``, ``cos`` and ``sin``.

    Args:
        x: ``(B, H, L, D)``.
        cos: :math:`\cos\phi`, ``(T, D)``, or ``(B, T, D)`` with a table for each sequence.
        sin: As ``cos``.
        delta: A phase for each head and channel of keys, ``(H, D)``; None for queries.
        offset: Table row of the first token, or an integer tensor ``(B,)`` of them.
        position_ids: Table row of each token, ``(L,)`` or ``(B, L)``, instead of ``offset``.
        seq_dim: The dimension of the tokens: -2, or 1 for ``(B, L, H, D)``.

    Returns:
        A new tensor ``(B, H, L, 2 D)``: ``D`` channels with the cosine, then ``D`` with the sine.

    Examples:
        >>> import torch
        >>> x = torch.tensor([0.0, 1.0]).view(1, 1, 1, 2)
        >>> polar(x, torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])).flatten()
        tensor([0.6931, 0.0000, 0.0000, 1.3133])

    References:
        Gopalakrishnan et al., *Decoupling the "What" and "Where" With Polar Coordinate Positional
        Embeddings*, 2025.
    """
    who = "polar"
    check_heads(who, "x", [x], seq_dim=check_seq_dim(who, seq_dim))
    (x,) = swap_heads([x], seq_dim)
    batch, heads, _, width = x.shape
    limit = check_tables(who, cos, sin, x, "D")
    if cos.shape[-1] != width or (cos.dim() == 3 and cos.shape[0] != batch):
        rule = f"cos must have shape (T, {width}) or ({batch}, T, {width})"
        checks.fail(who, rule, f"shape {tuple(cos.shape)}", "Pass one column for each channel.")
    if delta is not None:
        checks.float_tensor(who, "delta", delta)
        if delta.shape != (heads, width) or delta.device != x.device:
            rule = f"delta must have shape {heads, width}, one row for each head, on {x.device}"
            got = f"shape {tuple(delta.shape)} on {delta.device}"
            checks.fail(who, rule, got, "Pass delta of the keys with their heads.")
    rows = rows_of(who, x, offset, position_ids, limit)
    tables = cos.resolve_neg(), sin.resolve_neg()
    y = run_kernel(who, limit, ops.polar, x, delta, *tables, rows)
    return swap_heads([y], seq_dim)[0]
