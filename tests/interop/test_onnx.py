"""Models as ONNX files, run by onnxruntime at lengths that were not traced."""

import importlib
import sys

import onnx
import onnxruntime
import pytest
import torch

import oracles
import posenc
from posenc.interop.onnx import export
from support import every
from support.assertions import assert_within_ulps
from support.models import Model, Rotations, dynamic_rotations, rotations_at

# Those that the exporter treats differently from the others.
FEW = ("interleaved", "halves", "partial", "last", "halves-out")


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


@pytest.mark.parametrize(
    "kinds", [FEW, pytest.param((), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_every_rotation_is_the_standard_operator(tmp_path, kinds):
    """RotaryEmbedding multiplies float32 by float32 tables: two products and a sum, each rounded.

    With the tables' own rounding that is ``2u (|a c| + |b s|) + u |y|``, at most three times
    ``u = 2**-24`` of the length of the pair.
    """
    path, model = tmp_path / "rotations.onnx", Rotations(*kinds).eval()
    shapes = dynamic_rotations()
    export(model, rotations_at(2, 6), path, dynamic_shapes=shapes)
    for batch, length in ((3, 41), (1, 17)):
        count = 0
        for name, got, wanted, size in rotations(path, model, batch, length):
            count += 1
            off = (got.double() - wanted.double()).abs()
            # Half a rounding more is owed by the eager result.
            off = (off / size).max() * 2**24
            assert off <= 3.5, f"{name} is off by {off} roundings"
    # All but the one whose result is in another layout.
    assert operators(path) == count - 1
    assert count == (10 if kinds else 16)


def test_tables_are_rounded_in_the_file_and_not_at_every_run(tmp_path):
    q = torch.zeros(1, 4, 6, 64)
    export(posenc.RoPE(64, 4096).eval(), (q, q), tmp_path / "rope.onnx")
    stored = {tensor.data_type for tensor in onnx.load(tmp_path / "rope.onnx").graph.initializer}
    assert onnx.TensorProto.FLOAT in stored
    assert onnx.TensorProto.DOUBLE not in stored


@pytest.mark.slow
def test_a_model_with_the_modules_of_the_seeds_runs_in_onnxruntime(tmp_path):
    path, model = tmp_path / "model.onnx", Model().eval()
    shapes = ({0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=48)},)
    export(model, (torch.randint(0, 11, (2, 6)),), path, dynamic_shapes=shapes)
    for batch, length in ((3, 41), (1, 17)):
        ids = torch.randint(0, 11, (batch, length))
        (got,) = run(path, ids)
        torch.testing.assert_close(got, model(ids), rtol=1e-5, atol=1e-5)


class Case(torch.nn.Module):
    """A call of one of the public modules, with random parameters."""

    def __init__(self, name):
        super().__init__()
        self.encoding, self.name = every.MODULES[name].build(), name
        every.draw_parameters(self.encoding)

    def forward(self, q, k, v):
        return every.MODULES[self.name].call(self.encoding, q, k, v)


@pytest.mark.slow
@pytest.mark.parametrize("name", every.MODULES)
def test_every_module_runs_in_onnxruntime(tmp_path, name):
    """At another length than was traced, unless the tokens are the cells of an image.

    Scores and outputs are sums of at most as many products as there are tokens or channels, in
    another order, and of biases that are a few roundings off.
    """
    path, model, given = tmp_path / "module.onnx", Case(name).eval(), every.qkv()
    image = "Grid" in name or "image" in name
    length = torch.export.Dim("length", min=2, max=16)
    export(model, tuple(given), path, dynamic_shapes=None if image else ({2: length},) * 3)
    given = [x.flip(0) if image else torch.cat((x, x.flip(1)), 2)[:, :, :11] for x in given]
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(model(*given))
    session, named = onnxruntime.InferenceSession(path), dict(zip("qkv", given, strict=True))
    got = session.run(None, {i.name: named[i.name].numpy() for i in session.get_inputs()})
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(x), y, rtol=2**-19, atol=2**-19)


class Polar(torch.nn.Module):
    """PoPE, a softplus that the model calls, and STRING."""

    def __init__(self):
        super().__init__()
        self.pope = posenc.PoPE(8, num_kv_heads=2)
        self.string = posenc.STRING(8, num_kv_heads=2, coordinates=1)
        torch.nn.init.normal_(self.string.skew)

    def forward(self, q, gate):
        softplus = torch.nn.functional.softplus(gate, beta=2.5)
        return self.pope(q, q)[0], softplus, self.string(q, q)[0]


def test_softplus_is_exact_where_it_is_all_but_zero_and_a_basis_a_constant_only_in_the_file(
    tmp_path,
):
    """``log(1 + exp(x))`` is zero from -17 on in float32, and loses half of its digits at -8."""
    path, model = tmp_path / "polar.onnx", Polar().eval()
    q = torch.linspace(-80, 80, 2 * 50 * 8).view(1, 2, 50, 8)
    # Above 20 / beta torch's softplus is x.
    gate = torch.linspace(-40, 8, 1000, dtype=torch.float64)
    export(model, (q, gate), path)
    polar, plain, string = run(path, q, gate)
    exact = model.pope(q.double(), q.double())[0]
    size = torch.nn.functional.softplus(q.double(), threshold=37.0).repeat(1, 1, 1, 2)
    assert_within_ulps(polar, exact, 1.0, size)
    # Eight roundings, and that of the exponent, up to 100.
    wanted = torch.log1p(torch.exp(2.5 * gate)) / 2.5
    torch.testing.assert_close(plain, wanted, rtol=110 * 2**-53, atol=0)
    torch.testing.assert_close(string, model.string(q, q)[0].detach(), rtol=1e-5, atol=1e-5 * 80)
    (model.string(q, q)[0] * q).sum().backward()
    assert model.string.skew.grad.any()


class AtPositions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rope = posenc.RoPE(8, max_seq_len=16)

    def forward(self, single, half, ids):
        at_ids = [self.rope.rotate(x, position_ids=ids) for x in (single, half)]
        return *at_ids, self.rope.shift(single, -3), self.rope.shift(half, -3)


def test_tokens_may_be_more_than_rows_in_float32_and_half_precision(tmp_path):
    """Packed sequences count from zero more than once."""
    path, model = tmp_path / "packed.onnx", AtPositions().eval()
    length = torch.export.Dim("length", max=64)
    x, ids = torch.randn(2, 3, 40, 8), torch.arange(10).repeat(4)
    arguments, shapes = (x, x.half(), ids), ({2: length}, {2: length}, {0: length})
    traced = x[:, :, :6], x[:, :, :6].half(), ids[:6]
    export(model, traced, path, dynamic_shapes=shapes)
    for got, wanted in zip(run(path, *arguments), model(*arguments), strict=True):
        torch.testing.assert_close(got, wanted)
    assert operators(path) == 4


def test_a_missing_extra_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.delitem(sys.modules, "posenc.interop.onnx")
    module = importlib.import_module("posenc.interop.onnx")
    with pytest.raises(ImportError, match=r"needs onnxscript: pip install '\.\[onnx\]'"):
        module.export(posenc.RoPE(8), (torch.ones(1, 1, 2, 8),) * 2, "never.onnx")
