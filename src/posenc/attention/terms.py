"""Attention with a bias that kernels compute with the scores: products, FIRE's network, CoPE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, sym_max, sym_min

from posenc._contract import checks, qk_checks
from posenc._contract.tracing import is_exporting
from posenc.attention import chunked
from posenc.attention.biases import Bias, Call, CopeLevels, FireNetwork, Products, RowBias, Terms
from posenc.attention.op import check_call, check_results, differentiate, kernel_for
from posenc.attention.rows import attend_dense, read_vectors
from posenc.kernels.op import Op
from posenc.kernels.rotation import check_devices, refuse


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
    return not isinstance(bias, RowBias) and kernel_for(q, v) is not chunked


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
    out, lse = terms_op(*tensors, *call._replace(zero=zero).arguments()[1:])
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


def _check(who: str, tensors: Sequence[Any], call: Call) -> Call:
    """The call as the kernels read it; refuse what would lead them out of a tensor's memory."""
    q, k, v, p, m, for_queries, for_keys, network, levels = tensors
    check_devices(who, *tensors)
    call = check_call(who, q, k, v, call)
    _, heads, _, width = q.shape
    counts = {len(x) for x in (for_queries, for_keys) if x is not None}

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

    if not (
        are_vectors(p, q, for_queries)
        and are_vectors(m, k, for_keys)
        and (network is None or is_network(network))
        and (levels is None or are_levels(levels))
        and [bool(counts), network is not None, levels is not None].count(True) == 1
        and len(counts) < 2
        and 0 not in counts
    ):
        rule = "vectors, or a network, or levels must fit q (B, H, Q, D) and k (B, Hk, K, D)"
        refuse(who, rule, *tensors)
    return call


def _kernel(tensors: Sequence[Any], zero: int) -> Any:
    """The kernel with its tensors, a function of the call, or None if there is none for them."""
    q, k, v, *given, levels = tensors
    if kernel_for(q, v) is chunked:
        return None
    if levels is not None:
        from posenc.kernels.triton.cope import CountedLaunches

        return partial(CountedLaunches, q, k, v, levels)
    from posenc.kernels.triton.terms import TermLaunches

    return partial(TermLaunches, q, k, v, given, zero)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, call = _split(arguments)
    call = _check("posenc::attend_terms", tensors, call)
    kernel = _kernel(tensors, call.zero)
    return _operations(*arguments) if kernel is None else kernel(call).forward()


def _split(arguments: Sequence[Any]) -> tuple[Sequence[Any], Call]:
    """The tensors of an op's arguments, from q to the levels, and the call."""
    return arguments[:9], Call.from_arguments(None, *arguments[9:])


def _operations(*arguments: Any) -> tuple[Tensor, Tensor]:
    (q, k, v, p, m, for_queries, for_keys, network, levels), call = _split(arguments)
    bias: Terms
    if network is not None:
        units = (network.shape[0] - 2 - q.shape[1]) // (2 + q.shape[1])
        c, threshold, ends, outputs = network.split((1, 1, 2 * units, (1 + units) * q.shape[1]))
        bias = FireNetwork(c, threshold, ends.view(2, units), outputs.view(1 + units, q.shape[1]))
    elif levels is not None:
        bias = CopeLevels(q, k, levels)
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        to_q, to_k = (x if x is None else x.to(wide).flatten(1) for x in (for_queries, for_keys))
        last = next(x.shape[0] for x in (to_q, to_k) if x is not None) - 1

        def rows(distance: Tensor) -> Tensor:
            return (distance + call.zero).clamp(0, last)

        p, m = q if p is None else p, k if m is None else m
        bias = Products(p, m, rows, to_q, to_k, None, -call.zero, last - call.zero)
    return attend_dense(q, k, v, call, bias)


def _fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    check_devices("posenc::attend_terms", q, k, v, *others)
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


def _backward(g: Tensor, g_lse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> Any:
    who, (tensors, call) = "posenc::attend_terms_backward", _split(arguments)
    call = _check(who, tensors, call)
    check_results(who, tensors[0], tensors[2], g, g_lse, out, lse)
    kernel = _kernel(tensors, call.zero)
    if kernel is None:
        refuse(who, "there must be a kernel for the device, the dtype and the width of q", g)
    grads = kernel(call).backward(g, g_lse, out.contiguous(), lse.contiguous())
    if tensors[8] is None:
        grads = *grads, None
    else:
        dq, dk, dv, to_levels = grads
        grads = dq, dk, dv, *[None] * 5, to_levels
    # An op cannot return None in place of a tensor.
    return tuple(g.new_empty(0) if x is None else x for x in grads)


def _fake_backward(g: Tensor, g_lse: Tensor | None, out: Tensor, lse: Tensor, *others: Any) -> Any:
    check_devices("posenc::attend_terms_backward", g, g_lse, out, lse, *others)
    return tuple(g.new_empty(0) if x is None else x.new_empty(x.shape) for x in others[:9])


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output, *inputs[:12])
    ctx.numbers = inputs[12:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, g_lse: Tensor | None) -> tuple[Any, ...]:
    out, lse, *given = ctx.saved_tensors
    tensors, others = given[:9], (*given[9:], *ctx.numbers)
    _, call = _split((*tensors, *others))
    if torch.is_grad_enabled() or _kernel(tensors, call.zero) is None:
        # A gradient that is differentiated again consists of torch operations.
        grads = differentiate(lambda *x: _operations(*x, *others), tensors, (g, g_lse))
    else:
        g = torch.zeros_like(out) if g is None else g
        grads = terms_backward_op(g, g_lse, out, lse, *tensors, *others)
    pairs = zip(grads, tensors, strict=True)
    return *[None if x is None else grad for grad, x in pairs], *[None] * 9


def _rehearse(*arguments: Any) -> None:
    """Launch what the gradient of a call launches."""
    out, lse = _fake(*arguments)
    _backward(torch.empty_like(out), None, out, lse, *arguments)


_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? p, Tensor? m, Tensor? for_queries, Tensor? for_keys, "
    "Tensor? network, Tensor? levels, Tensor? starts, Tensor? first, Tensor? last, int how, "
    "SymInt zero, SymInt start, float scale, SymInt left, SymInt right"
)
terms_op = Op(
    "attend_terms",
    f"({_CALL}) -> (Tensor, Tensor)",
    _forward,
    _operations,
    _fake,
    save=_save,
    backward=_gradients,
    native=("cuda",),
    repeats=True,
    rehearse=_rehearse,
)
terms_backward_op = Op(
    "attend_terms_backward",
    f"(Tensor g, Tensor? g_lse, Tensor out, Tensor lse, {_CALL}) -> ({', '.join(['Tensor'] * 9)})",
    _backward,
    _backward,
    _fake_backward,
    native=("cuda",),
    repeats=True,
)
