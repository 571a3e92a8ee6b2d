"""Choose the kernel: C on the CPU, Triton on CUDA, plain torch operations elsewhere.

For one token, torch's dispatcher takes longer than the rotation, so a plain eager call runs its
kernel directly. torch.compile, dispatch modes and DTensors call the ops of `ops.py`, which run the
same kernels; torch.func and forward mode use the rules of `_RotateWithRules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from posenc._contract.sharding import is_sharded, replicate_like
from posenc._contract.tracing import in_forward_mode, in_func, in_transform, is_exporting, is_plain
from posenc.kernels import c, reference, triton
from posenc.kernels.spec import Norm, Rows, Spec, flatten, shardable

Rotation = Callable[[Tensor, Tensor, Tensor, Rows, Spec], Tensor]


class Backend(NamedTuple):
    """One implementation of the kernels, and whether it can run here."""

    name: str
    serves: str
    available: bool
    why: str


def backends() -> list[Backend]:
    """The implementations of the kernels, which devices they serve, and why one is missing.

    Examples:
        >>> for backend in backends():
        ...     print(backend.name, "serves", backend.serves)
        c serves cpu
        triton serves cuda
        reference serves every device
    """
    return [
        Backend("c", "cpu", *c.status()),
        Backend("triton", "cuda", *triton.status()),
        Backend("reference", "every device", True, "plain torch operations"),
    ]


def kernel_for(x: Tensor) -> Any:
    """The module that implements the kernels for the device of ``x``."""
    if x.is_cpu:
        return c if c.available else reference
    return triton if x.is_cuda and triton.installed else reference


# An exported program must run without this package, so it consists of torch operations, unless its
# format (ONNX) has an operator for the rotation.
_exported: Rotation = reference.rotate


@contextmanager
def exported_as(rotation: Rotation) -> Iterator[None]:
    """Export with ``rotation``, which has the arguments of `reference.rotate`, in this context."""
    global _exported
    before, _exported = _exported, rotation
    try:
        yield
    finally:
        _exported = before


def rotate(xs: list[Tensor], cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> list[Tensor]:
    """Rotate one tensor, or queries and keys, into new tensors; see `reference.rotate`."""
    plain = is_plain(*xs, cos, sin)
    if plain and not in_forward_mode():
        if _records(cos, sin, *xs):
            return list(_Rotate.apply(*xs, cos, sin, rows, spec))
        return run(xs, cos, sin, rows, spec)
    if plain or in_func():
        return list(_RotateWithRules.apply(*xs, cos, sin, rows, spec))
    if in_forward_mode() or in_transform(*xs):
        return [reference.rotate(x, cos, sin, rows, spec) for x in xs]
    if is_exporting():
        return [_exported(x, cos, sin, rows, spec) for x in xs]
    if len(xs) == 2 and not (is_sharded(xs[0]) or is_sharded(xs[1])):
        return list(torch.ops.posenc.rotate_qk.default(*xs, cos, sin, *flatten(rows, spec)))
    return [_through_op(torch.ops.posenc.rotate.default, x, cos, sin, rows, spec) for x in xs]


def _through_op(op: Any, x: Tensor, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> Any:
    if is_sharded(x):
        to_tables = _records(cos, sin)
        cos, sin, rows = shardable(x, cos, sin, rows)
        if to_tables:
            return reference.rotate(x, cos, sin, rows, spec)
    return op(x, cos, sin, *flatten(rows, spec))


def rotate_(xs: list[Tensor], cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> None:
    """Rotate each of ``xs`` in place.

    If autograd records, the result is computed in new memory and copied, so that autograd sees the
    write and can refuse it.
    """
    recorded = _records(cos, sin, *xs) or in_forward_mode()
    if not recorded and is_plain(*xs, cos, sin):
        run_(xs, cos, sin, rows, spec)
        torch.autograd.graph.increment_version(xs)
    elif recorded or in_transform(*xs) or is_exporting():
        # The tables' gradient saves its input, which the copy below overwrites.
        inputs = [x.clone() for x in xs] if cos.requires_grad or sin.requires_grad else xs
        ys = rotate(inputs, cos, sin, rows, spec)
        if len(xs) == 2 and is_plain(*xs):
            # If k is a view that autograd must not write, this raises before q is written.
            xs[1][:0].zero_()
        for x, y in zip(xs, ys, strict=True):
            x.copy_(y)
    else:
        for x in xs:
            _through_op(torch.ops.posenc.rotate_.default, x, cos, sin, rows, spec)
            if is_sharded(x) and not torch.compiler.is_compiling():
                # The op incremented the version of the local tensor only.
                torch.autograd.graph.increment_version(x)


def norm_rotate(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rows: Rows, spec: Spec, norm: Norm
) -> Tensor:
    """Normalise and rotate ``x`` into a new tensor, in one pass over memory.

    ``weight`` is ``[D]``, or ``[H * D]`` for a norm over all heads. torch.compile on the CPU gets
    torch operations, which it fuses.
    """
    if is_sharded(x):
        cos, sin, rows = shardable(x, cos, sin, rows)
        weight = replicate_like(x, weight)
    kernel, arguments = kernel_for(x), (x, weight, cos, sin, rows, spec, norm)
    result: Tensor
    if kernel is reference or in_forward_mode() or _records(cos, sin):
        result = reference.norm_rotate(*arguments)
    elif is_plain(x, weight, cos, sin):
        recorded = _records(x, weight)
        result = _NormRotate.apply(*arguments) if recorded else run_norm(kernel, *arguments)
    elif kernel is c or not torch.compiler.is_compiling() or is_exporting() or in_transform(x):
        result = reference.norm_rotate(*arguments)
    else:
        op = torch.ops.posenc.norm_rotate.default
        result = op(x, weight, cos, sin, *flatten(rows, spec), *norm)
    return result


def _records(*tensors: Tensor) -> bool:
    """Whether autograd records operations on one of ``tensors``."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def run(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> list[Tensor]:
    """Run the kernel without autograd; results have the strides of `torch.empty_like`."""
    kernel = kernel_for(xs[0])
    ys = [torch.empty_like(x) for x in xs]
    if kernel is not reference:
        rotate_into(kernel, xs, ys, cos, sin, rows, spec)
        return ys
    made = [reference.rotate(x, cos, sin, rows, spec) for x in xs]
    return [y if y.stride() == z.stride() else z.copy_(y) for y, z in zip(made, ys, strict=True)]


