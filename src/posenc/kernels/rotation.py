"""The rotation, and RMSNorm with the rotation, as ops: rules, gradients, and kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

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
from posenc.kernels import reference, triton
from posenc.kernels.backends import kernel_for
from posenc.kernels.op import Op
from posenc.kernels.spec import (
    TWINS,
    Norm,
    RowOutOfRange,
    Rows,
    Spec,
    flatten,
    shardable,
    unflatten,
)

Rotation = Callable[[Tensor, Tensor, Tensor, Rows, Spec], Tensor]
_WHO = "posenc::rotate"


def rotate(xs: list[Tensor], cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> list[Tensor]:
    """Rotate one tensor, or queries and keys, into new tensors; see `reference.rotate`."""
    if len(xs) == 2 and not (is_sharded(xs[0]) or is_sharded(xs[1])):
        return list(rotate_qk_op(*xs, cos, sin, *flatten(rows, spec)))
    return [_through(rotate_op, x, cos, sin, rows, spec) for x in xs]


def _through(op: Op, x: Tensor, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> Any:
    if is_sharded(x):
        learned = is_recorded(cos, sin)
        cos, sin, rows = shardable(x, cos, sin, rows)
        if learned:
            return reference.rotate(x, cos, sin, rows, spec)
    return op(x, cos, sin, *flatten(rows, spec))


def rotate_(xs: list[Tensor], cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> None:
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
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec, norm: Norm
) -> Tensor:
    """Normalise and rotate ``x`` into a new tensor, in one pass over memory.

    ``weight`` is ``[D]``, or ``[H * D]`` for a norm over all heads.
    """
    if is_sharded(x) or is_recorded(cos, sin):
        return _norm_by_operations(x, weight, cos, sin, rows, spec, norm)
    how = *flatten(rows, spec), norm.eps, norm.shift
    result: Tensor = norm_rotate_op(x, weight, cos, sin, *how)
    return result


def norm_rotate_qk(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    spec: Spec,
    norm: Norm,
) -> tuple[Tensor, Tensor]:
    """:func:`norm_rotate` of queries and keys."""
    if is_sharded(q) or is_sharded(k) or is_recorded(cos, sin):
        of_q = _norm_by_operations(q, q_weight, cos, sin, rows, spec, norm)
        return of_q, _norm_by_operations(k, k_weight, cos, sin, rows, spec, norm)
    how = *flatten(rows, spec), norm.eps, norm.shift
    a, b = norm_rotate_qk_op(q, k, q_weight, k_weight, cos, sin, *how)
    return a, b


def _norm_by_operations(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec, norm: Norm
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
    shown = [f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in tensors if isinstance(t, Tensor)]
    hint = "Call the functions of posenc.functional, which explain their arguments."
    checks.fail(who, rule, " and ".join(shown), hint)


def check_rotation(arguments: tuple[Any, ...], *others: Any) -> tuple[Any, ...]:
    """Unflatten the arguments; refuse those with which a kernel would access memory out of bounds.

    The kernels check the values of positions. ``others`` are tensors for the same device.
    """
    *xs, cos, sin, positions, start, layout = arguments
    x = xs[0]
    check_devices(_WHO, *xs, cos, sin, positions, *others)
    for t in xs:
        agrees = t.dim() == 4 and (t.shape[0], *t.shape[2:]) == (x.shape[0], *x.shape[2:])
        if not agrees or t.dtype not in checks.FLOAT_DTYPES:
            refuse(_WHO, "tensors must be floating, (B, H, T, D), and differ only in H", *xs)
    check_rows(x, cos, sin, positions, start)
    *xs, cos, sin, rows, spec = unflatten(arguments)
    pairs, width = cos.shape[-1], x.shape[3]
    if not 2 <= 2 * pairs <= width:
        refuse(_WHO, f"cos must have 1 to {width // 2} columns, or each of them twice", cos, x)
    tables = arguments[-5:-3]
    columns = tables[0].shape[-1]
    if not 0 <= layout < 2 * TWINS or (layout & TWINS and columns % 2):
        refuse(_WHO, f"layout must be of known bits, not {layout}", cos, x)
    if not layout & TWINS and pairs < columns:
        _check_twins(kernel_for(x), tables, spec.interleaved)
    return xs, cos, sin, rows, spec


def _check_twins(kernel: Any, tables: tuple[Tensor, ...], interleaved: bool) -> None:
    """Refuse tables that do not have each number twice; on CUDA, that stops the device."""
    if kernel is triton:
        triton.check_twins(*tables, interleaved)
    for table in tables:
        if is_readable(table) and not torch.equal(*reference.pairs(table, interleaved)):
            refuse(_WHO, "both numbers of a pair must be the same in cos and sin", *tables)


def check_rows(x: Tensor, cos: Tensor, sin: Tensor, positions: Any, start: int) -> None:
    """Refuse tables and rows that do not fit ``x``; kernels check the values of positions."""
    batch, _, length, _ = x.shape
    if (
        cos.shape != sin.shape
        or not (cos.dim() == 2 or (cos.dim() == 3 and cos.shape[0] in (1, batch)))
        or cos.dtype not in checks.FLOAT_DTYPES
        or sin.dtype not in checks.FLOAT_DTYPES
    ):
        rule = f"cos and sin must be floating, (R, P) or (1 or {batch}, R, P)"
        refuse(_WHO, rule, cos, sin, x)
    count = cos.shape[-2]
    end = start + length if positions is None else start
    if start < 0 or end > count:
        raise RowOutOfRange(start if start < 0 else max(start, end - 1), count)
    if positions is not None and not _are_positions(positions, batch, length):
        rule = f"positions must be int64 or int32, ({length},) or (1 or {batch}, 1 or {length})"
        refuse(_WHO, rule, positions, x)


def _are_positions(at: Tensor, batch: int, length: int) -> bool:
    if at.dtype not in (torch.int64, torch.int32):
        return False
    if at.dim() == 1:
        return at.shape[0] == length
    return at.dim() == 2 and at.shape[0] in (1, batch) and at.shape[1] in (1, length)


def check_devices(who: str, *tensors: Any) -> None:
    """Refuse tensors on several devices; if one is meta, the result would stay unwritten."""
    if len({t.device for t in tensors if isinstance(t, Tensor)}) > 1:
        refuse(who, "tensors must be on one device", *tensors)


def check_weight(weight: Tensor, x: Tensor) -> None:
    """Refuse a weight that a kernel would read out of bounds."""
    each, every = x.shape[3], x.shape[1] * x.shape[3]
    fits = weight.dim() == 1 and weight.shape[0] in (each, every)
    if not fits or weight.dtype not in checks.FLOAT_DTYPES:
        refuse(_WHO, f"weight must be floating, ({each},) or ({every},)", weight, x)


def run(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> list[Tensor]:
    """Run a kernel from Python; results have the strides of `torch.empty_like`."""
    kernel = kernel_for(xs[0])
    if kernel is reference:
        return [strided_like(reference.rotate(x, cos, sin, rows, spec), x) for x in xs]
    ys = [torch.empty_like(x) for x in xs]
    rotate_into(kernel, xs, ys, cos, sin, rows, spec)
    return ys


def rotate_into(
    kernel: Any, xs: Sequence[Tensor], ys: Sequence[Tensor], cos: Tensor, sin: Tensor, *how: Any
) -> None:
    """Run ``kernel`` from ``xs`` to ``ys``, which may be ``xs``; on copies if it returns False."""
    if kernel.rotate_into(xs, ys, cos, sin, *how):
        return
    cos, sin = dense(cos), dense(sin)
    for x, y in zip(xs, ys, strict=True):
        if x.numel() and not kernel.rotate_into([x], [y], cos, sin, *how):
            x = dense(x)
            dense_y = torch.empty_like(x)
            kernel.rotate_into([x], [dense_y], cos, sin, *how)
            y.copy_(dense_y)


def run_norm(kernel: Any, x: Tensor, weight: Tensor, *how: Any) -> Tensor:
    """Run ``kernel`` of :func:`norm_rotate`."""
    if kernel is reference:
        return strided_like(reference.norm_rotate(x, weight, *how), x)
    return on_dense_rows(x, lambda x, y: kernel.norm_into(x, y, weight, *how))[0]


def run_norm_backward(
    kernel: Any, g: Tensor, x: Tensor, weight: Tensor, *how: Any
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`norm_rotate` with respect to ``x`` and the weight; ``g`` is incoming."""
    if kernel is reference:
        to_x, to_weight = reference.norm_rotate_backward(g, x, weight, *how)
        return strided_like(to_x, x), to_weight
    g = with_dense_rows(g)
    return on_dense_rows(x, lambda x, dx: kernel.norm_backward_into(g, x, dx, weight, *how))


