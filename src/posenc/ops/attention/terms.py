"""Attention with a bias that kernels compute with the scores: products, FIRE's network, CoPE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, sym_max, sym_min

from posenc._contract import checks, qk_checks
from posenc._contract.tracing import is_exporting
from posenc.ops.attention import op
from posenc.ops.attention.biases import (
    Bias,
    Call,
    CopeLevels,
    FireNetwork,
    Products,
    RowBias,
    Terms,
)
from posenc.ops.attention.op import call_of, check_call, check_results, differentiate
from posenc.ops.attention.rows import attend_dense, read_vectors
from posenc.ops.op import Op, Size, Start, replaced
from posenc.ops.plan import Plan, Target
from posenc.ops.rotation.rotation import check_devices, refuse


def relative_terms(
    q: Tensor,
    k: Tensor,
    rows: Callable[[Tensor], Tensor],
    *,
    for_queries: Tensor | None = None,
    for_keys: Tensor | None = None,
    reach: tuple[int, int] | None = None,
) -> Products:
    r"""Add the products of queries, and of keys, with a vector for each distance.

    .. math:: \text{bias}_{ij} = s\,(q_i \cdot A_{r(i - j)} + k_j \cdot B_{r(i - j)})

    The vectors are those of Shaw, Transformer-XL and DeBERTa, by the function :math:`r`. On CUDA
    the attention's kernel makes the products; elsewhere they are made for a few queries at a time.
    Gradients reach ``q``, ``k`` and the vectors, and are the same bits in every run. :math:`s` is
    the scale of the attention.

    Args:
        q: ``(B, H, Q, D)``, that of the attention, or with a vector added.
        k: ``(B, Hk, K, D)``, that of the attention.
        rows: :math:`r`, a function of an int64 tensor of distances that returns the rows of the
            vectors, int64. It must take any distance, and clip it.
        for_queries: :math:`A`, ``(R, D)``, or ``(R, H, D)`` with vectors for each head; None for
            none.
        for_keys: :math:`B`, in the same way.
        reach: ``(least, greatest)``: distances beyond these use the row of the nearer one, and a
            kernel then has less to do. None for all distances.

    Returns:
        A bias for :func:`biased_attention` of these queries and keys.

    Examples:
        >>> from posenc.attention import biased_attention
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
        >>> vectors = torch.randn(17, 64, requires_grad=True)  # distances 0 to 16
        >>> bias = relative_terms(q, k, lambda d: d.clamp(0, 16), for_queries=vectors)
        >>> biased_attention(q, k, v, bias, causal=True).shape
        torch.Size([1, 8, 512, 64])

    References:
        Shaw et al., *Self-Attention with Relative Position Representations*, 2018; Dai et al.,
        *Transformer-XL*, 2019; He et al., *DeBERTa*, 2021.
    """
    who = "relative_terms"
    qk_checks.check_qk(who, q, k)
    queries, keys = qk_checks.check_lengths(who, q.shape[2], k.shape[2])
    wide = torch.promote_types(q.dtype, torch.float32)
    to_q, to_k = (
        _check_vectors(who, name, x, q, wide)
        for name, x in (("for_queries", for_queries), ("for_keys", for_keys))
    )
    least, most = (-keys - queries, keys + queries) if reach is None else reach
    if not least <= 0 <= most:
        rule = "reach must be a pair of ints, the first at most zero, the second at least zero"
        checks.fail(who, rule, reach, "Pass (-128, 128), for example.")
    return Products(q, k, rows, to_q, to_k, None, least, most)


def _check_vectors(who: str, name: str, vectors: Any, q: Tensor, wide: torch.dtype) -> Any:
    """The vectors as ``[R, D or H D]``, on the device of the queries, or None."""
    if vectors is None:
        return None
    checks.float_tensor(who, name, vectors)
    heads, width, sizes = q.shape[1], q.shape[3], tuple(vectors.shape)
    # The heads are compared, not searched for: torch.compile cannot search for a symbolic size.
    shared = len(sizes) == 2 or (len(sizes) == 3 and sizes[1] == heads)
    if not shared or sizes[-1] != width:
        rule = f"{name} must have shape (R, {width}) or (R, {heads}, {width})"
        hint = "Pass a row for each distance, of the width and heads of q."
        checks.fail(who, rule, f"shape {sizes}", hint)
    return vectors.to(q.device, wide).flatten(1)


# The most hidden units, and positions of CoPE, that a kernel holds.
_MOST_UNITS, _MOST_POSITIONS = 64, 256


def has_kernel(q: Tensor, v: Tensor, bias: Bias | None) -> bool:
    """Whether a kernel computes attention with this bias."""
    if isinstance(bias, FireNetwork) and bias.units.shape[1] > _MOST_UNITS:
        return False
    if isinstance(bias, CopeLevels) and bias.values.shape[3] > _MOST_POSITIONS:
        return False
    return not isinstance(bias, RowBias) and op.has_kernel(q, v)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Terms, call: Call) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp by the op."""
    own_q, zero = q, 0
    p = m = for_queries = for_keys = network = levels = None
    if isinstance(bias, FireNetwork):
        network = torch.cat([x.flatten() for x in bias])
    elif isinstance(bias, CopeLevels):
        levels = bias.values
    else:
        if bias.shift is not None:
            wide = torch.promote_types(q.dtype, bias.shift.dtype)
            own_q = (q.to(wide) + bias.shift.to(wide)[:, None]).to(q.dtype)
        rows, zero = _rows_of_distances(q, k, bias, call)
        if bias.for_queries is not None:
            for_queries = read_vectors(bias.for_queries, rows, q).to(q.dtype)
            p = None if bias.q is own_q else bias.q.to(q.dtype)
        if bias.for_keys is not None:
            for_keys = read_vectors(bias.for_keys, rows, q).to(q.dtype)
            m = None if bias.k is k else bias.k.to(q.dtype)
    tensors = own_q, k, v, p, m, for_queries, for_keys, network, levels
    out, lse = terms_op(*tensors, *call._replace(zero=zero).arguments_without_values())
    return out, lse


