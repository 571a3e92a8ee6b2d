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
from posenc._contract.tracing import is_readable
from posenc.attention import chunked, dense
from posenc.attention.biases import Call
from posenc.kernels import triton
from posenc.kernels.op import Op
from posenc.kernels.rotation import check_devices, refuse

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


# Bits of the op's argument `how`, after the index of the bias's kind.
KINDS = ("none", "slopes", "table", "sums")
CAUSAL, PRUNE, CHUNKED, TO_VALUES = 4, 8, 16, 32


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
    out, lse, _ = attend_op(q, k, v, *flatten(call, CHUNKED if backend == "chunked" else 0))
    return out, lse


def attend_at_once(
    q: Tensor, k: Tensor, v: Tensor, kind: str, values: Tensor | None, zero: int, *, causal: bool
) -> tuple[Tensor, Tensor] | None:
    """Attention of queries at the last keys, with no options, if native code has done it before.

    None otherwise: nothing has happened then, and nothing has been checked.
    """
    start = k.shape[-2] - q.shape[-2]
    if start < 0:
        return None
    how = KINDS.index(kind) | PRUNE | (CAUSAL if causal else 0)
    scale = q.shape[-1] ** -0.5
    made = attend_op.at_once(q, k, v, values, None, None, None, how, zero, start, scale, -1, -1)
    return None if made is None else made[:2]


def flatten(call: Call, more: int = 0) -> tuple[Any, ...]:
    """The arguments of the ops for a call; ``more`` are further bits of ``how``."""
    how = KINDS.index(call.kind) | (CAUSAL if call.causal else 0) | (PRUNE if call.prune else 0)
    return *call[:4], how | more, *call[5:8], *(call.window or (-1, -1))


def unflatten(*given: Any) -> Call:
    """The call of the arguments of an op, unchecked."""
    values, starts, first, last, how, *numbers, left, right = given
    zero, start, scale = numbers
    kind, causal, prune = KINDS[how & 3], bool(how & CAUSAL), bool(how & PRUNE)
    window = None if left == right == -1 else (left, right)
    return Call(values, starts, first, last, kind, zero, start, scale, causal, prune, window)


def check_backend(who: str, backend: Any) -> None:
    """Refuse a name that no kernel has."""
    if backend not in (None, "triton", "chunked", "dense"):
        rule = "backend must be 'triton', 'chunked', 'dense' or None"
        checks.fail(who, rule, checks.describe(backend), "Leave backend out to have one chosen.")


def kernel_for(q: Tensor, v: Tensor, how: int = 0) -> Any:
    """The module that implements attention for these tensors."""
    if q.is_cuda and triton.installed and not how & CHUNKED:
        from posenc.kernels.triton import attention

        if attention.can_run(q, v):
            return attention
    return chunked


