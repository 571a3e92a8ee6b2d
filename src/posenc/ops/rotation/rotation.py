"""The rotation, and RMSNorm with the rotation, as ops: rules, gradients, and kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from posenc._contract import checks
from posenc._contract.overlap import check_no_internal_overlap
from posenc._contract.sharding import is_sharded, replicate_like
from posenc._contract.tracing import (
    in_forward_mode,
    in_transform,
    is_exporting,
    is_readable,
    is_recorded,
)
from posenc.ops.op import Op, Start, Written
from posenc.ops.plan import Plan, Target
from posenc.ops.rotation import reference
from posenc.ops.rotation.spec import (
    DOUBLED_TABLES,
    TOKENS_FIRST,
    WIDTH,
    Norm,
    Spec,
    TableRows,
    Turn,
    flatten,
    heads_first,
    last_start,
    shardable,
    turn_of,
    turned_back,
    wrong_start,
)

Rotation = Callable[[Tensor, Tensor, Tensor, TableRows, Spec], Tensor]
_WHO = "posenc::rotate"


def rotate(xs: list[Tensor], cos: Tensor, sin: Tensor, rows: TableRows, spec: Spec) -> list[Tensor]:
    """Rotate one tensor, or queries and keys, into new tensors; see `reference.rotate`."""
    if len(xs) == 2 and not (is_sharded(xs[0]) or is_sharded(xs[1])):
        return list(rotate_qk_op(*xs, cos, sin, *flatten(rows, spec)))
    return [_through(rotate_op, x, cos, sin, rows, spec) for x in xs]


def _through(op: Op, x: Tensor, cos: Tensor, sin: Tensor, rows: TableRows, spec: Spec) -> Any:
    if is_sharded(x):
        learned = is_recorded(cos, sin)
        cos, sin, rows = shardable(x, cos, sin, rows)
        if learned:
            return reference.rotate(x, cos, sin, rows, spec)
    return op(x, cos, sin, *flatten(rows, spec))


def rotate_(xs: list[Tensor], cos: Tensor, sin: Tensor, rows: TableRows, spec: Spec) -> None:
    """Rotate each of ``xs`` in place.

    If autograd records, the result is computed in new memory and copied, so that autograd sees the
    write and can refuse it.
    """
    recorded = is_recorded(cos, sin, *xs)
    if recorded or in_forward_mode() or in_transform(*xs) or is_exporting():
        # The tables' gradient saves its input, which the copy below overwrites.
        inputs = [x.clone() for x in xs] if cos.requires_grad or sin.requires_grad else xs
        ys = rotate(inputs, cos, sin, rows, spec)
        if len(xs) == 2 and not torch.compiler.is_compiling():
            # If autograd must not write k (a leaf, or its view), this raises before q is written.
            xs[1][:0].zero_()
        for x, y in zip(xs, ys, strict=True):
            x.copy_(y)
    elif len(xs) == 2 and not (is_sharded(xs[0]) or is_sharded(xs[1])):
        rotate_qk_in_place_op(*xs, cos, sin, *flatten(rows, spec))
    else:
        for x in xs:
            _through(rotate_in_place_op, x, cos, sin, rows, spec)
            if is_sharded(x) and not torch.compiler.is_compiling():
                # The op counted the write to the local tensor only.
                torch.autograd.graph.increment_version(x)


def norm_rotate(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rows: TableRows, spec: Spec, norm: Norm
) -> Tensor:
    """Normalise and rotate ``x`` into a new tensor, in one pass over memory.

    ``weight`` is ``[D]``, or ``[H * D]`` for a norm over all heads.
    """
    if is_sharded(x) or is_recorded(cos, sin):
        return _norm_by_operations(x, weight, cos, sin, rows, spec, norm)
    numbers = *flatten(rows, spec), norm.eps, norm.shift
    result: Tensor = norm_rotate_op(x, weight, cos, sin, *numbers)
    return result


def norm_rotate_qk(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: TableRows,
    spec: Spec,
    norm: Norm,
) -> tuple[Tensor, Tensor]:
    """:func:`norm_rotate` of queries and keys."""
    if is_sharded(q) or is_sharded(k) or is_recorded(cos, sin):
        of_q = _norm_by_operations(q, q_weight, cos, sin, rows, spec, norm)
        return of_q, _norm_by_operations(k, k_weight, cos, sin, rows, spec, norm)
    numbers = *flatten(rows, spec), norm.eps, norm.shift
    a, b = norm_rotate_qk_op(q, k, q_weight, k_weight, cos, sin, *numbers)
    return a, b


def _norm_by_operations(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rows: TableRows, spec: Spec, norm: Norm
) -> Tensor:
    """For DTensors, and where the tables get a gradient."""
    if is_sharded(x):
        cos, sin, rows = shardable(x, cos, sin, rows)
        weight = replicate_like(x, weight)
    return reference.norm_rotate(x, weight, cos, sin, rows, spec, norm)


class _Exported(threading.local):
    """The rotation in programs that this thread exports.

    Such a program must run without this package, so it consists of torch operations, unless its
    format (ONNX) has an operator for the rotation. Dynamo does not trace a variable of a context.
    """

    def __init__(self) -> None:
        self.rotation: Rotation = reference.rotate


_exported = _Exported()


@contextmanager
def exported_as(rotation: Rotation) -> Iterator[None]:
    """Export with ``rotation``, which has the arguments of `reference.rotate`, in this context."""
    before, _exported.rotation = _exported.rotation, rotation
    try:
        yield
    finally:
        _exported.rotation = before


def refuse(who: str, rule: str, *tensors: Any) -> NoReturn:
    """Raise an error that shows ``tensors``."""
    shown = [f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in tensors if hasattr(t, "dtype")]
    hint = "Call the functions of posenc.functional, which explain their arguments."
    checks.fail(who, rule, " and ".join(shown), hint)


class Rotating(Protocol):
    """What the calls that rotate have in common."""

    @property
    def xs(self) -> list[Tensor]:
        """The tensors that are rotated."""

    @property
    def cos(self) -> Tensor:
        """A table, [R, P], [B, R, P], or with each number twice."""

    @property
    def sin(self) -> Tensor:
        """A table of the same shape."""

    @property
    def positions(self) -> Tensor | None:
        """The row of each token, or of the first token, less the start."""

    @property
    def start(self) -> int:
        """The first row."""

    @property
    def layout(self) -> int:
        """Bits of `spec`."""


class Norming(Rotating, Protocol):
    """What the calls with a norm have in common."""

    @property
    def weights(self) -> list[Tensor]:
        """The weights of the norms."""

    @property
    def eps(self) -> float:
        """Added to the mean of the squares."""

    @property
    def shift(self) -> float:
        """Added to the weights."""


class RotateCall(NamedTuple):
    """Rotate one tensor."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    start: Start
    layout: int

    @property
    def xs(self) -> list[Tensor]:
        """The tensors that are rotated."""
        return [self.x]