def _rows_of_distances(q: Tensor, k: Tensor, bias: Products, call: Call) -> tuple[Tensor, int]:
    """The rows of the distances that there are, as far as they differ, and the place of zero."""
    # Of any length, if traced. torch.compile turns min and max into these, and up to 2.11 refuses
    # these for ints.
    lower, upper = (sym_min, sym_max) if is_exporting() else (min, max)
    queries, keys = q.shape[2], k.shape[2]
    least, most = (0 if call.causal else -queries - keys), queries + keys
    if call.starts is None:
        least = upper(least, lower(call.start - keys + 1, 0))
        most = lower(most, upper(call.start + queries - 1, 0))
    least, most = upper(bias.least, least), lower(bias.most, most)
    return bias.rows(torch.arange(least, most + 1, device=q.device)), -least


class TermsCall(NamedTuple):
    """Attention with vectors for distances, a network or levels; the others are as in a `Call`."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor | None
    m: Tensor | None
    for_queries: Tensor | None
    for_keys: Tensor | None
    network: Tensor | None
    levels: Tensor | None
    starts: Tensor | None
    first: Tensor | None
    last: Tensor | None
    how: int
    zero: Size
    start: Start
    scale: float
    left: Size
    right: Size


class TermsBackwardCall(NamedTuple):
    """The gradients of :class:`TermsCall`."""

    g: Tensor
    g_lse: Tensor | None
    out: Tensor
    lse: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor | None
    m: Tensor | None
    for_queries: Tensor | None
    for_keys: Tensor | None
    network: Tensor | None
    levels: Tensor | None
    starts: Tensor | None
    first: Tensor | None
    last: Tensor | None
    how: int
    zero: Size
    start: Size
    scale: float
    left: Size
    right: Size


# The tensors of a call that may have a gradient.
INPUTS = ("q", "k", "v", "p", "m", "for_queries", "for_keys", "network", "levels")


def inputs_of(given: TermsCall | TermsBackwardCall) -> list[Tensor | None]:
    """The tensors of a call that may have a gradient."""
    return [getattr(given, name) for name in INPUTS]


def _check(who: str, given: TermsCall | TermsBackwardCall) -> Call:
    """The call; refuse what would lead kernels out of a tensor's memory."""
    call, q, k = call_of(given, None), given.q, given.k
    check_devices(who, *given)
    check_call(who, q, k, given.v, call)
    _, heads, _, width = q.shape
    counts = {len(x) for x in (given.for_queries, given.for_keys) if x is not None}

    def are_vectors(x: Tensor | None, like: Tensor, vectors: Tensor | None) -> bool:
        if vectors is None:
            return x is None
        is_like = x is None or (x.shape == like.shape and x.dtype == q.dtype)
        shapes = (len(vectors), 1, width), (len(vectors), heads, width)
        return is_like and vectors.shape in shapes and vectors.dtype == q.dtype

    def is_network(x: Tensor) -> bool:
        units, rest = divmod(x.numel() - 2 - heads, 2 + heads)
        return x.dim() == 1 and x.dtype in (torch.float32, torch.float64) and units > 0 == rest

    def are_levels(x: Tensor) -> bool:
        fits = x.dim() == 4 and x.shape[:3] == q.shape[:3] and x.shape[3] > 0
        return fits and x.dtype in checks.FLOAT_DTYPES and call.causal

    network, levels = given.network, given.levels
    if not (
        are_vectors(given.p, q, given.for_queries)
        and are_vectors(given.m, k, given.for_keys)
        and (network is None or is_network(network))
        and (levels is None or are_levels(levels))
        and [bool(counts), network is not None, levels is not None].count(True) == 1
        and len(counts) < 2
        and 0 not in counts
    ):
        rule = "vectors, or a network, or levels must fit q (B, H, Q, D) and k (B, Hk, K, D)"
        refuse(who, rule, *inputs_of(given))
    return call