def check_call(who: str, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Call:
    """The call as the kernels read it; refuse what would lead them out of a tensor's memory."""
    how, call = arguments[4], unflatten(*arguments)
    check_devices(who, q, k, v, *call[:4])
    if (
        not q.dim() == k.dim() == v.dim() == 4
        or not q.dtype == k.dtype == v.dtype
        or q.dtype not in checks.FLOAT_DTYPES
        or (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3])
        or k.shape[:3] != v.shape[:3]
        or k.shape[1] < 1
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
    if not math.isfinite(call.scale) or not all(0 <= n <= UNBOUNDED for n in call.window or ()):
        refuse(who, "scale must be finite, and window a pair of lengths", q, k)
    if not 0 <= how < 2 * TO_VALUES:
        refuse(who, "how must have no unknown bits", q, k)
    starts, first, last = (x if x is None else x.contiguous() for x in (starts, first, last))
    return call._replace(starts=starts, first=first, last=last)


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


def _forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = check_call("posenc::attend", q, k, v, *arguments)
    kernel = kernel_for(q, v, arguments[4])
    out, lse, ranges = kernel.forward(q, k, v, call)
    return out, lse, kernel.ranges_like(q, k, v, call) if ranges is None else ranges


def _fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    check_devices("posenc::attend", q, k, v, *arguments[:4])
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    ranges = kernel_for(q, v, arguments[4]).ranges_like(q, k, v, unflatten(*arguments))
    return out, q.new_empty(q.shape[:3], dtype=wide), ranges


def _backward(g: Tensor, g_lse: Tensor | None, *others: Any) -> Gradients:
    who, (q, k, v, out, lse, ranges) = "posenc::attend_backward", others[:6]
    call, how = check_call(who, q, k, v, *others[6:]), others[10]
    check_devices(who, q, g, g_lse, out, lse, ranges)
    wide = torch.promote_types(q.dtype, torch.float32)
    made = (*q.shape[:3], v.shape[3])
    if not (g.shape == out.shape == made and g.dtype == out.dtype == q.dtype):
        refuse(who, f"g and out must be {q.dtype}, {tuple(made)}", g, out)
    for x in (lse, lse if g_lse is None else g_lse):
        if x.shape != made[:3] or x.dtype != wide:
            refuse(who, f"lse and g_lse must be {wide}, {tuple(made[:3])}", lse, g_lse)
    kernel = kernel_for(q, v, how)
    wanted = kernel.ranges_like(q, k, v, call)
    if ranges.shape != wanted.shape or ranges.dtype != wanted.dtype:
        refuse(who, f"ranges must be those of posenc::attend, {tuple(wanted.shape)}", ranges)
    saved = q, k, v, out.contiguous(), lse.contiguous(), ranges.contiguous()
    to_values = bool(how & TO_VALUES) and call.values is not None
    *found, to = kernel.backward(g, g_lse, saved, call, to_values)
    return *found, g.new_empty(0) if to is None else to


def _fake_backward(
    g: Tensor, g_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> Gradients:
    check_devices("posenc::attend_backward", g, g_lse, q, k, v, *others[:7])
    values, how = others[3], others[7]
    to = q.new_empty(0) if values is None or not how & TO_VALUES else values.new_empty(values.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), to


def _operations(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = dense.attend(q, k, v, unflatten(*arguments))
    return out, lse, q.new_empty(0, dtype=torch.int32)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:7])
    ctx.others = inputs[7:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, g_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
    saved, (how, *numbers) = ctx.saved_tensors, ctx.others
    needs = ctx.needs_input_grad[:4]
    g = torch.zeros_like(saved[3]) if g is None else g
    if torch.is_grad_enabled():
        call = unflatten(*saved[6:], how, *numbers)
        return *_recorded_gradients(needs, g, g_lse, saved, call), *[None] * 9
    how |= TO_VALUES if needs[3] else 0
    *found, to = attend_backward_op(g, g_lse, *saved, how, *numbers)
    return *found, to if needs[3] else None, *[None] * 9


def _rehearse(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> None:
    """Launch what the gradient of a call launches."""
    values, how = arguments[0], arguments[4]
    if values is not None and values.requires_grad:
        how |= TO_VALUES
    made = _fake(q, k, v, *arguments)
    _backward(torch.empty_like(made[0]), None, q, k, v, *made, *arguments[:4], how, *arguments[5:])


def _recorded_gradients(
    needs: Any, g: Tensor, g_lse: Tensor | None, saved: Any, call: Call
) -> list[Tensor | None]:
    """The gradients as operations of torch, for a second derivative."""
    q, k, v, *_ = saved
    given: Any = (q, k, v, call.values)
    wanted = [x for x, need in zip(given, needs, strict=True) if need]
    with torch.enable_grad():
        made = dense.attend(q, k, v, call)
        count = 1 if g_lse is None else 2
        grads: Any = (g, g_lse)[:count]
        found = iter(torch.autograd.grad(made[:count], wanted, grads, create_graph=True))
    return [next(found) if need else None for need in needs]


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
