"""What each layer of a serving model does with a token: norm, rotation, write to a cache."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc import ops
from posenc._contract import checks
from posenc._contract.overlap import check_inference_mode, check_no_internal_overlap, overlaps
from posenc._contract.position_checks import Limit
from posenc._contract.tracing import is_plain
from posenc.functional._positions import run_kernel
from posenc.functional.norm import check_weight, is_norm
from posenc.functional.rotary import check_arguments, native_arguments, swap_heads
from posenc.ops import LARGEST, CacheTarget, CacheWrite, Norm, SlotOutOfRange, Spec, TableRows
from posenc.ops.cache.cache import rotate_and_cache_op
from posenc.ops.rotation.spec import PAGES_OF_TOKENS


class CacheOptions(NamedTuple):
    """The arguments of :func:`rotate_and_cache` that do not belong to the rotation."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    zero_centered: bool
    k_scale: Tensor | float | None
    v_scale: Tensor | float | None
    k_scale_cache: Tensor | None
    v_scale_cache: Tensor | None
    cache_layout: str


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
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
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
    r"""Rotate queries into a new tensor, and keys, with values, into a cache.

    That is one kernel; on a CPU, a cache of 8 bits takes several torch operations.

    .. math:: \text{cache}[\text{slot}] = \text{round}(R_\phi \, \text{norm}(k) / \text{scale})

    Norm, rotation and scale are computed in the next wider dtype and rounded to the dtype of the
    cache, to 8 bits by way of float32. If the call raises, for example for a slot
    that is out of range, the caches are unchanged. There is no gradient.

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
            int8. A number is made a tensor at each call, which on a GPU is one more launch, and a
            CUDA graph keeps the number that it captured.
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
        last: Whether the last channels are rotated.

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
    options = CacheOptions(
        q_weight,
        k_weight,
        eps,
        zero_centered,
        k_scale,
        v_scale,
        k_scale_cache,
        v_scale_cache,
        cache_layout,
    )
    who, caches = "rotate_and_cache", (k_cache, v_cache)
    pairs = interleaved, interleaved_out, last
    arguments = native_arguments(q, cos, sin, offset, position_ids, seq_dim, *pairs)
    rotated = try_native_cache((q, k, v), arguments, caches, slot_mapping, options)
    if rotated is not None:
        return rotated
    (q, k, v), seq_dim, as_tokens = as_batch(who, q, k, v, seq_dim)
    rotation = offset, position_ids, seq_dim, *pairs
    checked = check_arguments(who, "qk", [q, k], cos, sin, *rotation)
    limit, (q, k), cos, sin, rows, spec = checked
    (v,) = swap_heads([v], seq_dim)
    write = check_write(who, (q, k, v), caches, slot_mapping, as_tokens, options)
    rotated = cache_rows(who, limit, write, cos, sin, rows, spec)
    return as_given(rotated, seq_dim, as_tokens)


def try_native_cache(
    qkv: tuple[Any, Any, Any],
    arguments: tuple[Any, ...] | None,
    caches: tuple[Any, Any],
    slots: Any,
    options: CacheOptions,
) -> Tensor | None:
    """The rotated queries if native code takes all arguments as they are, or None.

    ``arguments`` are those of the rotation, by :func:`native_arguments`.
    """
    q_weight, k_weight, eps, zero_centered, *scales, cache_layout = options
    if arguments is None or not is_norm(eps, zero_centered) or cache_layout not in ("NHD", "HND"):
        return None
    k_scale, v_scale, k_scale_cache, v_scale_cache = scales
    if all(scale is None for scale in scales):
        # A cache of 8 bits needs a scale.
        if not all(isinstance(t, Tensor) and t.dtype is qkv[0].dtype for t in caches):
            return None
    elif (k_scale is None) == (k_scale_cache is None) or (v_scale is None) == (
        v_scale_cache is None
    ):
        return None
    else:
        k_scale = _scale_tensor(k_scale, qkv[0]) if type(k_scale) is float else k_scale
        v_scale = _scale_tensor(v_scale, qkv[0]) if type(v_scale) is float else v_scale
    *rotation, layout = arguments
    layout += PAGES_OF_TOKENS if cache_layout == "NHD" else 0
    written, read = (*caches, k_scale_cache, v_scale_cache), (slots, q_weight, k_weight)
    numbers = layout, eps, 1.0 if zero_centered else 0.0
    result: Tensor | None = rotate_and_cache_op.try_native(
        *qkv, *written, *read, k_scale, v_scale, *rotation, *numbers
    )
    return result


def as_batch(
    who: str, q: Tensor, k: Tensor, v: Tensor, seq_dim: int
) -> tuple[list[Tensor], int, bool]:
    """Tokens ``(T, H, D)`` as one sequence ``(1, T, H, D)``, its ``seq_dim``, and if they were."""
    as_tokens = checks.float_tensor(who, "q", q).dim() == 3
    if q.dim() not in (3, 4):
        checks.rank(who, "q", q, (3, 4), "(B, H, L, D), (B, L, H, D) or (T, H, D)")
    axes = "(T, H, D)" if as_tokens else "that of q, (B, heads, L, D) or (B, L, heads, D)"
    for name, x in (("k", k), ("v", v)):
        checks.float_tensor(who, name, x)
        if x.dim() != q.dim():
            checks.rank(who, name, x, (q.dim(),), axes)
    if not as_tokens:
        return [q, k, v], seq_dim, False
    return [q[None], k[None], v[None]], 1, True


def as_given(rotated: Tensor, seq_dim: int, as_tokens: bool) -> Tensor:
    """The rotated ``(B, H, L, D)`` in the order of the user's tensor."""
    rotated = swap_heads([rotated], seq_dim)[0]
    return rotated[0] if as_tokens else rotated


