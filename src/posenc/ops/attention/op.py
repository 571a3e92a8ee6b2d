"""Attention as ops, a pair for each kind of bias: its kernels, its gradients, and its checks.

The fields of a kind are arguments of its ops, between q, k, v and what says which keys a query
sees. On a GPU a call is a plan of `posenc.ops.attention.triton.plans`; elsewhere `chunked` serves
biases of a few numbers, and the formula, with all scores at once, the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.ops import execute
from posenc.ops.attention import chunked
from posenc.ops.attention.biases import KINDS, NUMBERS, PRUNED, Fields, NoBias, bias_of
from posenc.ops.attention.biases.kind import fits
from posenc.ops.attention.call import CAUSAL, CHUNKED, PRUNE, TO_BIAS, Call
from posenc.ops.attention.rows import attend_dense
from posenc.ops.op import Op, Size, Start, fields_of, replaced
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


class Inputs(NamedTuple):
    """What a call begins with."""

    q: Tensor
    k: Tensor
    v: Tensor


class Results(NamedTuple):
    """What a backward call begins with: the gradients, and the results of the forward pass."""

    g: Tensor
    g_lse: Tensor | None
    out: Tensor
    lse: Tensor


class Ranges(NamedTuple):
    """The first and last key of each block of queries, if a kind prunes keys."""

    ranges: Tensor


class Sees(NamedTuple):
    """What a call ends with: see `Call`."""

    starts: Tensor | None
    first: Tensor | None
    last: Tensor | None
    padding: Tensor | None
    flags: int
    start: Start
    scale: float
    left: Size
    right: Size


# The tensors of these.
PLACES = "starts", "first", "last", "padding"


def arguments(call: Call) -> tuple[Any, ...]:
    """The arguments of an op that are not tensors of attention itself."""
    flags = CAUSAL * call.causal | PRUNE * call.prune | CHUNKED * call.chunked
    flags |= TO_BIAS * call.to_bias
    places = call.starts, call.first, call.last, call.padding
    return *call.bias, *places, flags, call.start, call.scale, *(call.window or (-1, -1))


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp by the op of the bias."""
    results = OPS[type(call.bias)].forward(q, k, v, *arguments(call))
    return results[0], results[1]


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
        needs = [x is not None and x.requires_grad for x in inputs]
        leaves: Any = [x for x, need in zip(inputs, needs, strict=True) if need]
        options: Any = {"create_graph": again, "allow_unused": True, "materialize_grads": True}
        grads = iter(torch.autograd.grad(results, leaves, above, **options))
    return [next(grads) if need else None for need in needs]


def with_whole_places(call: Call) -> Call:
    """The call, whose starts, ends of documents and padding have no gaps."""
    places = {name: getattr(call, name) for name in PLACES}
    return call._replace(**{name: x.contiguous() for name, x in places.items() if x is not None})


def _joined(name: str, *parts: type, **others: Any) -> Any:
    """A class of calls with the fields of several."""
    hints: dict[str, Any] = {}
    for part in parts:
        hints |= get_type_hints(part, include_extras=True)
    return NamedTuple(name, list((hints | others).items()))


