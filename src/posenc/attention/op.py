"""Attention as an op: its kernels, its gradients, and what a compiler needs to know of it.

A kernel is a module with

``forward(q, k, v, call)``, which returns the output, the log-sum-exp, and what its backward pass
needs to know of the pruned keys, an int32 tensor or None; ``ranges_like(q, k, v, call)``, an empty
tensor of that kind; and ``backward(g, g_lse, saved, call, to_values)``, with the inputs and results
of ``forward`` as ``saved``, which returns the gradients of q, k, v and, if ``to_values``, of the
bias's numbers. ``g_lse`` is None where nobody used the log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.tracing import in_forward_mode, is_plain
from posenc.attention import chunked, dense
from posenc.attention.biases import Call
from posenc.kernels import triton
from posenc.kernels.ops import define_op

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def attend(
    who: str, q: Tensor, k: Tensor, v: Tensor, call: Call, backend: str | None
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp by the kernel named ``backend``, or by one for the device."""
    check_backend(who, backend)
    if backend == "triton" and kernel_for(q, v) is chunked:
        rule = "backend='triton' needs CUDA, Triton, at most float32 and heads of at most 256"
        got = f"{q.dtype} on {q.device}, {q.shape[-1]} wide"
        checks.fail(who, rule, got, "Leave backend out to have one chosen.")
    if backend == "dense":
        return dense.attend(q, k, v, call)
    if is_plain(q, k, v) and not in_forward_mode() and not q.is_meta:
        kernel = chunked if backend == "chunked" else kernel_for(q, v)
        if torch.is_grad_enabled() and _requires_grad(q, k, v, call.values):
            return _Attend.apply(kernel, q, k, v, *call)  # type: ignore[no-any-return]
        out, lse, _ = kernel.forward(q, k, v, call)
        return out, lse
    if dense.is_needed(q, k, v, call.values):
        return dense.attend(q, k, v, call)
    out, lse, _ = attend_op(q, k, v, *call)
    return out, lse


def check_backend(who: str, backend: Any) -> None:
    """Refuse a name that no kernel has."""
    if backend not in (None, "triton", "chunked", "dense"):
        rule = "backend must be 'triton', 'chunked', 'dense' or None"
        checks.fail(who, rule, checks.describe(backend), "Leave backend out to have one chosen.")


def _requires_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def kernel_for(q: Tensor, v: Tensor) -> Any:
    """The module that implements attention for these tensors."""
    if q.is_cuda and triton.installed:
        from posenc.kernels.triton import attend

        if attend.can_run(q, v):
            return attend
    return chunked


class _Attend(torch.autograd.Function):
    """Attention in plain eager calls, without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, kernel: Any, q: Tensor, k: Tensor, v: Tensor, *call: Any) -> Any:
        out, lse, ranges = kernel.forward(q, k, v, Call(*call))
        ctx.save_for_backward(q, k, v, out, lse, ranges, *call[:4])
        ctx.kernel, ctx.others = kernel, call[4:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_lse: Tensor | None) -> Any:
        held = ctx.saved_tensors
        saved, call = held[:6], Call(*held[6:], *ctx.others)
        needs = ctx.needs_input_grad[1:5]
        g = torch.zeros_like(saved[3]) if g is None else g
        if torch.is_grad_enabled() or not is_plain(g):
            return None, *_recorded_gradients(needs, g, g_lse, saved, call), *[None] * 9
        *found, to = ctx.kernel.backward(g, g_lse, saved, call, needs[3])
        return None, *found, to if needs[3] else None, *[None] * 9


def _recorded_gradients(
    needs: Any, g: Tensor, g_lse: Tensor | None, saved: Any, call: Call
) -> list[Tensor | None]:
    """The gradients as operations of torch, for a second derivative, or a batch of gradients."""
    q, k, v, *_ = saved
    given: Any = (q, k, v, call.values)
    wanted = [x for x, need in zip(given, needs, strict=True) if need]
    with torch.enable_grad():
        made = dense.attend(q, k, v, call)
        count = 1 if g_lse is None else 2
        grads: Any = (g, g_lse)[:count]
        found = iter(torch.autograd.grad(made[:count], wanted, grads, create_graph=True))
    return [next(found) if need else None for need in needs]


def _forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    kernel, given = kernel_for(q, v), Call(*call)
    out, lse, ranges = kernel.forward(q, k, v, given)
    return out, lse, kernel.ranges_like(q, k, v, given) if ranges is None else ranges


def _fake(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    ranges = kernel_for(q, v).ranges_like(q, k, v, Call(*call))
    return out, q.new_empty(q.shape[:3], dtype=wide), ranges


def _backward(g: Tensor, g_lse: Tensor | None, *others: Any) -> Gradients:
    saved, to_values, call = others[:6], others[6], Call(*others[7:])
    *found, to = kernel_for(saved[0], saved[2]).backward(g, g_lse, saved, call, to_values)
    return *found, g.new_empty(0) if to is None else to


def _fake_backward(
    g: Tensor, g_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> Gradients:
    to_values, call = others[3], Call(*others[4:])
    values = call.values
    to = q.new_empty(0) if values is None or not to_values else values.new_empty(values.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), to


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, *call = inputs
    ctx.save_for_backward(q, k, v, *output, *call[:4])
    ctx.others = call[4:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, g_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
    held = ctx.saved_tensors
    saved, call = held[:6], Call(*held[6:], *ctx.others)
    needs = ctx.needs_input_grad[:4]
    g = torch.zeros_like(saved[3]) if g is None else g
    if torch.is_grad_enabled():
        return *_recorded_gradients(needs, g, g_lse, saved, call), *[None] * 9
    *found, to = attend_backward_op(g, g_lse, *saved, needs[3], *call)
    return *found, to if needs[3] else None, *[None] * 9


_CALL = (
    "Tensor? values, Tensor? starts, Tensor? first, Tensor? last, str kind, SymInt zero, "
    "SymInt start, float scale, bool causal, bool prune"
)
attend_op = define_op(
    "attend",
    f"(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    _save,
    _gradients,
)
attend_backward_op = define_op(
    "attend_backward",
    "(Tensor g, Tensor? g_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor ranges, bool to_values, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
