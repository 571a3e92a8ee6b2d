"""Biases that depend on the distance: ALiBi, and the buckets of T5."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks
from posenc.numerics.slopes import head_slopes
from posenc.numerics.spans import Window, document_ends, gather_rows, spans
from posenc.numerics.tables import float64_device, round_once


def alibi_slopes(
    num_heads: int,
    *,
    bias_max: float = 8.0,
    geometric: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    r"""Slope of each head, in the paper's head order.

    Head ``h`` of ``n`` has slope :math:`2^{-8h/n}` if ``n`` is a power of two. For other ``n`` the
    paper's code takes the slopes of the power of two below, then every second one of that above.

    Args:
        num_heads: Heads ``n``, positive.
        bias_max: The exponent 8 above, as in MPT's ``alibi_bias_max``.
        geometric: Use :math:`2^{-8h/n}` for every ``n``, also where the paper's code does not.
        device: The device of the result.
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
    slopes = head_slopes(heads, peak, geometric=checks.boolean(who, "geometric", geometric))
    return round_once(slopes, checks.float_dtype(who, "dtype", dtype)).to(torch.device(device))


def alibi_bias(
    slopes: Tensor,
    q_len: int,
    k_len: int | None = None,
    *,
    causal: bool = True,
    query_offset: int | Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    r"""Bias to add to the attention scores, before the softmax.

    .. math:: \text{bias}_{h,i,j} = -m_h\,(i + K - Q - j)

    The last query is at the last key, so that one query against a cache of keys gets the last row.
    If causal, later keys get ``-inf``; otherwise the distance is absolute. The bias is computed in
    float64 and rounded once. ``scaled_dot_product_attention`` takes it as ``attn_mask``.

    With ``q_len=1`` it is one number for each head and key, :math:`m_h (j - K + 1)`. Under a causal
    mask of your own these serve every query: the softmax cancels what they lack, a constant in
    each row.

    Args:
        slopes: :math:`m`, shape ``(H,)`` or ``(B, H)``, as :func:`alibi_slopes` gives them.
        q_len: Queries ``Q``.
        k_len: Keys ``K``, at least ``Q``; ``Q`` if None.
        causal: Whether a query sees only keys up to its own.
        query_offset: Key index of the first query, ``K - Q`` if None: an int, or an integer tensor
            ``()`` or ``(B,)``.
        position_ids: Position of each key, ``(K,)`` or ``(B, K)``, from which distances are
            computed. The causal mask still compares key indices.
        document_ids: Ids ``(K,)`` or ``(B, K)``. A run of equal ids is a document, and a query
            sees only its own.
        window: A sliding window, as in :func:`posenc.attention.biased_attention`.
        dtype: A floating dtype for the result.

    Returns:
        Tensor of shape ``(H, Q, K)``, or ``(B, H, Q, K)`` if an argument has a batch axis, on the
        device of ``slopes``.

    Examples:
        >>> alibi_bias(alibi_slopes(8), 3)[0]
        tensor([[ 0.0000,    -inf,    -inf],
                [-0.5000,  0.0000,    -inf],
                [-1.0000, -0.5000,  0.0000]])

    References:
        Press et al., *Train Short, Test Long*, 2022, section 3.
    """
    who = "alibi_bias"
    slopes = qk_checks.check_slopes(who, slopes)
    queries, keys = qk_checks.check_lengths(who, q_len, k_len)
    checks.boolean(who, "causal", causal)
    checks.float_dtype(who, "dtype", dtype)
    device = float64_device(slopes.device)
    start = qk_checks.check_query_offset(who, query_offset, queries, keys, device)
    documents = qk_checks.check_key_ids(who, "document_ids", document_ids, keys, device)
    positions = qk_checks.check_key_ids(who, "position_ids", position_ids, keys, device)
    batched = qk_checks.check_batches(
        who, slopes=slopes, query_offset=start, document_ids=documents, position_ids=positions
    )
    sides = qk_checks.check_window(who, window)
    exact = slopes.to(device, torch.float64)
    by_distance = positions is None and documents is None and exact.dim() == 1
    if by_distance and queries and keys and not isinstance(start, Tensor):
        return _from_line(exact, queries, keys, start, causal, sides, dtype).to(slopes.device)
    ends = document_ends(documents)
    how: Any = {"causal": causal, "offset": start, "ends": ends, "window": sides, "device": device}
    own, first, last = spans(queries, keys, **how)
    index = torch.arange(keys, device=device)
    k_positions, q_positions = index[None], own
    if positions is not None:
        k_positions, q_positions = torch.atleast_2d(positions), gather_rows(positions, own)
    # Subtract from zero, because negation would give -0.0.
    distance = (q_positions[:, None, :, None] - k_positions[:, None, None]).abs().double()
    bias = (0.0 - distance) * torch.atleast_2d(exact)[..., None, None]
    hidden = (index < first[:, None, :, None]) | (index > last[:, None, :, None])
    bias = round_once(bias.masked_fill(hidden, float("-inf")), dtype)
    return (bias if batched else bias[0]).to(slopes.device)


def _from_line(
    slopes: Tensor,
    queries: int,
    keys: int,
    start: int,
    causal: bool,
    window: Window | None,
    dtype: torch.dtype,
) -> Tensor:
    # The bias depends only on j - i, so one line of Q + K - 1 values holds every row: row i is the
    # K values from index Q - 1 - i on. Copying these windows is as fast as filling memory.
    ahead = torch.arange(1 - queries - start, keys - start, device=slopes.device)
    line = slopes[:, None] * (ahead if causal else -ahead.abs())
    if causal:
        line = line.masked_fill(ahead > 0, float("-inf"))
    if window is not None:
        line = line.masked_fill((-ahead > window[0]) | (ahead > window[1]), float("-inf"))
    line = round_once(line, dtype).contiguous()
    windows = line.as_strided((len(slopes), queries, keys), (queries + keys - 1, 1, 1))
    return windows.flip(1)


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


def t5_buckets(
    distance: Tensor, num_buckets: int = 32, max_distance: int = 128, *, causal: bool = False
) -> Tensor:
    r"""The bucket of each distance :math:`n = i - j` between query :math:`i` and key :math:`j`.

    .. math::
        \begin{cases} n & n < e \\
        \min\!\left(e + \left\lfloor \frac{\ln(n / e)}{\ln(m / e)}\,(b - e) \right\rfloor,
        b - 1\right) & n \ge e \end{cases}

    for :math:`b` buckets, :math:`e = b / 2` of them for one distance each, and :math:`m` the
    ``max_distance``. If causal, later keys are in bucket zero; otherwise half of the buckets are
    for :math:`|n|` of later keys, after those of earlier ones. The logarithm is computed in
    float32, as published, because the floor decides at whole powers.

    Args:
        distance: An integer tensor.
        num_buckets: All buckets; even, unless causal.
        max_distance: The distance from which all are in one bucket.
        causal: Whether later keys need no buckets.

    Returns:
        An int64 tensor with the shape of ``distance``.

    Examples:
        >>> t5_buckets(torch.tensor([0, 1, 20, 500, -1]))
        tensor([ 0,  1, 10, 15, 17])

    References:
        Raffel et al., *Exploring the Limits of Transfer Learning*, 2020, section 2.1.
    """
    who = "t5_buckets"
    if not isinstance(distance, Tensor) or distance.dtype not in checks.INT_DTYPES:
        rule, got = "distance must be an integer tensor", checks.describe(distance)
        checks.fail(who, rule, got, "Pass int64 indices of queries minus those of keys.", TypeError)
    check_buckets(who, num_buckets, max_distance, causal=causal)
    count = num_buckets if causal else num_buckets // 2
    far = distance.long().clamp(min=0) if causal else distance.long().abs()
    exact = count // 2
    # The logarithm of zero is not used, but must be a number that can be an integer.
    ratio = (far.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    large = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
    bucket = torch.where(far < exact, far, large)
    return bucket if causal else bucket + count * (distance < 0)


def check_buckets(who: str, num_buckets: int, max_distance: int, *, causal: bool) -> None:
    """Refuse numbers for which the formula has no value."""
    least = 2 if checks.boolean(who, "causal", causal) else 4
    buckets = checks.integer(who, "num_buckets", num_buckets, least=least)
    if buckets % 2 and not causal:
        rule = "num_buckets must be even, half of them for each side"
        checks.fail(who, rule, buckets, f"Pass {buckets + 1}, or causal=True.")
    exact = buckets // least
    if checks.integer(who, "max_distance", max_distance) <= exact:
        rule = f"max_distance must be above {exact}, the distances with a bucket of their own"
        checks.fail(who, rule, max_distance, "Pass fewer buckets, or LearnedBias instead.")