def strided_like(y: Tensor, x: Tensor) -> Tensor:
    """``y`` with the strides of `torch.empty_like(x)`, which are those of fake results."""
    like = torch.empty_like(x)
    return y if y.stride() == like.stride() else like.copy_(y)


def on_dense_rows(x: Tensor, run: Callable[[Tensor, Tensor], Any]) -> tuple[Tensor, Any]:
    """Call ``run(x, y)`` with a new ``y``, on copies if need be; return ``y`` and the result."""
    y = torch.empty_like(x)
    if has_dense_rows(x, y):
        return y, run(x, y)
    x = dense(x)
    dense_y = torch.empty_like(x)
    returned = run(x, dense_y)
    return y.copy_(dense_y), returned


def has_dense_rows(*tensors: Tensor) -> bool:
    """Whether a kernel can use ``tensors`` without a copy; some gradients have no storage."""
    return all(t.stride(-1) == 1 and not t.is_neg() and t.data_ptr() for t in tensors)


def with_dense_rows(x: Tensor) -> Tensor:
    """``x``, or a copy of it that a kernel can use."""
    return x if has_dense_rows(x) else dense(x)


def dense(x: Tensor) -> Tensor:
    """A contiguous copy of ``x``."""
    # contiguous() keeps odd strides of axes of size 1, and clone() keeps the negative bit.
    return x.resolve_neg().clone(memory_format=torch.contiguous_format)