class AttentionOps:
    """The ops of attention with a kind of bias: ``posenc::attend_`` and its name, and backward."""

    def __init__(self, kind: type[Fields]) -> None:
        self.kind, self.name = kind, f"attend_{KINDS[kind]}"
        self.is_chunked = kind in (NoBias, *NUMBERS)  # elsewhere than on a GPU
        self.tensors = [field.name for field in fields_of(kind) if field.is_tensor]
        self.prunes = issubclass(kind, PRUNED)
        ranges = [Ranges] if self.prunes else []
        call = _joined("AttendCall", Inputs, kind, Sees)
        self.forward = Op(
            self.name,
            call,
            self._results,
            2 + len(ranges),
            self._run,
            self._operations,
            plan=self._plan,
            has_plan=self._has_plan,
            save=self._save,
            backward=self._gradients,
            backward_call=self._backward_call,
            has_cpu=False,
        )
        # The start of a backward pass is part of its plan.
        call = _joined("AttendBackwardCall", Results, *ranges, Inputs, kind, Sees, start=Size)
        self.backward = Op(
            f"{self.name}_backward",
            call,
            self._results_backward,
            3 + len(self.tensors),
            self._run_backward,
            self._run_backward,
            plan=self._plan_backward,
            has_plan=self._has_plan,
            has_cpu=False,
        )

    def call_of(self, args: Any) -> Call:
        """The `Call` of an op's arguments, unchecked."""
        bias: Any = self.kind(*[getattr(args, name) for name in self.kind._fields])
        causal, prune = bool(args.flags & CAUSAL), bool(args.flags & PRUNE)
        window = None if args.left == args.right == -1 else (args.left, args.right)
        places = args.starts, args.first, args.last
        # The kernels of vectors, networks and levels make their gradients in any case.
        to_bias = bool(args.flags & TO_BIAS) or not self.is_chunked
        others = args.padding, bool(args.flags & CHUNKED), to_bias
        return Call(bias, *places, args.start, args.scale, causal, prune, window, *others)

    def check(self, who: str, args: Any) -> Call:
        """The call; refuse what would lead kernels out of a tensor's memory.

        The functions that users call say in full what is wrong.
        """
        call = self.call_of(args)
        check_devices(who, *args)
        if not (args.q.dim() == args.k.dim() == args.v.dim() == 4 and _fit(args, call)):
            rule = "q (B, H, Q, D), k (B, Hk, K, D), v (B, Hk, K, Dv) and the bias must fit"
            refuse(who, f"{rule} together", *args)
        return call

    def check_backward(self, args: Any) -> Call:
        """The call; refuse results of a forward pass, and gradients, that are not of its inputs."""
        who = f"posenc::{self.name}_backward"
        call = self.check(who, args)
        q, v, g, g_lse, out, lse = args.q, args.v, args.g, args.g_lse, args.out, args.lse
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
        if self.prunes:
            shape = _ranges_shape(q, call)
            if args.ranges.shape != shape or args.ranges.dtype != torch.int32:
                refuse(who, f"ranges must be those of posenc::{self.name}, {shape}", args.ranges)
        return call

    def _results(self, args: Any) -> tuple[Tensor, ...]:
        check_devices(f"posenc::{self.name}", *args)
        q, v, call = args.q, args.v, self.call_of(args)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        results = q.new_empty((*q.shape[:3], v.shape[3])), lse
        if not self.prunes:
            return results
        return *results, q.new_empty(_ranges_shape(q, call), dtype=torch.int32)

    def _run(self, args: Any) -> tuple[Tensor, ...]:
        call = self.check(f"posenc::{self.name}", args)
        if not self.is_chunked:
            return self._operations(args)
        results = chunked.forward(args.q, args.k, args.v, with_whole_places(call))
        return self._with_ranges(args, call, results)

    def _operations(self, args: Any) -> tuple[Tensor, ...]:
        q, k, v, call = args.q, args.k, args.v, self.call_of(args)
        return self._with_ranges(args, call, attend_dense(q, k, v, call, bias_of(call.bias, q, k)))

    def _with_ranges(
        self, args: Any, call: Call, results: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        if not self.prunes:
            return results
        return *results, args.q.new_zeros(_ranges_shape(args.q, call), dtype=torch.int32)

    def _has_plan(self, args: Any) -> bool:
        return has_kernel(args.q, args.v) and not args.flags & CHUNKED

    def _plan(self, args: Any, plan: Plan, target: Target) -> None:
        from posenc.ops.attention.triton import plans

        call = self.check(f"posenc::{self.name}", args)
        plans.plan_forward(args, call, plan, target)

    def _plan_backward(self, args: Any, plan: Plan, target: Target) -> None:
        from posenc.ops.attention.triton import plans

        plans.plan_backward(args, self.check_backward(args), plan, target)

    def _run_backward(self, args: Any) -> tuple[Tensor, ...]:
        call = with_whole_places(self.check_backward(args))
        if not self.is_chunked:
            rule = "there must be a kernel for the device, the dtype and the width of q"
            refuse(f"posenc::{self.name}_backward", rule, args.g)
        saved = args.q, args.k, args.v, args.out.contiguous(), args.lse.contiguous()
        *results, to = chunked.backward(args.g, args.g_lse, saved, call, call.to_bias)
        return tuple(results) if self.kind is NoBias else (*results, to)

    def _results_backward(self, args: Any) -> tuple[Tensor, ...]:
        """The gradients of q, k, v and the bias; an op cannot return None in place of a tensor."""
        check_devices(f"posenc::{self.name}_backward", *args)
        to_bias = self.call_of(args).to_bias
        inputs = [getattr(args, name) if to_bias else None for name in self.tensors]
        none = [args.g.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs]
        return *[x.new_empty(x.shape) for x in (args.q, args.k, args.v)], *none

    def _save(self, ctx: Any, args: Any, results: tuple[Tensor, ...]) -> None:
        names = *Inputs._fields, *self.tensors, *PLACES
        ctx.call = replaced(args, dict.fromkeys(names))
        ctx.save_for_backward(*[getattr(args, name) for name in names], *results)
        ctx.set_materialize_grads(False)

    def _gradients(
        self, ctx: Any, g: Tensor | None, g_lse: Tensor | None, *_: Any
    ) -> dict[str, Tensor | None]:
        names = *Inputs._fields, *self.tensors
        # A checkpoint computes them again when they are read, which it does once.
        tensors = ctx.saved_tensors
        saved = dict(zip((*names, *PLACES), tensors, strict=False))
        out, lse, *ranges = tensors[len(saved) :]
        args = replaced(ctx.call, saved)
        if torch.is_grad_enabled() or not (self.is_chunked or self._has_plan(args)):
            # A gradient that is differentiated again consists of torch operations.
            def run(*inputs: Tensor) -> tuple[Tensor, ...]:
                changed = replaced(args, dict(zip(names, inputs, strict=True)))
                return self._operations(changed)[:2]

            grads: Any = differentiate(run, [saved[name] for name in names], (g, g_lse))
            return dict(zip(names, grads, strict=True))
        g = torch.zeros_like(out) if g is None else g
        needs = dict(zip(self.forward.names, ctx.needs_input_grad, strict=True))
        needs_bias = any(needs[name] for name in self.tensors)
        args = args._replace(flags=args.flags | TO_BIAS * needs_bias)
        grads = self.backward(g, g_lse, out, lse, *ranges, *args)
        made = names if self.call_of(args).to_bias else Inputs._fields
        pairs = zip(made, grads, strict=False)
        return {name: grad for name, grad in pairs if saved[name] is not None}

    def _backward_call(self, args: Any, results: tuple[Tensor, ...]) -> tuple[Op, tuple[Any, ...]]:
        """The call of the gradients, if the output alone has one."""
        out, lse, *ranges = results
        tensors = [getattr(args, name) for name in self.tensors]
        is_recorded = any(x is not None and x.requires_grad for x in tensors)
        args = args._replace(flags=args.flags | TO_BIAS * is_recorded)
        return self.backward, (torch.empty_like(out), None, out, lse, *ranges, *args)


def _fit(args: Any, call: Call) -> bool:
    q, k, v = args.q, args.k, args.v
    (batch, heads, queries, width), (kv_heads, keys) = q.shape, k.shape[1:3]
    sizes = {"B": batch, "H": heads, "Hk": kv_heads, "Q": queries, "K": keys, "D": width}

    def are_integers(x: Tensor | None, *sizes: int, dtype: torch.dtype = torch.int64) -> bool:
        if x is None:
            return True
        return x.dtype == dtype and x.shape in ((1, *sizes), (batch, *sizes))

    return (
        (k.shape[0], k.shape[3]) == (batch, width)
        and k.shape[:3] == v.shape[:3]
        and kv_heads > 0
        and heads % kv_heads == 0
        and (keys > 0 or queries == 0)
        and q.dtype == k.dtype == v.dtype
        and q.dtype in checks.FLOAT_DTYPES
        and fits(call.bias, sizes)
        and call.bias.is_valid(q, k, call.causal)
        and are_integers(call.starts)
        and (call.first is None) == (call.last is None)
        and are_integers(call.first, keys)
        and are_integers(call.last, keys)
        and are_integers(call.padding, keys, dtype=torch.uint8)
    )


def _ranges_shape(q: Tensor, call: Call) -> tuple[int, ...]:
    """Of the first and last key of each block of queries, if far keys are left out."""
    batch, heads, queries, _ = q.shape
    # A few queries are not pruned either; a compiler's graph serves all lengths.
    blocks = (queries + RANGE - 1) // RANGE if call.prunes else 0
    # One axis for blocks and both ends: a compiler would make a graph for one block alone.
    return batch, heads, 2 * blocks


OPS = {kind: AttentionOps(kind) for kind in KINDS}
