"""Models as ONNX files, run by onnxruntime at lengths that were not traced."""

import subprocess
import sys

import onnx
import onnxruntime
import pytest
import torch

import oracles
import posenc
from assertions import assert_within_ulps
from interop.models import Model, Rotations, dynamic_rotations, rotations_at
from posenc import scaling
from posenc.interop.onnx import export


def run(path, *arguments):
    session = onnxruntime.InferenceSession(path)
    feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), arguments, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feed)]


def rotations(path, model, batch, length):
    """Each result of the file and of the model, and the length of each pair."""
    arguments = rotations_at(batch, length)
    wanted = model(*arguments)
    got = dict(zip(wanted, run(path, *arguments), strict=True))
    for name, exact in wanted.items():
        interleaved = name not in ("halves", "partial-halves", "halves-out")
        pairs = 2 if "partial" in name or name == "last" else 4
        y = exact.flip(-1) if name == "last" else exact
        size = oracles.pair_magnitude(y, pairs, interleaved=interleaved)
        yield name, got[name], exact, size.flip(-1) if name == "last" else size


def operators(path):
    file = onnx.load(path)
    assert {opset.version for opset in file.opset_import if opset.domain == ""} == {23}
    return sum(node.op_type == "RotaryEmbedding" for node in file.graph.node)


@pytest.mark.parametrize("exact", [pytest.param(True, marks=pytest.mark.slow), False])
def test_every_rotation_is_the_standard_operator(tmp_path, exact):
    """RotaryEmbedding multiplies float32 by float32 tables: two products and a sum, each rounded.

    With the tables' own rounding that is ``2u (|a c| + |b s|) + u |y|``, at most three times
    ``u = 2**-24`` of the length of the pair. In parts it is the eager result, or its neighbour.
    """
    path, model = tmp_path / "rotations.onnx", Rotations().eval()
    shapes = dynamic_rotations()
    export(model, rotations_at(2, 6), path, dynamic_shapes=shapes, exact=exact)
    # All but the one whose result is in another layout.
    assert operators(path) == (3 * 14 if exact else 14)
    for batch, length in ((3, 41), (1, 17)):
        for name, got, wanted, size in rotations(path, model, batch, length):
            off = (got.double() - wanted.double()).abs()
            if exact:
                assert_within_ulps(got, wanted.double(), 1.0, size)
            # Half a rounding more is owed by the eager result.
            off = (off / size).max() * 2**24
            assert off <= 3.5, f"{name} is off by {off} roundings"


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_million_values_are_within_one_ulp(tmp_path, interleaved):
    """Of any size, and where the two products all but cancel."""
    path, rope = tmp_path / "rope.onnx", posenc.RoPE(64, 4096, interleaved=interleaved).eval()
    length = torch.export.Dim("length", max=4096)
    x = torch.randn(1, 4, 4096, 64) * torch.logspace(-9, 9, 4)[:, None, None]
    small = torch.randn(2, 1, 4, 6, 64).unbind()
    export(rope, small, path, dynamic_shapes=({2: length},) * 2)
    for got, wanted in zip(run(path, x, x.flip(2)), rope(x, x.flip(2)), strict=True):
        size = oracles.pair_magnitude(wanted, 32, interleaved=interleaved)
        assert_within_ulps(got, wanted.double(), 1.0, size)


@pytest.mark.parametrize(
    "module",
    [
        posenc.RoPE(64, 512, scaling=scaling.YaRN(8.0, 64, attention_factor=1e-4)),
        posenc.XPos(64, 512, scale_base=128),
    ],
    ids=["gain", "xpos"],
)
def test_tables_far_from_one_are_exact_too(tmp_path, module):
    path, module = tmp_path / "rope.onnx", module.eval()
    q, k = torch.randn(2, 1, 4, 512, 64).unbind()
    export(module, (q, k), path)
    for got, wanted in zip(run(path, q, k), module(q, k), strict=True):
        size = oracles.pair_magnitude(wanted, 32, interleaved=module.interleaved)
        assert_within_ulps(got, wanted.double(), 1.0, size)


def test_half_precision_takes_one_operator(tmp_path):
    path, x = tmp_path / "rope.onnx", torch.randn(1, 2, 6, 8, dtype=torch.float16)
    export(posenc.RoPE(8).eval(), (x, x), path)
    assert operators(path) == 2


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


class AtPositions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rope = posenc.RoPE(8, max_seq_len=16)

    def forward(self, q, ids):
        return self.rope.rotate(q, position_ids=ids), self.rope.shift(q, -3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_tokens_may_be_more_than_rows(tmp_path, dtype):
    """Packed sequences count from zero more than once."""
    path, model = tmp_path / "packed.onnx", AtPositions().eval()
    length = torch.export.Dim("length", max=64)
    x, ids = torch.randn(2, 3, 40, 8, dtype=dtype), torch.arange(10).repeat(4)
    export(model, (x[:, :, :6], ids[:6]), path, dynamic_shapes=({2: length}, {0: length}))
    for got, wanted in zip(run(path, x, ids), model(x, ids), strict=True):
        torch.testing.assert_close(got, wanted)


def test_the_largest_numbers_stay_finite(tmp_path):
    path, x = tmp_path / "rope.onnx", torch.full((1, 1, 1, 8), torch.finfo(torch.float32).max)
    export(posenc.RoPE(8).eval(), (x, -x), path)
    for got, wanted in zip(run(path, x, -x), (x, -x), strict=True):
        assert torch.equal(got, wanted)


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
    assert "posenc.interop.onnx needs onnxscript: pip install '.[onnx]'" in done.stdout