def run_(xs: list[Tensor], cos: Tensor, sin: Tensor, rows: Rows, spec: Spec) -> None:
    """Run the kernel in place, without autograd."""
    kernel = kernel_for(xs[0])
    # Between two layouts, a kernel would overwrite channels before it reads them.
    if kernel is reference or spec.interleaved != spec.interleaved_out:
        for x, y in zip(xs, run(xs, cos, sin, rows, spec), strict=True):
            x.copy_(y)
    else:
        rotate_into(kernel, xs, xs, cos, sin, rows, spec)


def rotate_into(
    kernel: Any, xs: Sequence[Tensor], ys: Sequence[Tensor], cos: Tensor, sin: Tensor, *how: Any
) -> None:
    """Run ``kernel`` from ``xs`` to ``ys``, which may be ``xs``; on copies if it returns False."""
    if kernel.rotate_into(xs, ys, cos, sin, *how):
        return
    cos, sin = dense(cos), dense(sin)
    for x, y in zip(xs, ys, strict=True):
        if x.numel() and not kernel.rotate_into([x], [y], cos, sin, *how):
            made = torch.empty(y.shape, dtype=y.dtype, device=y.device)
            kernel.rotate_into([dense(x)], [made], cos, sin, *how)
            y.copy_(made)


def run_norm(kernel: Any, x: Tensor, *arguments: Any) -> Tensor:
    """Run the kernel of :func:`norm_rotate` without autograd."""
    return _on_dense_rows(x, lambda x, y: kernel.norm_into(x, y, *arguments))[0]