class RotateQKCall(NamedTuple):
    """Rotate queries and keys."""

    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    start: Start
    layout: int

    @property
    def xs(self) -> list[Tensor]:
        """The tensors that are rotated."""
        return [self.q, self.k]


class RotateInPlaceCall(NamedTuple):
    """Rotate one tensor in place."""

    x: Written
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    start: Start
    layout: int

    @property
    def xs(self) -> list[Tensor]:
        """The tensors that are rotated."""
        return [self.x]


class RotateQKInPlaceCall(NamedTuple):
    """Rotate queries and keys in place."""

    q: Written
    k: Written
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    start: Start
    layout: int

    @property
    def xs(self) -> list[Tensor]:
        """The tensors that are rotated."""
        return [self.q, self.k]


class NormRotateCall(NamedTuple):
    """RMSNorm of one tensor, and its rotation."""

    x: Tensor
    weight: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    start: Start
    layout: int
    eps: float
    shift: float

    @property
    def xs(self) -> list[Tensor]:
        """The tensors that are rotated."""
        return [self.x]

    @property
    def weights(self) -> list[Tensor]:
        """The weights of their norms."""
        return [self.weight]


class NormRotateQKCall(NamedTuple):
    """RMSNorm of queries and keys, and their rotation."""

    q: Tensor
    k: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    start: Start
    layout: int
    eps: float
    shift: float

    @property
    def xs(self) -> list[Tensor]:
        """The tensors that are rotated."""
        return [self.q, self.k]

    @property
    def weights(self) -> list[Tensor]:
        """The weights of their norms."""
        return [self.q_weight, self.k_weight]


