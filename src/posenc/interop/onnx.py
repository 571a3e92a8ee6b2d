"""ONNX: models with this library's modules as files that run without Python."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from posenc.kernels import Rows, Turn, reference
from posenc.kernels.eager import exported_as

# The first with a rotation of its own.
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

    What is float64 in the model's tables is float32 in the file. The operator has no float64 and
    one order of pairs: float64 inputs, and results in another layout than their inputs, become
    plain operations.

    Args:
        model: Its forward is traced, as by :func:`torch.export.export`.
        args: Inputs to trace it with.
        path: The file to write, ``model.onnx``, say.
        dynamic_shapes: Which sizes may differ, in the words of :func:`torch.export.export`.
        kwargs: Inputs by name.

    Returns:
        What :func:`torch.onnx.export` made: call it to run it in onnxruntime.

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
        raise ImportError(f"posenc.interop.onnx needs {missing[0]}: pip install 'posenc[onnx]'")
    with warnings.catch_warnings(), exported_as(_rotary_embedding):
        # The exporter warns of its own spellings, and of two sizes that were said to be equal.
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", "# The axis name")
        program = torch.onnx.export(
            model,
            args,
            kwargs=kwargs,
            dynamic_shapes=dynamic_shapes,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    _fold(program)
    program.save(path)
    return program


def _fold(program: torch.onnx.ONNXProgram) -> None:
    """Round the tables now, whatever their size, and not at every run."""
    from onnxscript.optimizer import fold_constants

    fold_constants(program.model, input_size_limit=sys.maxsize, output_size_limit=sys.maxsize)


def _rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, rows: Rows, turn: Turn) -> Tensor:
    """The rotation as ONNX has it, in float32: one order of pairs, and positions ``[B, T]``."""
    own_rows = cos.dim() == 3 and (rows.positions is not None or cos.shape[1] != x.shape[2])
    if x.dtype == torch.float64 or turn.interleaved != turn.interleaved_out or own_rows:
        return reference.rotate(x, cos, sin, rows, turn)
    c, s = (table.to(torch.float32) for table in (cos, sin))
    ids = None
    if cos.dim() == 2:
        ids = rows.numbers(x.shape[2], x.device).expand(x.shape[0], -1)
    # The operator turns the first channels, and leaves the others.
    before, turned = x[..., : turn.column], x[..., turn.column :]
    width = 2 * cos.shape[-1]
    y: Tensor = torch.onnx.ops.rotary_embedding(
        turned.to(torch.float32),
        c,
        -s if turn.transposed else s,
        ids,
        interleaved=turn.interleaved,
        rotary_embedding_dim=width if width < turned.shape[-1] else 0,
    ).to(x.dtype)
    return torch.cat((before, y), dim=-1) if turn.column else y
