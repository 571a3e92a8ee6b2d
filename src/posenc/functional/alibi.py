"""Attention with linear biases (ALiBi)."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.numerics.slopes import head_slopes


def alibi_slopes(
    num_heads: int,
    *,
    bias_max: float = 8.0,
    plain: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    r"""Slope of each head, in the paper's head order.

    :math:`2^{-8h/n}` for ``n`` heads, a power of two. For other counts the paper's code takes
    the slopes of the power of two below, then every second one of the power of two above.

    Args:
        num_heads: Heads ``n``, positive.
        bias_max: The exponent 8 above, as in MPT's ``alibi_bias_max``.
        plain: Use :math:`2^{-8h/n}` for every ``n``, also where the paper's code does not.
        device: Where the result lives.
        dtype: A floating dtype; each slope is rounded to it once.

    Returns:
        Tensor of shape ``(num_heads,)``.

    Examples:
        >>> alibi_slopes(8)
        tensor([0.5000, 0.2500, 0.1250, 0.0625, 0.0312, 0.0156, 0.0078, 0.0039])

    References:
        Press et al., *Train Short, Test Long*, 2022, section 3.
    """
    who = "alibi_slopes"
    heads = checks.integer(who, "num_heads", num_heads)
    peak = checks.positive_float(who, "bias_max", bias_max)
    slopes = head_slopes(heads, peak, plain=checks.boolean(who, "plain", plain))
    return slopes.to(checks.float_dtype(who, "dtype", dtype)).to(device)


def alibi_bias(
    slopes: Tensor,
    q_len: int,
    k_len: int | None = None,
    *,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    r"""Bias to add to the attention scores, before the softmax.

    .. math:: \text{bias}_{h,i,j} = -m_h\,(i + K - Q - j)

    The last query sees the last key, so one query against a cache of keys gets the last row.
    Causal: ``-inf`` where the key is in the future. Otherwise the distance is taken absolute.
    Products are formed in float64 and rounded once.

    Args:
        slopes: :math:`m`, shape ``(H,)``, as :func:`alibi_slopes` gives them.
        q_len: Queries ``Q``.
        k_len: Keys ``K``, at least ``Q``; ``Q`` if None.
        causal: Whether a query sees only keys up to its own position.
        dtype: A floating dtype for the result.

    Returns:
        Tensor of shape ``(H, Q, K)`` on the device of ``slopes``.

    Examples:
        >>> alibi_bias(alibi_slopes(8), 3)[0]
        tensor([[ 0.0000,    -inf,    -inf],
                [-0.5000,  0.0000,    -inf],
                [-1.0000, -0.5000,  0.0000]])

    References:
        Press et al., *Train Short, Test Long*, 2022, section 3.
    """
    who = "alibi_bias"
    checks.float_tensor(who, "slopes", slopes)
    checks.rank(who, "slopes", slopes, (1,), "(H,)")
    queries = checks.integer(who, "q_len", q_len, least=0)
    keys = queries if k_len is None else checks.integer(who, "k_len", k_len, least=0)
    checks.boolean(who, "causal", causal)
    checks.float_dtype(who, "dtype", dtype)
    if keys < queries:
        rule = f"k_len must be at least q_len={queries}"
        raise ValueError(checks.message(who, rule, keys, "Queries are the last of the keys."))
    if queries == 0 or keys == 0:
        return slopes.new_empty((len(slopes), queries, keys), dtype=dtype)
    # The bias depends on j - i alone, so one line of Q + K - 1 values holds every row: row i is
    # the K values that start Q - 1 - i in. Copying windows out of it runs at the speed of a fill.
    where = "cpu" if slopes.device.type == "mps" else slopes.device
    ahead = torch.arange(1 - keys, queries, device=where)
    line = slopes.to(where, torch.float64)[:, None] * (ahead if causal else -ahead.abs())
    if causal:
        line = line.masked_fill(ahead > 0, float("-inf"))
    line = line.to(dtype).contiguous()
    windows = line.as_strided((len(slopes), queries, keys), (queries + keys - 1, 1, 1))
    return windows.flip(1).to(slopes.device)