class NormRotateBackwardCall(NamedTuple):
    """The gradients of :class:`NormRotateCall` for its tensor and its weight."""

    g: Tensor
    x: Tensor
    weight: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    start: Start
    layout: int
    eps: float
    shift: float

    @property
    def xs(self) -> list[Tensor]:
        """The tensors that are rotated."""
        return [self.x]

    @property
    def weights(self) -> list[Tensor]:
        """The weights of their norms."""
        return [self.weight]


def turn(call: Rotating) -> Turn:
    """The rotation of a call, in one form."""
    where = call.cos, call.sin, call.positions, call.start
    return turn_of(*where, call.layout, call.xs[0].shape[-1])


def with_heads_first(call: Rotating) -> list[Tensor]:
    """The tensors of a call as (B, H, T, D)."""
    return [heads_first(x, call.layout) for x in call.xs]


def check_rotation(call: Rotating, *others: Tensor | None) -> Turn:
    """Refuse a call with which a kernel would access memory out of bounds; its rotation.

    The kernels check the values of positions. ``others`` are tensors for the same device. The
    start is checked by :func:`check_start`.
    """
    cos, sin, layout = call.cos, call.sin, call.layout
    check_devices(_WHO, *call.xs, cos, sin, call.positions, *others)
    if any(x.dim() != 4 for x in call.xs):
        refuse(_WHO, "tensors must be floating, (B, H, T, D), and differ only in H", *call.xs)
    x, *_ = xs = with_heads_first(call)
    for t in xs:
        agrees = (t.shape[0], *t.shape[2:]) == (x.shape[0], *x.shape[2:])
        if not agrees or t.dtype not in checks.FLOAT_DTYPES:
            refuse(_WHO, "tensors must be floating, (B, H, T, D), and differ only in H", *xs)
    check_rows(x, cos, sin, call.positions)
    rotation = turn(call)
    pairs, width, columns = rotation.cos.shape[-1], x.shape[3], cos.shape[-1]
    if not 2 <= 2 * pairs <= width or layout // WIDTH not in (0, width):
        refuse(_WHO, f"cos must have 1 to {width // 2} columns, or each of them twice", cos, x)
    known = layout >= 0 and layout % WIDTH < 2 * TOKENS_FIRST
    if not known or (layout & DOUBLED_TABLES and columns % 2):
        refuse(_WHO, f"layout must be of known bits, not {layout}", cos, x)
    return rotation


def are_doubles_unchecked(call: Rotating, rotation: Turn) -> bool:
    """Whether tables have each number twice, which nobody has checked."""
    return not call.layout & DOUBLED_TABLES and rotation.cos.shape[-1] < call.cos.shape[-1]


def check_values(call: Rotating, rotation: Turn) -> Turn:
    """Refuse a start without rows, and tables that can be read and differ in a pair."""
    length = heads_first(call.xs[0], call.layout).shape[2]
    check_start(call.start, call.cos.shape[-2], length, call.positions)
    if are_doubles_unchecked(call, rotation):
        for table in (call.cos, call.sin):
            halves = reference.pairs(table, rotation.spec.interleaved)
            if is_readable(table) and not torch.equal(*halves):
                rule = "both numbers of a pair must be the same in cos and sin"
                refuse(_WHO, rule, call.cos, call.sin)
    return rotation