def _run(*arguments: Any) -> Any:
    """The op in Python, of one tensor or of two."""
    return _one_or_two(run(*check_rotation(arguments)))


def _one_or_two(ys: list[Tensor]) -> Any:
    """The results of an op: a tensor, or a tuple of two."""
    return ys[0] if len(ys) == 1 else tuple(ys)


def _run_in_place(*arguments: Any) -> None:
    xs, cos, sin, rows, spec = check_rotation(arguments)
    for x in xs:
        check_no_internal_overlap(_WHO, x)
    kernel = kernel_for(xs[0])
    # Between two layouts, a kernel would overwrite channels before it reads them.
    if kernel is reference or spec.interleaved != spec.interleaved_out:
        for x, y in zip(xs, run(xs, cos, sin, rows, spec), strict=True):
            x.copy_(y)
    else:
        rotate_into(kernel, xs, xs, cos, sin, rows, spec)
        torch.autograd.graph.increment_version(xs)


def _by_operations(*arguments: Any) -> Any:
    """The rotation of one tensor, or of two, as operations of torch, or of an exporter."""
    *xs, cos, sin, rows, spec = unflatten(arguments)
    by = _exported.rotation if is_exporting() else reference.rotate
    return _one_or_two([by(x, cos, sin, rows, spec) for x in xs])


