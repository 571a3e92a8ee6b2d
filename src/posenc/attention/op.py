"""Attention as an op: its kernels, its gradients, and what a compiler needs to know of it.

A kernel is a module with

``forward(q, k, v, call)``, which returns the output, the log-sum-exp, and what its backward pass
needs to know of the pruned keys, an int32 tensor or None; ``ranges_like(q, k, v, call)``, an empty
tensor of that kind; and ``backward(g, g_lse, saved, call, to_values)``, with the inputs and results
of ``forward`` as ``saved``, which returns the gradients of q, k, v and, if ``to_values``, of the
bias's numbers. ``g_lse`` is None where nobody used the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.attention import chunked
from posenc.attention.biases import Call
from posenc.attention.rows import attend_dense
from posenc.kernels import triton
from posenc.kernels.op import Op
from posenc.kernels.rotation import check_devices, refuse

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def kernel_for(q: Tensor, v: Tensor) -> Any:
    """The module that implements attention for these tensors, if none is named."""
    if q.is_cuda and triton.installed:
        from posenc.kernels.triton import attention

        if attention.can_run(q, v):
            return attention
    return chunked


def check_call(who: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Call:
    """The call as the kernels read it; refuse what would lead them out of a tensor's memory.

    The functions that users call say in full what is wrong.
    """
    places = call.starts, call.first, call.last
    check_devices(who, q, k, v, call.values, *places)
    if not (q.dim() == k.dim() == v.dim() == 4 and _fit(q, k, v, call)):
        rule = "q (B, H, Q, D), k (B, Hk, K, D), v (B, Hk, K, Dv) and the others must fit together"
        refuse(who, rule, q, k, v, call.values, *places)
    starts, first, last = (x if x is None else x.contiguous() for x in places)
    return call._replace(starts=starts, first=first, last=last)


def _fit(q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
    (batch, heads, queries, width), (kv_heads, keys) = q.shape, k.shape[1:3]
    values, each_head = call.values, ((1, heads), (batch, heads))
    if call.kind == "none" or values is None:
        is_bias = call.kind == "none" and values is None
    elif call.kind == "slopes":
        is_bias = values.shape in each_head
    elif call.kind == "table":
        is_bias = values.dim() == 2 and len(values) == heads and 0 <= call.zero < values.shape[1]
    else:
        is_bias = values.dim() == 3 and values.shape[:2] in each_head and values.shape[2] >= keys

    def are_integers(x: Tensor | None, *sizes: int) -> bool:
        if x is None:
            return True
        return x.dtype == torch.int64 and x.shape in ((1, *sizes), (batch, *sizes))

    return (
        (k.shape[0], k.shape[3]) == (batch, width)
        and k.shape[:3] == v.shape[:3]
        and kv_heads > 0
        and heads % kv_heads == 0
        and (keys > 0 or queries == 0)
        and q.dtype == k.dtype == v.dtype
        and all(x is None or x.dtype in checks.FLOAT_DTYPES for x in (q, values))
        and is_bias
        and are_integers(call.starts)
        and (call.first is None) == (call.last is None)
        and are_integers(call.first, keys)
        and are_integers(call.last, keys)
    )


def check_results(
    who: str, q: Tensor, v: Tensor, g: Tensor, g_lse: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """Refuse results of a forward pass, and their gradients, that are not of these inputs."""
    check_devices(who, q, g, g_lse, out, lse)
    shape, wide = (*q.shape[:3], v.shape[3]), torch.promote_types(q.dtype, torch.float32)
    sums = lse if g_lse is None else g_lse
    if not (
        g.shape == out.shape == shape
        and lse.shape == sums.shape == shape[:3]
        and g.dtype == out.dtype == q.dtype
        and lse.dtype == sums.dtype == wide
    ):
        rule = f"g and out must be {q.dtype}, {shape}, lse and g_lse {wide}, {shape[:3]}"
        refuse(who, rule, g, out, lse, g_lse)


def differentiate(
    run: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of ``run``, by torch operations; differentiable if autograd records."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [x if x is None or again else x.detach().requires_grad_() for x in inputs]
        pairs = zip(run(*inputs), gradients, strict=True)
        results, above = zip(*[pair for pair in pairs if pair[1] is not None], strict=True)
        wanted = [x is not None and x.requires_grad for x in inputs]
        leaves: Any = [x for x, need in zip(inputs, wanted, strict=True) if need]
        how: Any = {"create_graph": again, "allow_unused": True, "materialize_grads": True}
        grads = iter(torch.autograd.grad(results, leaves, above, **how))
    return [next(grads) if need else None for need in wanted]


def _kernel_of(q: Tensor, v: Tensor, call: Call) -> Any:
    return chunked if call.chunked else kernel_for(q, v)


def _forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = check_call("posenc::attend", q, k, v, Call.from_arguments(*arguments))
    kernel = _kernel_of(q, v, call)
    out, lse, ranges = kernel.forward(q, k, v, call)
    return out, lse, kernel.ranges_like(q, k, v, call) if ranges is None else ranges


def _fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    check_devices("posenc::attend", q, k, v, *arguments)
    call = Call.from_arguments(*arguments)
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    ranges = _kernel_of(q, v, call).ranges_like(q, k, v, call)
    return q.new_empty((*q.shape[:3], v.shape[3])), lse, ranges


def _backward(
    g: Tensor,
    g_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ranges: Tensor,
    *arguments: Any,
) -> Gradients:
    who = "posenc::attend_backward"
    call = check_call(who, q, k, v, Call.from_arguments(*arguments))
    check_results(who, q, v, g, g_lse, out, lse)
    kernel = _kernel_of(q, v, call)
    like = kernel.ranges_like(q, k, v, call)
    if (ranges.shape, ranges.dtype, ranges.device) != (like.shape, like.dtype, like.device):
        refuse(who, f"ranges must be those of posenc::attend, {tuple(like.shape)}", ranges)
    saved = q, k, v, out.contiguous(), lse.contiguous(), ranges.contiguous()
    to_values = call.to_values and call.values is not None
    dq, dk, dv, to = kernel.backward(g, g_lse, saved, call, to_values)
    return dq, dk, dv, g.new_empty(0) if to is None else to


def _fake_backward(
    g: Tensor, g_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> Gradients:
    check_devices("posenc::attend_backward", g, g_lse, q, k, v, *others)
    call = Call.from_arguments(*others[3:])
    to = q.new_empty(0)
    if call.to_values and call.values is not None:
        to = call.values.new_empty(call.values.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), to


def _operations(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = attend_dense(q, k, v, Call.from_arguments(*arguments))
    return out, lse, q.new_empty(0, dtype=torch.int32)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, values, starts, first, last, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, values, starts, first, last)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, g_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, ranges, values, *places = ctx.saved_tensors
    no_others = [None] * 9
    if torch.is_grad_enabled():
        # A gradient that is differentiated again consists of torch operations.
        def run(q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return attend_dense(q, k, v, Call.from_arguments(values, *places, *ctx.numbers))

        return *differentiate(run, (q, k, v, values), (g, g_lse)), *no_others
    g = torch.zeros_like(out) if g is None else g
    to_values = ctx.needs_input_grad[3]
    call = Call.from_arguments(values, *places, *ctx.numbers)._replace(to_values=to_values)
    saved = q, k, v, out, lse, ranges
    dq, dk, dv, to = attend_backward_op(g, g_lse, *saved, *call.arguments())
    return dq, dk, dv, to if to_values else None, *no_others


def _rehearse(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> None:
    """Launch what the gradient of a call launches."""
    call = Call.from_arguments(*arguments)
    to_values = call.values is not None and call.values.requires_grad
    results = _fake(q, k, v, *arguments)
    others = call._replace(to_values=to_values).arguments()
    _backward(torch.empty_like(results[0]), None, q, k, v, *results, *others)


_CALL = (
    "Tensor? values, Tensor? starts, Tensor? first, Tensor? last, int how, SymInt zero, "
    "SymInt start, float scale, SymInt left, SymInt right"
)
attend_op = Op(
    "attend",
    f"(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor, Tensor, Tensor)",
    _forward,
    _operations,
    _fake,
    save=_save,
    backward=_gradients,
    native=("cuda",),
    repeats=True,
    rehearse=_rehearse,
)
attend_backward_op = Op(
    "attend_backward",
    "(Tensor g, Tensor? g_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor ranges, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward,
    _fake_backward,
    native=("cuda",),
    repeats=True,
)
