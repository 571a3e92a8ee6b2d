"""Export models with this library's modules to ONNX files, which run without Python."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from posenc.nn import STRING
from posenc.ops import Spec, TableRows
from posenc.ops.rotation import reference
from posenc.ops.rotation.rotation import exported_as

__all__ = ["export"]
__dir__ = __all__.copy

# The first opset with RotaryEmbedding.
OPSET = 23


def export(
    model: nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    kwargs: dict[str, Any] | None = None,
) -> torch.onnx.ONNXProgram:
    """Write ``model`` to ``path``, with rotations as the standard ``RotaryEmbedding`` operator.

    The operator computes in float32 with float32 tables. A float32 result is off by at most three
    roundings at the magnitude of the pair, where the eager rotation rounds once; half precision is
    computed in float32 too and rounded. A rotation in float64, or from one layout to the other,
    becomes plain operations, because the operator supports neither.

    Softplus becomes exponentials and logarithms, because onnxruntime has no Softplus of this opset,
    and a cosine of float64 becomes a sine, because older ones have none.
    ONNX solves no equations, so :meth:`posenc.STRING.basis` becomes a constant.

    Args:
        model: Its forward is traced, as by :func:`torch.export.export`.
        args: Inputs to trace it with.
        path: The file to write, for example ``model.onnx``.
        dynamic_shapes: Which sizes may differ, as in :func:`torch.export.export`.
        kwargs: Inputs by name.

    Returns:
        The program of :func:`torch.onnx.export`; call it to run it in onnxruntime.

    Examples:
        >>> import posenc, tempfile
        >>> q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
        >>> length = torch.export.Dim("length", max=2048)
        >>> path = os.path.join(tempfile.mkdtemp(), "rope.onnx")
        >>> program = export(
        ...     posenc.RoPE(8).eval(), (q, k), path, dynamic_shapes=({2: length},) * 2
        ... )
        >>> sorted({node.op_type for node in program.model.graph} & {"RotaryEmbedding"})
        ['RotaryEmbedding']
    """
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"posenc.interop.onnx needs {missing[0]}: pip install '.[onnx]' in a clone"
        )
    with warnings.catch_warnings(), exported_as(_rotary_embedding), _constant_bases(model):
        # The exporter warns of its own deprecated calls, and of two axes with one name.
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", "# The axis name")
        program = torch.onnx.export(
            model,
            args,
            kwargs=kwargs,
            dynamic_shapes=dynamic_shapes,
            opset_version=OPSET,
            custom_translation_table={
                torch.ops.aten.softplus.default: _softplus,
                torch.ops.aten.cos.default: _cos,
            },
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    # Fold constants of any size, so that tables are rounded once and not at every run.
    optimizer = importlib.import_module("onnxscript.optimizer")
    sizes = {"input_size_limit": sys.maxsize, "output_size_limit": sys.maxsize}
    optimizer.fold_constants(program.model, **sizes)
    program.save(path)
    return program


@contextmanager
def _constant_bases(model: nn.Module) -> Iterator[None]:
    """Let every STRING of ``model`` return its basis as it is now."""
    strings = [module for module in model.modules() if isinstance(module, STRING)]
    bases = [module.basis().detach() for module in strings]
    try:
        for module, basis in zip(strings, bases, strict=True):
            module.basis = partial(torch.clone, basis)  # type: ignore[method-assign]
        yield
    finally:
        for module in strings:
            module.__dict__.pop("basis", None)


def _softplus(x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    r"""Softplus of ONNX operators: :math:`\max(z, 0) + \ln(1 + e^{-|z|})` for :math:`z = \beta x`.

    The logarithm of :math:`u = 1 + t` is that of a rounded :math:`u`. Times :math:`t / (u - 1)` it
    is that of :math:`1 + t`, because :math:`\ln(u) / (u - 1)` hardly depends on :math:`u`.
    """
    op = importlib.import_module("onnxscript").opset18
    # Numbers are float32, whatever x is.
    beta, threshold, one = (op.CastLike(number, x) for number in (beta, threshold, 1.0))
    z = op.Mul(x, beta)
    t = op.Exp(op.Neg(op.Abs(z)))
    u = op.Add(one, t)
    log = op.Mul(op.Log(u), op.Div(t, op.Sub(u, one)))
    exact = op.Add(op.Relu(z), op.Where(op.Equal(u, one), t, log))
    return op.Where(op.Greater(z, threshold), x, op.Div(exact, beta))


def _cos(x: Any) -> Any:
    """Cosine; in float64 ``1 - 2 sin(x / 2)^2``, for an onnxruntime without that cosine."""
    op = importlib.import_module("onnxscript").opset18
    if x.dtype != importlib.import_module("onnx_ir").DataType.DOUBLE:
        return op.Cos(x)
    one, two = (op.CastLike(number, x) for number in (1.0, 2.0))
    sine = op.Sin(op.Div(x, two))
    return op.Sub(one, op.Mul(two, op.Mul(sine, sine)))


def _rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, rows: TableRows, spec: Spec) -> Tensor:
    """The rotation by ONNX's operator, or by plain operations if the operator cannot do it."""
    own_rows = cos.dim() == 3 and (rows.positions is not None or cos.shape[1] != x.shape[2])
    if x.dtype == torch.float64 or spec.interleaved != spec.interleaved_out or own_rows:
        return reference.rotate(x, cos, sin, rows, spec)
    # The operator rotates the first channels, and leaves the others.
    before, x = x[..., : spec.first_channel], x[..., spec.first_channel :]
    ids = None
    if cos.dim() == 2:
        ids = rows.as_index(x.shape[2], x.device).expand(x.shape[0], -1)
    if rows.positions is not None and not statically_known_true(x.shape[2] <= cos.shape[0]):
        # The operator picks rows itself, unless there may be more tokens than rows.
        cos, sin, ids = cos[ids], sin[ids], None
    width = 2 * cos.shape[-1]
    is_part = width < x.shape[-1]
    y = torch.onnx.ops.rotary_embedding(
        x.float(),
        cos.float(),
        (-sin if spec.transposed else sin).float(),
        position_ids=ids,
        interleaved=spec.interleaved,
        rotary_embedding_dim=width if is_part else 0,
        # onnxruntime 1.23, the last for Python 3.10, needs the number of heads then.
        num_heads=x.shape[1] if is_part else 0,
    ).to(x.dtype)
    return torch.cat((before, y), dim=-1) if spec.first_channel else y
