"""Attention as an op: its kernels, its gradients, and what a compiler needs to know of it.

On a GPU a call is a plan of `posenc.ops.attention.triton.attention`; elsewhere `chunked` serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.ops import execute
from posenc.ops.attention import chunked
from posenc.ops.attention.biases import Call
from posenc.ops.attention.rows import attend_dense
from posenc.ops.op import Op, Size, Start, replaced
from posenc.ops.plan import Plan, Target
from posenc.ops.rotation.rotation import check_devices, refuse

# Queries that share a pruned range of keys: the shape of what the backward pass needs of them.
RANGE = 64


def has_kernel(q: Tensor, v: Tensor) -> bool:
    """Whether kernels serve these."""
    return q.is_cuda and execute.installed and fits_kernels(q, v)


def fits_kernels(q: Tensor, v: Tensor) -> bool:
    """Whether kernels take these: no float64, heads of at most 256 channels."""
    narrow = 0 < q.shape[3] <= 256 and 0 < v.shape[3] <= 256
    return narrow and q.dtype != torch.float64 and min(q.shape[:3]) > 0


class AttendCall(NamedTuple):
    """Attention with a number for each distance; the fields are those of a `Call`."""

    q: Tensor
    k: Tensor
    v: Tensor
    values: Tensor | None
    starts: Tensor | None
    first: Tensor | None
    last: Tensor | None
    how: int
    zero: Size
    start: Start
    scale: float
    left: Size
    right: Size


class AttendBackwardCall(NamedTuple):
    """The gradients of :class:`AttendCall`."""

    g: Tensor
    g_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    ranges: Tensor
    values: Tensor | None
    starts: Tensor | None
    first: Tensor | None
    last: Tensor | None
    how: int
    zero: Size
    start: Size
    scale: float
    left: Size
    right: Size


def call_of(given: Any, values: Tensor | None) -> Call:
    """The `Call` whose fields these are, unchecked."""
    places = given.starts, given.first, given.last
    numbers = given.how, given.zero, given.start, given.scale, given.left, given.right
    return Call.from_arguments(values, *places, *numbers)


def check_call(who: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
    """Refuse a call that would lead kernels out of a tensor's memory.

    The functions that users call say in full what is wrong.
    """
    places = call.starts, call.first, call.last
    check_devices(who, q, k, v, call.values, *places)
    if not (q.dim() == k.dim() == v.dim() == 4 and _fit(q, k, v, call)):
        rule = "q (B, H, Q, D), k (B, Hk, K, D), v (B, Hk, K, Dv) and the others must fit together"
        refuse(who, rule, q, k, v, call.values, *places)


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


def with_whole_places(call: Call) -> Call:
    """The call, whose starts and ends of documents have no gaps."""
    places = call.starts, call.first, call.last
    starts, first, last = (x if x is None else x.contiguous() for x in places)
    return call._replace(starts=starts, first=first, last=last)


def _run(given: AttendCall) -> tuple[Tensor, ...]:
    q, k, v, call = given.q, given.k, given.v, call_of(given, given.values)
    check_call("posenc::attend_by_distance", q, k, v, call)
    out, lse = chunked.forward(q, k, v, with_whole_places(call))
    return out, lse, q.new_zeros(_ranges_shape(q, call), dtype=torch.int32)


def _plan(given: AttendCall, plan: Plan, target: Target) -> None:
    from posenc.ops.attention.triton import attention

    call = call_of(given, given.values)
    check_call("posenc::attend_by_distance", given.q, given.k, given.v, call)
    attention.plan_forward(given, call, plan, target)


def _ranges_shape(q: Tensor, call: Call) -> tuple[int, ...]:
    """Of the first and last key of each block of queries, if far keys are left out."""
    batch, heads, queries, _ = q.shape
    # A few queries are not pruned either; a compiler's graph serves all lengths.
    blocks = (queries + RANGE - 1) // RANGE if call.prune and call.kind in ("slopes", "sums") else 0
    # One axis for blocks and both ends: a compiler would make a graph for one block alone.
    return batch, heads, 2 * blocks


def _results(given: AttendCall) -> tuple[Tensor, ...]:
    check_devices("posenc::attend_by_distance", *given)
    q, v = given.q, given.v
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    ranges = _ranges_shape(q, call_of(given, given.values))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse, q.new_empty(ranges, dtype=torch.int32)


def _check_backward(given: AttendBackwardCall) -> Call:
    who = "posenc::attend_by_distance_backward"
    q, k, v, ranges, call = given.q, given.k, given.v, given.ranges, call_of(given, given.values)
    check_call(who, q, k, v, call)
    check_results(who, q, v, given.g, given.g_lse, given.out, given.lse)
    shape = _ranges_shape(q, call)
    if ranges.shape != shape or ranges.dtype != torch.int32:
        refuse(who, f"ranges must be those of posenc::attend_by_distance, {shape}", ranges)
    check_devices(who, q, ranges)
    return call


def _run_backward(given: AttendBackwardCall) -> tuple[Tensor, ...]:
    call = with_whole_places(_check_backward(given))
    saved = given.q, given.k, given.v, given.out.contiguous(), given.lse.contiguous()
    to_values = call.to_values and call.values is not None
    dq, dk, dv, to = chunked.backward(given.g, given.g_lse, saved, call, to_values)
    return dq, dk, dv, to


def _plan_backward(given: AttendBackwardCall, plan: Plan, target: Target) -> None:
    from posenc.ops.attention.triton import attention

    attention.plan_backward(given, _check_backward(given), plan, target)


def _results_backward(given: AttendBackwardCall) -> tuple[Tensor, ...]:
    check_devices("posenc::attend_by_distance_backward", *given)
    q, k, v, values = given.q, given.k, given.v, given.values
    to = q.new_empty(0)
    if call_of(given, values).to_values and values is not None:
        to = values.new_empty(values.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), to


def _operations(given: AttendCall) -> tuple[Tensor, ...]:
    q, k, v, call = given.q, given.k, given.v, call_of(given, given.values)
    out, lse = attend_dense(q, k, v, call)
    return out, lse, q.new_empty(_ranges_shape(q, call), dtype=torch.int32)


def _save(ctx: Any, given: AttendCall, results: tuple[Tensor, ...]) -> None:
    tensors = "q", "k", "v", "values", "starts", "first", "last"
    ctx.call = replaced(given, dict.fromkeys(tensors))
    places = given.starts, given.first, given.last
    ctx.save_for_backward(given.q, given.k, given.v, given.values, *places, *results)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, g: Tensor | None, g_lse: Tensor | None, _: Any
) -> dict[str, Tensor | None]:
    q, k, v, values, starts, first, last, out, lse, ranges = ctx.saved_tensors
    call = call_of(ctx.call._replace(starts=starts, first=first, last=last), values)
    if torch.is_grad_enabled():
        # A gradient that is differentiated again consists of torch operations.
        def run(q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return attend_dense(q, k, v, call._replace(values=values))

        both = differentiate(run, (q, k, v, values), (g, g_lse))
        return dict(zip(("q", "k", "v", "values"), both, strict=True))
    g = torch.zeros_like(out) if g is None else g
    to_values = ctx.needs_input_grad[AttendCall._fields.index("values")]
    call = call._replace(to_values=to_values)
    dq, dk, dv, to = attend_backward_op(g, g_lse, q, k, v, out, lse, ranges, *call.arguments())
    return {"q": dq, "k": dk, "v": dv, "values": to if to_values else None}


def _backward_call(given: AttendCall, results: tuple[Tensor, ...]) -> tuple[Op, tuple[Any, ...]]:
    """The call of the gradients, if the output alone has one."""
    call = call_of(given, given.values)
    call = call._replace(to_values=given.values is not None and given.values.requires_grad)
    given_too = given.q, given.k, given.v, *results
    return attend_backward_op, (torch.empty_like(results[0]), None, *given_too, *call.arguments())


def _has_plan(given: AttendCall | AttendBackwardCall) -> bool:
    return has_kernel(given.q, given.v) and not call_of(given, given.values).chunked


attend_op = Op(
    "attend_by_distance",
    AttendCall,
    _results,
    3,
    _run,
    _operations,
    plan=_plan,
    has_plan=_has_plan,
    save=_save,
    backward=_gradients,
    backward_call=_backward_call,
    has_cpu=False,
)
attend_backward_op = Op(
    "attend_by_distance_backward",
    AttendBackwardCall,
    _results_backward,
    4,
    _run_backward,
    _run_backward,
    plan=_plan_backward,
    has_plan=_has_plan,
    has_cpu=False,
)