def _run(given: TermsCall) -> tuple[Tensor, ...]:
    _check("posenc::attend_terms", given)
    return _operations(given)


def _plan(given: TermsCall, plan: Plan, target: Target) -> None:
    call = _check("posenc::attend_terms", given)
    if given.levels is not None:
        from posenc.ops.attention.triton import cope

        cope.plan_forward(given, call, plan)
    else:
        from posenc.ops.attention.triton import terms

        terms.plan_forward(given, call, plan)


def _operations(given: TermsCall) -> tuple[Tensor, ...]:
    q, k, call, network, levels = (
        given.q,
        given.k,
        call_of(given, None),
        given.network,
        given.levels,
    )
    bias: Terms
    if network is not None:
        units = (network.shape[0] - 2 - q.shape[1]) // (2 + q.shape[1])
        c, threshold, ends, outputs = network.split((1, 1, 2 * units, (1 + units) * q.shape[1]))
        bias = FireNetwork(c, threshold, ends.view(2, units), outputs.view(1 + units, q.shape[1]))
    elif levels is not None:
        bias = CopeLevels(q, k, levels)
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        vectors = given.for_queries, given.for_keys
        to_q, to_k = (x if x is None else x.to(wide).flatten(1) for x in vectors)
        last = next(x.shape[0] for x in (to_q, to_k) if x is not None) - 1

        def rows(distance: Tensor) -> Tensor:
            return (distance + call.zero).clamp(0, last)

        p, m = q if given.p is None else given.p, k if given.m is None else given.m
        bias = Products(p, m, rows, to_q, to_k, None, -call.zero, last - call.zero)
    return attend_dense(q, k, given.v, call, bias)


def _results(given: TermsCall) -> tuple[Tensor, ...]:
    check_devices("posenc::attend_terms", *given)
    q, v = given.q, given.v
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


def _check_backward(given: TermsBackwardCall) -> Call:
    who = "posenc::attend_terms_backward"
    call = _check(who, given)
    check_results(who, given.q, given.v, given.g, given.g_lse, given.out, given.lse)
    return call


def _run_backward(given: TermsBackwardCall) -> tuple[Tensor, ...]:
    _check_backward(given)
    who = "posenc::attend_terms_backward"
    refuse(who, "there must be a kernel for the device, the dtype and the width of q", given.g)


def _plan_backward(given: TermsBackwardCall, plan: Plan, target: Target) -> None:
    call = _check_backward(given)
    if given.levels is not None:
        from posenc.ops.attention.triton import cope

        cope.plan_backward(given, call, plan)
    else:
        from posenc.ops.attention.triton import terms

        terms.plan_backward(given, call, plan)


def _results_backward(given: TermsBackwardCall) -> tuple[Tensor, ...]:
    """The gradients of :func:`inputs_of`; an op cannot return None in place of a tensor."""
    check_devices("posenc::attend_terms_backward", *given)
    inputs = inputs_of(given)
    return tuple([given.g.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs])


def _save(ctx: Any, given: TermsCall, results: tuple[Tensor, ...]) -> None:
    places = given.starts, given.first, given.last
    ctx.save_for_backward(*results, *inputs_of(given), *places)
    ctx.others = replaced(given, dict.fromkeys((*INPUTS, "starts", "first", "last")))
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, g_lse: Tensor | None) -> dict[str, Tensor | None]:
    out, lse, *inputs, starts, first, last = ctx.saved_tensors
    places = {"starts": starts, "first": first, "last": last}
    given = replaced(ctx.others, {**dict(zip(INPUTS, inputs, strict=True)), **places})
    if torch.is_grad_enabled() or not _has_plan(given):
        # A gradient that is differentiated again consists of torch operations.
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            return _operations(replaced(given, dict(zip(INPUTS, inputs, strict=True))))

        grads: Any = differentiate(run, inputs, (g, g_lse))
    else:
        g = torch.zeros_like(out) if g is None else g
        grads = terms_backward_op(g, g_lse, out, lse, *given)
    return {
        name: grad for name, grad, x in zip(INPUTS, grads, inputs, strict=True) if x is not None
    }


def _backward_call(given: TermsCall, results: tuple[Tensor, ...]) -> tuple[Op, tuple[Any, ...]]:
    """The call of the gradients, if the output alone has one."""
    out, lse = results
    return terms_backward_op, (torch.empty_like(out), None, out, lse, *given)


def _has_plan(given: TermsCall | TermsBackwardCall) -> bool:
    return op.has_kernel(given.q, given.v)


terms_op = Op(
    "attend_terms",
    TermsCall,
    _results,
    2,
    _run,
    _operations,
    plan=_plan,
    has_plan=_has_plan,
    save=_save,
    backward=_gradients,
    backward_call=_backward_call,
    has_cpu=False,
)
terms_backward_op = Op(
    "attend_terms_backward",
    TermsBackwardCall,
    _results_backward,
    len(INPUTS),
    _run_backward,
    _run_backward,
    plan=_plan_backward,
    has_plan=_has_plan,
    has_cpu=False,
)