def check_write(
    who: str,
    qkv: tuple[Tensor, Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    slots: Tensor,
    as_tokens: bool,
    options: CacheOptions,
) -> CacheWrite:
    """Check all arguments but the rotation's; q and k are checked, and ``(B, H, L, D)`` like v."""
    q, k, v = qkv
    _check_values(who, q, k, v)
    if options.q_weight is not None:
        check_weight(who, "q_weight", options.q_weight, q)
    if options.k_weight is not None:
        check_weight(who, "k_weight", options.k_weight, k)
    eps = checks.positive_float(who, "eps", options.eps)
    shift = 1.0 if checks.boolean(who, "zero_centered", options.zero_centered) else 0.0
    if options.cache_layout not in ("NHD", "HND"):
        hint = "NHD is (pages, page, heads, D), and HND is (pages, heads, page, D)."
        checks.fail(who, 'cache_layout must be "NHD" or "HND"', repr(options.cache_layout), hint)
    slots = _check_slots(who, slots, q, as_tokens)
    nhd = options.cache_layout == "NHD"
    k_scales, v_scales = options.k_scale_cache, options.v_scale_cache
    k_target = _check_target(who, "k", k, caches[0], options.k_scale, k_scales, slots, nhd)
    v_target = _check_target(who, "v", v, caches[1], options.v_scale, v_scales, slots, nhd)
    if k_target.slots() != v_target.slots():
        got = f"{k_target.slots()} and {v_target.slots()}"
        hint = "Give both caches as many pages of the same length."
        checks.fail(who, "k_cache and v_cache must have one number of slots", got, hint)
    _check_caches(who, *caches, k_scales, v_scales)
    norm = Norm(eps, shift)
    return CacheWrite(q, k, v, slots, k_target, v_target, options.q_weight, options.k_weight, norm)


def cache_rows(
    who: str, limit: Limit, write: CacheWrite, cos: Tensor, sin: Tensor, rows: TableRows, spec: Spec
) -> Tensor:
    """Run the kernel; errors for rows as in :func:`run_kernel`, and for slots a ValueError."""
    if torch.is_grad_enabled():
        *tensors, k_target, v_target, q_weight, k_weight, _ = write
        read = *tensors, q_weight, k_weight, cos, sin
        if any(t is not None and t.requires_grad for t in (*read, *k_target, *v_target)):
            rule = "no tensor may require a gradient, because a cache passes none on"
            checks.fail(who, rule, "one that does", "Call it under torch.no_grad().")
    try:
        return run_kernel(who, limit, ops.rotate_and_cache, write, cos, sin, rows, spec)
    except SlotOutOfRange as error:
        rule = f"slot_mapping must be in [0, {write.k_target.slots()}), or -1 to store nothing"
        checks.fail(who, rule, error.slot, "slot = page index * page size + index in the page.")


def _check_values(who: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    sizes = v.shape[0], v.shape[2]
    if sizes != (q.shape[0], q.shape[2]) or v.shape[3] == 0:
        rule = "v must have the batch and length of q and k, and at least one channel"
        got = f"(B, H, L, D) of {tuple(v.shape)} for {tuple(q.shape)}"
        checks.fail(who, rule, got, "Pass one value for each key; for (B, L, H, D), seq_dim=1.")
    if not (q.dtype == k.dtype == v.dtype and q.device == v.device):
        got = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        checks.fail(who, "q, k and v must have one dtype and device", got, "Convert them first.")


def _check_slots(who: str, slots: Any, q: Tensor, as_tokens: bool) -> Tensor:
    """``slots`` as ``[B, L]``."""
    expected = (q.shape[2],) if as_tokens else (q.shape[0], q.shape[2])
    typed = isinstance(slots, Tensor) and slots.dtype in (torch.int64, torch.int32)
    if not typed or slots.shape != expected:
        rule = f"slot_mapping must be an int64 or int32 tensor of shape {expected}"
        hint = "Pass one slot for each token, -1 for one that is not stored."
        error = ValueError if typed else TypeError
        checks.fail(who, rule, checks.describe(slots), hint, error)
    if slots.device != q.device:
        checks.fail(who, f"slot_mapping must be on {q.device}", slots.device, "Move them there.")
    return slots[None] if as_tokens else slots  # type: ignore[no-any-return]


def _check_target(
    who: str,
    name: str,
    x: Tensor,
    cache: Any,
    scale: Any,
    scales: Any,
    slots: Tensor,
    nhd: bool,
) -> CacheTarget:
    """The cache of ``x`` and its scales, all with heads before tokens."""
    if not isinstance(cache, Tensor) or (cache.dtype != x.dtype and cache.dtype not in LARGEST):
        rule = f"{name}_cache must be a tensor in {x.dtype}, float8_e4m3fn, float8_e5m2 or int8"
        got = cache.dtype if isinstance(cache, Tensor) else checks.describe(cache)
        checks.fail(who, rule, got, f"Make it in the dtype of {name}.", TypeError)
    (_, heads, _, width), shape = x.shape, cache.shape
    if len(shape) != 4 or shape[2 if nhd else 1] != heads or shape[3] != width:
        axes = f"(pages, page, {heads}, {width})" if nhd else f"(pages, {heads}, page, {width})"
        hint = 'Pass cache_layout="HND" for caches that have heads before tokens.'
        checks.fail(who, f"{name}_cache must be {axes}", f"shape {tuple(shape)}", hint)
    if cache.stride(3) != 1 or cache.device != x.device:
        got = f"strides {cache.stride()} on {cache.device}"
        rule = f"{name}_cache must be dense along its last dimension, on {x.device}"
        checks.fail(who, rule, got, "Call contiguous(), or move it.")
    view = cache.transpose(1, 2) if nhd else cache
    if scale is None and scales is None:
        if cache.dtype in LARGEST:
            rule = f"{name}_cache of 8 bits needs {name}_scale or {name}_scale_cache"
            hint = f"Pass the {name}_scales[layer] of a PagedCache with scales, or a {name}_scale."
            checks.fail(who, rule, f"a {cache.dtype} cache and neither", hint)
        return CacheTarget(view)
    both = scale is not None and scales is not None
    if both or cache.dtype == x.dtype:
        rule = f"{name}_scale and {name}_scale_cache exclude each other, and need a cache of 8 bits"
        got = "both" if both else f"one for a {cache.dtype} cache"
        checks.fail(who, rule, got, "Pass one of them, or none.")
    if isinstance(scale, (int, float)):
        scale = _scale_tensor(checks.positive_float(who, f"{name}_scale", scale), x)
    divisors = scales if scale is None else scale
    if not isinstance(divisors, Tensor) or divisors.dtype != torch.float32:
        rule = f"{name}_scale must be a number or a float32 tensor"
        rule = f"{name}_scale_cache must be a float32 tensor" if scale is None else rule
        hint = f"Pass torch.tensor(scale, device={name}.device), for example."
        checks.fail(who, rule, checks.describe(divisors), hint, TypeError)
    if divisors.device != x.device:
        checks.fail(who, f"scales must be on {x.device}", divisors.device, "Move them there.")
    if scale is not None:
        scale = _expanded(who, f"{name}_scale", scale, (*slots.shape, heads))
        # A kernel would not see the negative bit.
        return CacheTarget(view, scale.resolve_neg().transpose(1, 2))
    if scales.shape != shape[:3]:
        rule = f"{name}_scale_cache must have shape {tuple(shape[:3])}"
        got = f"shape {tuple(scales.shape)}"
        checks.fail(who, rule, got, "Pass one scale for each row of the cache.")
    return CacheTarget(view, None, scales.transpose(1, 2) if nhd else scales)


def _scale_tensor(scale: float, x: Any) -> Any:
    """A number that may be a scale as a tensor on the device of ``x``, without a copy to it."""
    if 0.0 < scale < math.inf and isinstance(x, Tensor):
        return torch.full((), scale, dtype=torch.float32, device=x.device)
    return scale


def _expanded(who: str, name: str, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``scale`` as a view of ``shape``, (B, L, heads)."""
    sizes = zip(reversed(scale.shape), reversed(shape), strict=False)
    if scale.dim() > 3 or not all(checks.is_one_of(n, (1, size)) for n, size in sizes):
        rule = f"{name} must broadcast to {shape}, tokens and heads"
        got = f"shape {tuple(scale.shape)}"
        checks.fail(who, rule, got, "Pass (), (heads,), or one for each token with a last 1.")
    return scale.expand(shape)


def _check_caches(
    who: str, k_cache: Tensor, v_cache: Tensor, k_scales: Tensor | None, v_scales: Tensor | None
) -> None:
    """Refuse caches and scales that must not be written, or that share elements."""
    tensors = [t for t in (k_cache, v_cache, k_scales, v_scales) if t is not None]
    for t in tensors:
        check_no_internal_overlap(who, t)
    if not is_plain(*tensors):
        return
    for t in tensors:
        check_inference_mode(who, t)
        if t.is_neg():  # in a graph, torch refuses it
            rule = "a cache must not have the negative bit, which no kernel sees"
            got = f"a lazily negated view of shape {tuple(t.shape)}"
            checks.fail(who, rule, got, "Call resolve_neg(), and keep the result as the cache.")
    _check_apart(who, "k_cache and v_cache", k_cache, v_cache)
    if k_scales is not None and v_scales is not None:
        _check_apart(who, "k_scale_cache and v_scale_cache", k_scales, v_scales)


def _check_apart(who: str, names: str, a: Tensor, b: Tensor) -> None:
    """Refuse two tensors to be written that share elements; views of one tensor need not."""
    if overlaps(a, b):
        rule, got = f"{names} must not share memory", "the same elements in both"
        checks.fail(who, rule, got, "Make two, or slices that do not overlap.")
