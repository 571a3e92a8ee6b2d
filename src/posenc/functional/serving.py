"""What each layer of a serving model does with a token: norm, rotation, write to a cache."""

from __future__ import annotations

from torch import Tensor

from posenc.functional._cache import (
    CacheOptions,
    as_batch,
    as_given,
    cache_at_once,
    cache_rows,
    check_write,
)
from posenc.functional.rotary import arguments, layout_of, swap_heads

_WHO = "rotate_and_cache"


def rotate_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    cache_layout: str = "NHD",
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    seq_dim: int = -2,
    interleaved: bool = True,
    interleaved_out: bool | None = None,
    last: bool = False,
) -> Tensor:
    r"""Rotate queries into a new tensor, and keys, with values, into a cache, in one kernel.

    .. math:: \text{cache}[\text{slot}] = \text{round}(R_\phi \, \text{norm}(k) / \text{scale})

    Norm, rotation and scale are computed in the next wider dtype and rounded once, to the dtype of
    the cache. An error, which a slot out of range is, leaves the caches as they are. There is no
    gradient.

    Args:
        q: Queries ``(B, H, L, D)``, with ``seq_dim=1`` ``(B, L, H, D)``, or as tokens of any
            sequences ``(T, H, D)``. Views are not copied if their last dimension is dense.
        k: Keys, of another number of heads.
        v: Values, whose heads and width may differ. For latent attention (DeepSeek), the latent.
        cos: As in :func:`rotate`.
        sin: As ``cos``.
        k_cache: Pages ``(pages, page, Hk, D)``, or ``(pages, Hk, page, D)`` with
            ``cache_layout="HND"``, which a contiguous cache ``(B, Hk, L, D)`` is too; any strides,
            dense along ``D``. In the dtype of ``k``, float8_e4m3fn, float8_e5m2 or int8.
        v_cache: As ``k_cache``, for ``v``. Both may be views of one tensor; no input may be a view
            of them.
        slot_mapping: The row of the caches for each token, ``page index * page_size + place``:
            int64 or int32, ``(B, L)``, or ``(T,)`` for tokens. -1 stores nothing. If two tokens
            have the same slot, either may be stored.
        q_weight: Weight of an RMSNorm of ``q`` before the rotation, as in :func:`qk_norm_rope`.
        k_weight: The same for ``k``.
        eps: Added to the mean square.
        zero_centered: Multiply by ``1 + weight`` (Gemma).
        k_scale: A ``k_cache`` of 8 bits needs this or ``k_scale_cache``. Keys are divided by it and
            limited to the range of the dtype, -127 to 127 for int8: float32, ``()``, ``(Hk,)``, or
            any shape that broadcasts to ``(*slot_mapping.shape, Hk)``. 1 may do for float8, not for
            int8.
        v_scale: As ``k_scale``, for ``v``.
        k_scale_cache: Instead of ``k_scale``: float32, of the shape of ``k_cache`` without its last
            dimension. The scale of each row is its largest magnitude over the largest number of the
            dtype; it is stored here.
        v_scale_cache: As ``k_scale_cache``, for ``v``.
        cache_layout: ``"NHD"`` or ``"HND"``, of both caches and their scales.
        offset: As in :func:`rotate`, and so are all that follow.
        position_ids: ``(T,)`` for tokens. Without them, token ``t`` takes table row ``t``, which
            suits tables with a row for each token.
        seq_dim: The dimension of the tokens.
        interleaved: The pairs.
        interleaved_out: The pairs of the result.
        last: Rotate the last channels.

    Returns:
        The rotated ``q``, a new tensor.

    Examples:
        >>> import torch
        >>> q = k = v = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]])  # 2 tokens, 1 head, 2 channels
        >>> cos, sin = torch.tensor([[0.0]]), torch.tensor([[1.0]])  # a quarter turn
        >>> k_cache, v_cache = torch.zeros(2, 1, 4, 1, 2)  # each 1 page of 4 tokens
        >>> at, slot_mapping = torch.tensor([0, 0]), torch.tensor([2, -1])
        >>> _ = rotate_and_cache(q, k, v, cos, sin, k_cache, v_cache, slot_mapping, position_ids=at)
        >>> k_cache.flatten(), v_cache.flatten()
        (tensor([ 0.,  0.,  0.,  0., -4.,  3.,  0.,  0.]),
         tensor([0., 0., 0., 0., 3., 4., 0., 0.]))
    """
    options: CacheOptions = {
        "q_weight": q_weight,
        "k_weight": k_weight,
        "eps": eps,
        "zero_centered": zero_centered,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "k_scale_cache": k_scale_cache,
        "v_scale_cache": v_scale_cache,
        "cache_layout": cache_layout,
    }
    caches = k_cache, v_cache
    layout = layout_of(offset, position_ids, seq_dim, interleaved, interleaved_out, last)
    where = slot_mapping, position_ids, offset, layout
    rotated = cache_at_once((q, k, v), (cos, sin), caches, *where, **options)
    if rotated is not None:
        return rotated
    (q, k, v), seq_dim, as_tokens = as_batch(_WHO, q, k, v, seq_dim)
    how = offset, position_ids, seq_dim, interleaved, interleaved_out, last
    limit, (q, k), cos, sin, rows, spec = arguments(_WHO, "qk", [q, k], cos, sin, *how)
    (v,) = swap_heads([v], seq_dim)
    write = check_write(_WHO, (q, k, v), caches, slot_mapping, as_tokens=as_tokens, **options)
    rotated = cache_rows(_WHO, limit, write, cos, sin, rows, spec)
    return as_given(rotated, seq_dim, as_tokens)
