"""Models as ONNX files, run by onnxruntime at lengths that were not traced."""

import subprocess
import sys

import onnx
import onnxruntime
import torch

import oracles
from interop.models import Model, Rotations, dynamic_rotations, rotations_at
from posenc.interop.onnx import export


def run(path, *arguments):
    session = onnxruntime.InferenceSession(path)
    feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), arguments, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feed)]


def test_every_rotation_is_the_standard_operator_within_three_roundings(tmp_path):
    """RotaryEmbedding multiplies float32 by float32 tables: two products and a sum, each rounded.

    With the tables' own rounding that is ``2u (|a c| + |b s|) + u |y|``, at most three times
    ``u = 2**-24`` of the length of the pair.
    """
    path, model = tmp_path / "rotations.onnx", Rotations().eval()
    export(model, rotations_at(2, 6), path, dynamic_shapes=dynamic_rotations())
    file = onnx.load(path)
    nodes = [node for node in file.graph.node if node.op_type == "RotaryEmbedding"]
    # All but the one whose result is in another layout.
    assert len(nodes) == 14
    assert {opset.version for opset in file.opset_import if opset.domain == ""} == {23}
    for batch, length in ((3, 41), (1, 17)):
        arguments = rotations_at(batch, length)
        wanted = model(*arguments)
        got = dict(zip(wanted, run(path, *arguments), strict=True))
        for name, exact in wanted.items():
            interleaved = name not in ("halves", "partial-halves", "halves-out")
            pairs = 2 if "partial" in name or name == "last" else 4
            y = exact.flip(-1) if name == "last" else exact
            size = oracles.pair_magnitude(y, pairs, interleaved=interleaved)
            size = size.flip(-1) if name == "last" else size
            # Half a rounding more is owed by the eager result.
            off = (got[name].double() - exact.double()).abs() / size
            assert off.max() <= 3.5 * 2.0**-24, f"{name} is off by {off.max() * 2**24} roundings"


def test_tables_are_rounded_in_the_file_and_not_at_every_run(tmp_path):
    path = tmp_path / "rope.onnx"
    export(Rotations().plain["halves"].eval(), rotations_at(2, 6)[:1] * 2, path)
    stored = {tensor.data_type for tensor in onnx.load(path).graph.initializer}
    assert onnx.TensorProto.FLOAT in stored
    assert onnx.TensorProto.DOUBLE not in stored


def test_a_model_with_every_module_runs_in_onnxruntime(tmp_path):
    path, model = tmp_path / "model.onnx", Model().eval()
    shapes = ({0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=48)},)
    export(model, (torch.randint(0, 11, (2, 6)),), path, dynamic_shapes=shapes)
    for batch, length in ((3, 41), (1, 17)):
        ids = torch.randint(0, 11, (batch, length))
        (got,) = run(path, ids)
        torch.testing.assert_close(got, model(ids), rtol=1e-5, atol=1e-5)


def test_a_missing_extra_names_the_command():
    script = """
import sys
sys.modules["onnxscript"] = None
import torch, posenc
from posenc.interop.onnx import export
try:
    export(posenc.RoPE(8), (torch.ones(1, 1, 2, 8),) * 2, "never.onnx")
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=120, capture_output=True, text=True
    )
    assert "posenc.interop.onnx needs onnxscript: pip install 'posenc[onnx]'" in done.stdout