def run_norm_backward(kernel: Any, g: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`norm_rotate` with respect to ``x`` and the weight; ``g`` is incoming."""
    g = g if has_dense_rows(g) else dense(g)
    return _on_dense_rows(x, lambda x, dx: kernel.norm_backward_into(g, x, dx, *arguments))


def _on_dense_rows(x: Tensor, run: Callable[[Tensor, Tensor], Any]) -> tuple[Tensor, Any]:
    """Call ``run(x, y)`` with a new ``y``, on copies if need be; return ``y`` and the result."""
    y = torch.empty_like(x)
    if has_dense_rows(x, y):
        return y, run(x, y)
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    returned = run(dense(x), made)
    return y.copy_(made), returned


def has_dense_rows(*tensors: Tensor) -> bool:
    """Whether a kernel can use ``tensors`` without a copy; some gradients have no storage."""
    for t in tensors:  # noqa: SIM110 (a generator would cost time at every token)
        if t.stride(-1) != 1 or t.is_neg() or not t.data_ptr():
            return False
    return True


def dense(x: Tensor) -> Tensor:
    """A contiguous copy of ``x``."""
    # contiguous() keeps odd strides of axes of size 1, and clone() keeps the negative bit.
    return x.resolve_neg().clone(memory_format=torch.contiguous_format)


class _Rotate(torch.autograd.Function):
    """The rotation; its gradient with respect to ``xs`` is the transposed rotation.

    Arguments are ``*xs, cos, sin, rows, spec``; the ops share `save` and `backward`.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *xs, cos, sin, rows, spec = arguments
        ys = tuple(run(xs, cos, sin, rows, spec))
        _Rotate.save(ctx, arguments, ys)
        return ys

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the tensors that the gradient needs; this is also the `setup_context`."""
        *xs, cos, sin, (ctx.start, positions), ctx.spec = inputs
        count, needs = len(xs), ctx.needs_input_grad
        ctx.for_tables = needs[count] or needs[count + 1]
        if in_forward_mode():
            ctx.save_for_forward(cos, sin, positions, *xs)
        elif count == 2 and not ctx.for_tables and needs[0] != needs[1]:
            # A cache that k is written to would otherwise keep the graph of q alive.
            ctx.mark_non_differentiable(output[1 if needs[0] else 0])
        ctx.save_for_backward(cos, sin, positions, *(xs if ctx.for_tables else ()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        cos, sin, positions, *xs = ctx.saved_tensors
        rows, spec = Rows(ctx.start, positions), ctx.spec
        to_xs = rotate(list(gradients), cos, sin, rows, spec.transpose())
        to_tables: Sequence[Any] = (None, None)
        if ctx.for_tables:
            both = zip(xs, gradients, strict=True)
            terms = [reference.table_gradients(x, g, cos, sin, rows, spec) for x, g in both]
            to_tables = [sum(term) for term in zip(*terms, strict=True)]
        # The ops have six inputs after the tables, the Function two; autograd drops surplus Nones.
        return (*to_xs, *to_tables, *[None] * 6)


class _RotateWithRules(_Rotate):
    """As :class:`_Rotate`, for torch.func and forward mode.

    If there is a `setup_context`, torch inspects the signature of `forward` at every call, which
    takes longer than a short rotation; so `_Rotate` has none.
    """

    setup_context = _Rotate.save

    @staticmethod
    def forward(*arguments: Any) -> Any:
        *xs, cos, sin, rows, spec = arguments
        if is_plain(*xs, cos, sin):
            return tuple(run(xs, cos, sin, rows, spec))
        return tuple([reference.rotate(x, cos, sin, rows, spec) for x in xs])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        cos, sin, positions, *xs = ctx.saved_tensors
        rows, spec, count = Rows(ctx.start, positions), ctx.spec, len(xs)
        ys = rotate(list(tangents[:count]), cos, sin, rows, spec)
        first, last = spec.first_channel, spec.first_channel + 2 * cos.shape[-1]
        to_cos, to_sin, *_ = tangents[count:]
        for i, x in enumerate(xs):
            pairs, only_pairs = x[..., first:last], spec._replace(first_channel=0)
            by_tables = reference.rotate(pairs, to_cos, to_sin, rows, only_pairs)
            ys[i] = ys[i] + F.pad(by_tables, (first, x.shape[-1] - last))
        return tuple(ys)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        """Fold the samples into the batch."""
        *xs, cos, sin, (start, positions), spec = arguments
        *x_dims, cos_dim, sin_dim, (_, ids_dim), _ = in_dims
        samples = info.batch_size
        batch = (xs[0] if x_dims[0] is None else xs[0].select(x_dims[0], 0)).shape[0]

        def fold(t: Tensor, dim: int | None, rank: int) -> Tensor:
            t = t.unsqueeze(0) if dim is None else t.movedim(dim, 0)
            t = t.unsqueeze(1) if t.dim() == rank else t
            return t.expand(samples, batch, *t.shape[2:]).flatten(0, 1)

        xs = [fold(x, dim, 4) for x, dim in zip(xs, x_dims, strict=True)]
        if cos.dim() == 3 or (cos_dim, sin_dim) != (None, None):
            cos, sin = fold(cos, cos_dim, 3), fold(sin, sin_dim, 3)
        if positions is not None and (ids_dim is not None or positions.shape[0] > 1):
            positions = fold(positions, ids_dim, 2)
        ys = rotate(xs, cos, sin, Rows(start, positions), spec)
        return tuple([y.unflatten(0, (samples, batch)) for y in ys]), (0,) * len(ys)


class _NormRotate(torch.autograd.Function):
    """The norm and its gradient, each in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
        cos, sin, rows, *ctx.spec_and_norm = arguments
        ctx.save_for_backward(x, weight, cos, sin, rows.positions)
        ctx.start = rows.start
        return run_norm(kernel_for(x), x, weight, *arguments)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        *tensors, positions = ctx.saved_tensors
        # A gradient that is differentiated again, or batched, consists of torch operations.
        plain = is_plain(g) and not torch.is_grad_enabled() and not in_forward_mode()
        how = (*tensors, Rows(ctx.start, positions), *ctx.spec_and_norm)
        if plain:
            return *run_norm_backward(kernel_for(g), g, *how), *[None] * 5
        return *reference.norm_rotate_backward(g, *how), *[None] * 5
