"""Attention as an op: its kernels, its gradients, and what a compiler needs to know of it.

A kernel is a module with

``forward(q, k, v, call)``, which returns the output, the log-sum-exp, and what its backward pass
needs to know of the pruned keys, an int32 tensor or None; ``ranges_like(q, k, v, call)``, an empty
tensor of that kind; and ``backward(g, g_lse, saved, call, to_values)``, with the inputs and results
of ``forward`` as ``saved``, which returns the gradients of q, k, v and, if ``to_values``, of the
bias's numbers. ``g_lse`` is None where nobody used the log-sum-exp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.qk_checks import UNBOUNDED
from posenc._contract.tracing import in_forward_mode, is_plain, is_readable
from posenc.attention import chunked, dense
from posenc.attention.biases import Call
from posenc.kernels import triton
from posenc.kernels.op import Op
from posenc.kernels.rotation import check_devices, refuse

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
    out, lse, _ = attend_op.overload(q, k, v, *call)
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
            return None, *_recorded_gradients(needs, g, g_lse, saved, call), *[None] * 10
        *found, to = ctx.kernel.backward(g, g_lse, saved, call, needs[3])
        return None, *found, to if needs[3] else None, *[None] * 10


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


def check_call(who: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Call:
    """The call as the kernels read it; refuse what would lead them out of a tensor's memory."""
    check_devices(who, q, k, v, *call[:4])
    if (
        not q.dim() == k.dim() == v.dim() == 4
        or not q.dtype == k.dtype == v.dtype
        or q.dtype not in checks.FLOAT_DTYPES
        or (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3])
        or k.shape[:3] != v.shape[:3]
        or min(k.shape[1], k.shape[3], v.shape[3]) < 1
        or q.shape[1] % k.shape[1]
        or (q.shape[2] and not k.shape[2])
    ):
        rule = "q (B, H, Q, D), k (B, Hk, K, D) and v (B, Hk, K, Dv) must be floating, of one dtype"
        refuse(who, rule, q, k, v)
    values, starts, first, last = call[:4]
    (batch, heads), keys = q.shape[:2], k.shape[2]
    if not _is_bias(call, batch, heads, keys):
        rule = f"values must be floating, for {heads} heads, and of their kind, {call.kind!r}"
        refuse(who, rule, values, q, k)
    if not _are_integers(starts, batch):
        refuse(who, f"starts must be int64, (1 or {batch},)", starts)
    both = (first is None) == (last is None)
    if not (both and _are_integers(first, batch, keys) and _are_integers(last, batch, keys)):
        refuse(who, f"first and last must be int64, (1 or {batch}, {keys})", first, last)
    begins = [call.start] if starts is None or not is_readable(starts) else starts.tolist()
    least = 0 if call.causal else -UNBOUNDED
    if not all(least <= n <= UNBOUNDED for n in begins):
        refuse(who, "the first query must be at a key from 0 on, or anywhere if not causal", q, k)
    # The dispatcher makes a list of it.
    window: Any = call.window if call.window is None else tuple(call.window)
    if not math.isfinite(call.scale) or (window is not None and not _is_window(window)):
        refuse(who, "scale must be finite, and window a pair of lengths", q, k)
    starts, first, last = (x if x is None else x.contiguous() for x in (starts, first, last))
    return call._replace(starts=starts, first=first, last=last, window=window)


def _is_bias(call: Call, batch: int, heads: int, keys: int) -> bool:
    kind, values, zero = call.kind, call.values, call.zero
    if kind == "none" or values is None:
        return kind == "none" and values is None
    if values.dtype not in checks.FLOAT_DTYPES or values.dim() != (3 if kind == "sums" else 2):
        return False
    if kind == "table":
        return values.shape[0] == heads and 0 <= zero < values.shape[1]
    if kind not in ("slopes", "sums") or values.shape[0] not in (1, batch):
        return False
    return values.shape[1] == heads and (kind == "slopes" or values.shape[2] >= keys)


def _are_integers(x: Tensor | None, batch: int, *sizes: int) -> bool:
    if x is None:
        return True
    return (
        x.dtype == torch.int64 and x.dim() > 0 and x.shape[0] in (1, batch) and x.shape[1:] == sizes
    )


def _is_window(window: tuple[int, ...]) -> bool:
    return len(window) == 2 and all(0 <= n <= UNBOUNDED for n in window)


def _forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = check_call("posenc::attend", q, k, v, Call(*call))
    kernel = kernel_for(q, v)
    out, lse, ranges = kernel.forward(q, k, v, given)
    return out, lse, kernel.ranges_like(q, k, v, given) if ranges is None else ranges


def _fake(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    check_devices("posenc::attend", q, k, v, *call[:4])
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    ranges = kernel_for(q, v).ranges_like(q, k, v, Call(*call))
    return out, q.new_empty(q.shape[:3], dtype=wide), ranges


def _backward(g: Tensor, g_lse: Tensor | None, *others: Any) -> Gradients:
    who, (q, k, v, out, lse, ranges), to_values = "posenc::attend_backward", others[:6], others[6]
    call = check_call(who, q, k, v, Call(*others[7:]))
    check_devices(who, q, g, g_lse, out, lse, ranges)
    wide = torch.promote_types(q.dtype, torch.float32)
    made = (*q.shape[:3], v.shape[3])
    if not (g.shape == out.shape == made and g.dtype == out.dtype == q.dtype):
        refuse(who, f"g and out must be {q.dtype}, {tuple(made)}", g, out)
    for x in (lse, lse if g_lse is None else g_lse):
        if x.shape != made[:3] or x.dtype != wide:
            refuse(who, f"lse and g_lse must be {wide}, {tuple(made[:3])}", lse, g_lse)
    kernel = kernel_for(q, v)
    wanted = kernel.ranges_like(q, k, v, call)
    if ranges.shape != wanted.shape or ranges.dtype != wanted.dtype:
        refuse(who, f"ranges must be those of posenc::attend, {tuple(wanted.shape)}", ranges)
    saved = q, k, v, out.contiguous(), lse.contiguous(), ranges.contiguous()
    *found, to = kernel.backward(g, g_lse, saved, call, to_values and call.values is not None)
    return *found, g.new_empty(0) if to is None else to


def _fake_backward(
    g: Tensor, g_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> Gradients:
    to_values, call = others[3], Call(*others[4:])
    check_devices("posenc::attend_backward", g, g_lse, q, k, v, *others[:3], *call[:4])
    values = call.values
    to = q.new_empty(0) if values is None or not to_values else values.new_empty(values.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), to


def _operations(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = dense.attend(q, k, v, Call(*call))
    return out, lse, q.new_empty(0, dtype=torch.int32)


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
        return *_recorded_gradients(needs, g, g_lse, saved, call), *[None] * 10
    *found, to = attend_backward_op.overload(g, g_lse, *saved, needs[3], *call)
    return *found, to if needs[3] else None, *[None] * 10


_CALL = (
    "Tensor? values, Tensor? starts, Tensor? first, Tensor? last, str kind, SymInt zero, "
    "SymInt start, float scale, bool causal, bool prune, SymInt[]? window=None"
)
attend_op = Op(
    "attend",
    f"(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor, Tensor, Tensor)",
    _forward,
    _operations,
    _fake,
    save=_save,
    backward=_gradients,
    native=(),
)
attend_backward_op = Op(
    "attend_backward",
    "(Tensor g, Tensor? g_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor ranges, bool to_values, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward,
    _fake_backward,
    native=(),
)