def fake_like(count: int) -> Callable[..., Any]:
    """The fake implementation of an op whose results are like its first ``count`` arguments."""

    def fake(*arguments: Any) -> Any:
        check_devices(_WHO, *arguments)
        results = tuple([torch.empty_like(x) for x in arguments[:count]])
        return results[0] if count == 1 else results or None

    return fake


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save what the gradient needs."""
    *xs, cos, sin, (ctx.start, positions), ctx.spec = unflatten(tuple(inputs))
    count, needs = len(xs), ctx.needs_input_grad
    ctx.for_tables = needs[count] or needs[count + 1]
    ctx.table_shape = inputs[count].shape
    if count == 2 and not ctx.for_tables and needs[0] != needs[1]:
        # A cache that k is written to would otherwise keep the graph of q alive.
        ctx.mark_non_differentiable(output[1 if needs[0] else 0])
    ctx.save_for_backward(cos, sin, positions, *(xs if ctx.for_tables else ()))


def _backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    """The gradient with respect to the tensors is the transposed rotation."""
    cos, sin, positions, *xs = ctx.saved_tensors
    rows, spec = Rows(ctx.start, positions), ctx.spec
    to_xs = rotate(list(gradients), cos, sin, rows, spec.transpose())
    to_tables: Sequence[Any] = (None, None)
    if ctx.for_tables:
        both = zip(xs, gradients, strict=True)
        terms = [reference.table_gradients(x, g, cos, sin, rows, spec) for x, g in both]
        to_tables = [sum(term) for term in zip(*terms, strict=True)]
        to_tables = [_like_table(g, ctx.table_shape, spec) for g in to_tables]
    return (*to_xs, *to_tables, None, None, None)


def _like_table(gradient: Any, shape: torch.Size, spec: Spec) -> Tensor:
    """The gradient of a table from that of its pairs."""
    if gradient.shape[-1] != shape[-1]:
        twice = torch.stack((gradient, torch.zeros_like(gradient)), -1 if spec.interleaved else -2)
        gradient = twice.flatten(-2)
    return gradient.reshape(shape)  # type: ignore[no-any-return]


def _vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    """Fold the samples into the batch."""
    count = len(arguments) - 5
    samples, x_dims = info.batch_size, in_dims[:count]
    first = arguments[0] if x_dims[0] is None else arguments[0].select(x_dims[0], 0)
    batch = first.shape[0]

    def fold(t: Tensor, dim: int | None, rank: int) -> Tensor:
        t = t.unsqueeze(0) if dim is None else t.movedim(dim, 0)
        t = t.unsqueeze(1) if t.dim() == rank else t
        return t.expand(samples, batch, *t.shape[2:]).flatten(0, 1)

    xs = [fold(x, dim, 4) for x, dim in zip(arguments[:count], x_dims, strict=True)]
    (cos, sin, positions), (cos_dim, sin_dim, ids_dim) = (
        part[count : count + 3] for part in (arguments, in_dims)
    )
    if cos.dim() > 2 or (cos_dim, sin_dim) != (None, None):
        cos, sin = fold(cos, cos_dim, 3), fold(sin, sin_dim, 3)
    if ids_dim is not None or (positions is not None and positions.dim() == 2):
        positions = fold(positions, ids_dim, 2)
    op = rotate_op if count == 1 else rotate_qk_op
    ys = op(*xs, cos, sin, positions, *arguments[count + 3 :])
    if count == 1:
        return ys.unflatten(0, (samples, batch)), 0
    return tuple([y.unflatten(0, (samples, batch)) for y in ys]), (0, 0)


HOW = "Tensor cos, Tensor sin, Tensor? positions, SymInt start, int layout"
_RULES: dict[str, Any] = {"save": _save, "backward": _backward, "vmap": _vmap}
rotate_op = Op(
    "rotate",
    f"(Tensor x, {HOW}) -> Tensor",
    _run,
    _by_operations,
    fake_like(1),
    **_RULES,
)
rotate_qk_op = Op(
    "rotate_qk",
    f"(Tensor q, Tensor k, {HOW}) -> (Tensor, Tensor)",
    _run,
    _by_operations,
    fake_like(2),
    **_RULES,
)
rotate_in_place_op = Op(
    "rotate_",
    f"(Tensor(a!) x, {HOW}) -> ()",
    _run_in_place,
    _run_in_place,
    fake_like(0),
    writes=(0,),
)
rotate_qk_in_place_op = Op(
    "rotate_qk_",
    f"(Tensor(a!) q, Tensor(b!) k, {HOW}) -> ()",
    _run_in_place,
    _run_in_place,
    fake_like(0),
    writes=(0, 1),
)


def _check_norm(xs: Sequence[Tensor], weights: Sequence[Tensor], how: Any, *others: Any) -> Any:
    _, cos, sin, rows, spec = check_rotation((*xs, *how[:5]), *weights, *others)
    for x, weight in zip(xs, weights, strict=True):
        check_weight(weight, x)
    return cos, sin, rows, spec, Norm(*how[5:])


def _unflatten_norm(xs: Sequence[Tensor], how: Any) -> Any:
    *_, cos, sin, rows, spec = unflatten((*xs, *how[:5]))
    return cos, sin, rows, spec, Norm(*how[5:])


def _norm_arguments(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors, weights, and the other seven arguments of an op of one tensor, or of two."""
    count = (len(arguments) - 7) // 2
    return arguments[:count], arguments[count : 2 * count], arguments[2 * count :]