def check_rows(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> None:
    """Refuse tables and positions that do not fit ``x``; kernels check the positions' values."""
    batch, _, length, _ = x.shape
    if (
        cos.shape != sin.shape
        or not (cos.dim() == 2 or (cos.dim() == 3 and cos.shape[0] in (1, batch)))
        or cos.dtype not in checks.FLOAT_DTYPES
        or sin.dtype not in checks.FLOAT_DTYPES
    ):
        rule = f"cos and sin must be floating, (R, P) or (1 or {batch}, R, P)"
        refuse(_WHO, rule, cos, sin, x)
    if positions is not None and not _are_positions(positions, batch, length):
        rule = f"positions must be int64 or int32, ({length},) or (1 or {batch}, 1 or {length})"
        refuse(_WHO, rule, positions, x)


def check_start(start: int, rows: int, length: int, positions: Tensor | None) -> None:
    """Refuse a start with which a token has no row."""
    if not 0 <= start <= last_start(rows, length, positions):
        raise wrong_start(start, rows, length, positions)


def _are_positions(positions: Tensor, batch: int, length: int) -> bool:
    if positions.dtype not in (torch.int64, torch.int32):
        return False
    if positions.dim() != 2:
        return positions.dim() == 1 and positions.shape[0] == length
    return positions.shape[0] in (1, batch) and positions.shape[1] in (1, length)


def check_devices(who: str, *tensors: Any) -> None:
    """Refuse tensors on several devices; if one is meta, the result would stay unwritten."""
    if len({t.device for t in tensors if hasattr(t, "device")}) > 1:
        refuse(who, "tensors must be on one device", *tensors)


def check_weight(weight: Tensor, x: Tensor) -> None:
    """Refuse a weight that a kernel would read out of bounds."""
    each, every = x.shape[3], x.shape[1] * x.shape[3]
    fits = weight.dim() == 1 and weight.shape[0] in (each, every)
    if not fits or weight.dtype not in checks.FLOAT_DTYPES:
        refuse(_WHO, f"weight must be floating, ({each},) or ({every},)", weight, x)


def strided_like(y: Tensor, x: Tensor) -> Tensor:
    """``y`` with the strides of `torch.empty_like(x)`, which are those of fake results."""
    like = torch.empty_like(x)
    return y if y.stride() == like.stride() else like.copy_(y)


def _in_their_form(ys: list[Tensor], call: Rotating) -> tuple[Tensor, ...]:
    """Results (B, H, T, D) in the form of the call's tensors, with the strides of fake ones."""
    both = zip(ys, call.xs, strict=True)
    return tuple([strided_like(heads_first(y, call.layout), x) for y, x in both])


def like_tensors(call: Any) -> tuple[Tensor, ...]:
    """Empty results like the tensors that are rotated."""
    check_devices(_WHO, *call)
    return tuple([torch.empty_like(x) for x in call.xs])


def no_results(call: Any) -> tuple[Tensor, ...]:
    """The results of an op in place."""
    check_devices(_WHO, *call)
    return ()


def _run(call: RotateCall | RotateQKCall) -> tuple[Tensor, ...]:
    rotation = check_values(call, check_rotation(call))
    return _in_their_form([reference.rotate(x, *rotation) for x in with_heads_first(call)], call)


def _run_in_place(call: RotateInPlaceCall | RotateQKInPlaceCall) -> tuple[Tensor, ...]:
    rotation = check_values(call, check_rotation(call))
    for x in call.xs:
        check_no_internal_overlap(_WHO, x)
    xs = with_heads_first(call)
    for x, y in zip(xs, [reference.rotate(x, *rotation) for x in xs], strict=True):
        x.copy_(y)
    return ()


def _by_operations(call: RotateCall | RotateQKCall) -> tuple[Tensor, ...]:
    """The rotation of one tensor, or of two, as operations of torch, or of an exporter."""
    by = _exported.rotation if is_exporting() else reference.rotate
    rotation = turn(call)
    ys = [by(x, *rotation) for x in with_heads_first(call)]
    return tuple([heads_first(y, call.layout) for y in ys])


def _plan(call: Rotating, plan: Plan, target: Target) -> None:
    from posenc.ops.rotation.triton import rotate

    check_rotation(call)
    if isinstance(call, RotateInPlaceCall | RotateQKInPlaceCall):
        for x in call.xs:
            check_no_internal_overlap(_WHO, x)
    rotate.plan_rotation(call, plan, target)


def _save(ctx: Any, call: RotateCall | RotateQKCall, result: Any) -> None:
    """Save what the gradient needs."""
    *xs, cos, sin, positions, start, layout = call
    # A number has no gradient.
    *wanted, to_cos, to_sin, _, _, _ = ctx.needs_input_grad
    for_tables = to_cos or to_sin
    if len(xs) == 2 and not for_tables and wanted[0] != wanted[1]:
        # A cache that k is written to would otherwise keep the graph of q alive.
        ctx.mark_non_differentiable(result[1 if wanted[0] else 0])
    ctx.others = start, layout, for_tables
    ctx.save_for_backward(cos, sin, positions, *(xs if for_tables else ()))


def _backward(ctx: Any, *gradients: Tensor) -> dict[str, Tensor | None]:
    """The gradient with respect to the tensors is the transposed rotation."""
    cos, sin, positions, *xs = ctx.saved_tensors
    start, layout, for_tables = ctx.others
    rotation = cos, sin, positions, start, turned_back(layout)
    if len(gradients) == 1:
        result: dict[str, Tensor | None] = {"x": rotate_op.quick(*gradients, *rotation)}
    else:
        to_q, to_k = rotate_qk_op.quick(*gradients, *rotation)
        result = {"q": to_q, "k": to_k}
    if for_tables:
        used = turn_of(cos, sin, positions, start, layout, gradients[0].shape[-1])
        both = [
            (heads_first(x, layout), heads_first(g, layout))
            for x, g in zip(xs, gradients, strict=True)
        ]
        terms = [reference.table_gradients(x, g, *used) for x, g in both]
        to_cos, to_sin = (sum(term) for term in zip(*terms, strict=True))
        result["cos"] = _like_table(to_cos, cos.shape, used.spec)
        result["sin"] = _like_table(to_sin, sin.shape, used.spec)
    return result


def _like_table(gradient: Any, shape: torch.Size, spec: Spec) -> Tensor:
    """The gradient of a table from that of its pairs."""
    if gradient.shape[-1] != shape[-1]:
        twice = torch.stack((gradient, torch.zeros_like(gradient)), -1 if spec.interleaved else -2)
        gradient = twice.flatten(-2)
    return gradient.reshape(shape)  # type: ignore[no-any-return]


def _vmap(of: type[RotateCall] | type[RotateQKCall]) -> Callable[..., Any]:
    """The rule that folds samples into the batch."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        call: Any = of(*arguments)
        dims: Any = of(*in_dims)
        samples, first = info.batch_size, call.xs[0]
        batch = (first if dims.xs[0] is None else first.select(dims.xs[0], 0)).shape[0]

        def fold(t: Tensor, dim: Any, rank: int) -> Tensor:
            t = t.unsqueeze(0) if dim is None else t.movedim(dim, 0)
            t = t.unsqueeze(1) if t.dim() == rank else t
            return t.expand(samples, batch, *t.shape[2:]).flatten(0, 1)

        xs = [fold(x, dim, 4) for x, dim in zip(call.xs, dims.xs, strict=True)]
        cos, sin, positions = call.cos, call.sin, call.positions
        if cos.dim() > 2 or (dims.cos, dims.sin) != (None, None):
            cos, sin = fold(cos, dims.cos, 3), fold(sin, dims.sin, 3)
        if dims.positions is not None or (positions is not None and positions.dim() == 2):
            assert positions is not None
            positions = fold(positions, dims.positions, 2)
        op = rotate_op if len(xs) == 1 else rotate_qk_op
        ys = op(*xs, cos, sin, positions, call.start, call.layout)
        if len(xs) == 1:
            return ys.unflatten(0, (samples, batch)), 0
        return tuple([y.unflatten(0, (samples, batch)) for y in ys]), (0, 0)

    return rule


_RULES: Any = {"plan": _plan, "save": _save, "backward": _backward}
rotate_op = Op(
    "rotate", RotateCall, like_tensors, 1, _run, _by_operations, vmap=_vmap(RotateCall), **_RULES
)
rotate_qk_op = Op(
    "rotate_qk",
    RotateQKCall,
    like_tensors,
    2,
    _run,
    _by_operations,
    vmap=_vmap(RotateQKCall),
    **_RULES,
)
rotate_in_place_op = Op(
    "rotate_", RotateInPlaceCall, no_results, 0, _run_in_place, _run_in_place, plan=_plan
)
rotate_qk_in_place_op = Op(
    "rotate_qk_", RotateQKInPlaceCall, no_results, 0, _run_in_place, _run_in_place, plan=_plan
)


def check_norm(call: Norming, *others: Tensor | None) -> Turn:
    """:func:`check_rotation` of a norm and a rotation, and the weights."""
    rotation = check_rotation(call, *call.weights, *others)
    for x, weight in zip(with_heads_first(call), call.weights, strict=True):
        check_weight(weight, x)
    return rotation


def check_gradient(call: NormRotateBackwardCall) -> None:
    """Refuse a gradient that is not that of the result."""
    if call.g.shape != call.x.shape or call.g.dtype != call.x.dtype:
        refuse(_WHO, "a gradient must be of its tensor's shape and dtype", call.g, call.x)


def _run_norm(call: NormRotateCall | NormRotateQKCall) -> tuple[Tensor, ...]:
    check_values(call, check_norm(call))
    return _in_their_form([*_normed(call)], call)


def _normed(call: NormRotateCall | NormRotateQKCall) -> Iterator[Tensor]:
    rotation, norm = turn(call), Norm(call.eps, call.shift)
    for x, weight in zip(with_heads_first(call), call.weights, strict=True):
        yield reference.norm_rotate(x, weight, *rotation, norm)


def _norm_operations(call: NormRotateCall | NormRotateQKCall) -> tuple[Tensor, ...]:
    return tuple([heads_first(y, call.layout) for y in _normed(call)])


def _plan_norm(call: NormRotateCall | NormRotateQKCall, plan: Plan, target: Target) -> None:
    from posenc.ops.rotation.triton import norm

    check_norm(call)
    norm.plan_norm(call, plan, target)


def _run_norm_backward(call: NormRotateBackwardCall) -> tuple[Tensor, ...]:
    check_values(call, check_norm(call, call.g))
    check_gradient(call)
    to_x, to_weight = _norm_backward_operations(call)
    return strided_like(to_x, call.x), to_weight


def _norm_backward_operations(call: NormRotateBackwardCall) -> tuple[Tensor, ...]:
    g, (x,) = heads_first(call.g, call.layout), with_heads_first(call)
    norm = Norm(call.eps, call.shift)
    to_x, to_weight = reference.norm_rotate_backward(g, x, call.weight, *turn(call), norm)
    return heads_first(to_x, call.layout), to_weight


def _plan_norm_backward(call: NormRotateBackwardCall, plan: Plan, target: Target) -> None:
    from posenc.ops.rotation.triton import norm

    check_norm(call, call.g)
    check_gradient(call)
    norm.plan_norm_backward(call, plan, target)


def _save_norm(ctx: Any, call: NormRotateCall | NormRotateQKCall, results: Any) -> None:
    ctx.save_for_backward(*call.xs, *call.weights, call.cos, call.sin, call.positions)
    ctx.others = call.start, call.layout, call.eps, call.shift


def _norm_gradients(ctx: Any, *gradients: Tensor) -> dict[str, Tensor | None]:
    *tensors, cos, sin, positions = ctx.saved_tensors
    half = len(tensors) // 2
    names = [("x", "weight")] if half == 1 else [("q", "q_weight"), ("k", "k_weight")]
    result: dict[str, Tensor | None] = {}
    for i, (x_name, weight_name) in enumerate(names):
        call = gradients[i], tensors[i], tensors[half + i], cos, sin, positions, *ctx.others
        if torch.is_grad_enabled():
            # A gradient that is differentiated again consists of torch operations.
            both: Any = _norm_backward_operations(NormRotateBackwardCall(*call))
        else:
            both = norm_rotate_backward_op.quick(*call)
        result[x_name], result[weight_name] = both
    return result


def _like_x_and_weight(call: NormRotateBackwardCall) -> tuple[Tensor, ...]:
    check_devices(_WHO, *call)
    return torch.empty_like(call.x), call.weight.new_empty(call.weight.shape)


_NORM_RULES: Any = {"plan": _plan_norm, "save": _save_norm, "backward": _norm_gradients}
norm_rotate_op = Op(
    "norm_rotate", NormRotateCall, like_tensors, 1, _run_norm, _norm_operations, **_NORM_RULES
)
norm_rotate_qk_op = Op(
    "norm_rotate_qk", NormRotateQKCall, like_tensors, 2, _run_norm, _norm_operations, **_NORM_RULES
)
norm_rotate_backward_op = Op(
    "norm_rotate_backward",
    NormRotateBackwardCall,
    _like_x_and_weight,
    2,
    _run_norm_backward,
    _norm_backward_operations,
    plan=_plan_norm_backward,
)