def _run_norm(*arguments: Any) -> Any:
    xs, weights, how = _norm_arguments(arguments)
    rotation = _check_norm(xs, weights, how)
    kernel = kernel_for(xs[0])
    if len(xs) == 2 and kernel is not reference and has_dense_rows(*xs):
        ys = [torch.empty_like(x) for x in xs]
        if has_dense_rows(*ys):
            kernel.norm_qk_into(xs, ys, weights, *rotation)
            return tuple(ys)
    both = zip(xs, weights, strict=True)
    return _one_or_two([run_norm(kernel, x, weight, *rotation) for x, weight in both])


def _run_norm_backward(g: Tensor, x: Tensor, weight: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    rotation = _check_norm([x], [weight], how, g)
    if g.shape != x.shape or g.dtype != x.dtype:
        refuse(_WHO, "a gradient must be of its tensor's shape and dtype", g, x)
    return run_norm_backward(kernel_for(x), g, x, weight, *rotation)


def _norm_operations(*arguments: Any) -> Any:
    xs, weights, how = _norm_arguments(arguments)
    rotation, both = _unflatten_norm(xs, how), zip(xs, weights, strict=True)
    return _one_or_two([reference.norm_rotate(x, weight, *rotation) for x, weight in both])


def _norm_backward_operations(g: Tensor, x: Tensor, weight: Tensor, *how: Any) -> Any:
    return reference.norm_rotate_backward(g, x, weight, *_unflatten_norm([x], how))


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, start, layout, eps, shift = inputs
    ctx.save_for_backward(*tensors)
    ctx.others = start, layout, eps, shift


def _norm_gradients(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    xs, weights, how = _norm_arguments((*ctx.saved_tensors, *ctx.others))
    # A gradient that is differentiated again consists of torch operations.
    op = _norm_backward_operations if torch.is_grad_enabled() else norm_rotate_backward_op
    both = [op(g, x, w, *how) for g, x, w in zip(gradients, xs, weights, strict=True)]
    to_xs, to_weights = zip(*both, strict=True)
    return (*to_xs, *to_weights, *[None] * 7)


_NORM = f"{HOW}, float eps, float shift"
norm_rotate_op = Op(
    "norm_rotate",
    f"(Tensor x, Tensor weight, {_NORM}) -> Tensor",
    _run_norm,
    _norm_operations,
    fake_like(1),
    save=_save_norm,
    backward=_norm_gradients,
)
norm_rotate_qk_op = Op(
    "norm_rotate_qk",
    f"(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, {_NORM}) -> (Tensor, Tensor)",
    _run_norm,
    _norm_operations,
    fake_like(2),
    save=_save_norm,
    backward=_norm_gradients,
)
norm_rotate_backward_op = Op(
    "norm_rotate_backward",
    f"(Tensor g, Tensor x, Tensor weight, {_NORM}) -> (Tensor, Tensor)",
    _run_norm_backward,
    _norm_backward_operations,
    lambda g, *arguments: fake_like(2)(*arguments),
    native=("cpu",),
)
