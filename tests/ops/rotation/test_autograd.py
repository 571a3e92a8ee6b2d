"""Gradients of every order, rotation in place, and compiled calls, through `ops.rotate`."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

import posenc
from oracles import tables
from posenc import ops
from posenc.ops import native
from posenc.ops.rotation import reference
from posenc.ops.rotation.rotation import rotate_qk_op
from posenc.ops.rotation.spec import Spec, TableRows
from support.assertions import SCALARS

HOW = *tables(4, 4), TableRows(), Spec()


@pytest.mark.parametrize("inner", [True, False], ids=["interleaved", "half"])
@pytest.mark.parametrize("outer", [True, False], ids=["interleaved-out", "half-out"])
def test_rotate_has_gradients_of_every_order(inner, outer):
    spec = Spec(inner, outer, 2)
    q = torch.randn(2, 3, 3, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 1, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(9, 3)
    rows = TableRows(0, torch.tensor([[3, 1, 4], [1, 5, 8]]))
    assert gradcheck(lambda q, k: tuple(ops.rotate([q, k], cos, sin, rows, spec)), (q, k))
    assert gradgradcheck(lambda q, k: tuple(ops.rotate([q, k], cos, sin, rows, spec)), (q, k))


def test_in_place_is_safe_for_autograd():
    cos, sin = tables(4, 4)
    x = torch.randn(2, 2, 4, 8, dtype=torch.float64, requires_grad=True)

    def rotated(x):
        y = x * 1
        ops.rotate_([y], cos, sin, TableRows(), Spec())
        return y * y

    assert gradcheck(rotated, x)
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="leaf"):
        ops.rotate_([x], cos, sin, TableRows(), Spec())
    assert torch.equal(x.detach(), before)


@pytest.mark.parametrize("mode", [nullcontext, lambda: FlopCounterMode(display=False)])
def test_autograd_sees_a_write_in_place(mode):
    cos, sin = tables(4, 4)
    w, x = torch.randn(2, 2, 4, 8, requires_grad=True), torch.randn(2, 2, 4, 8)
    product = (w * x).sum()
    with mode():
        ops.rotate_([x], cos, sin, TableRows(), Spec())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_refused_write_changes_no_tensor_and_no_version():
    cos, sin = tables(4, 4)
    x, bad = torch.randn(1, 1, 4, 8), TableRows(0, torch.tensor([[0, 1, 2, 4]]))
    for mode in (nullcontext(), FlopCounterMode(display=False)):
        with mode, pytest.raises(ValueError, match="positions must be in"):
            ops.rotate_([x], cos, sin, bad, Spec())
        assert x._version == 0
    q = torch.randn(1, 2, 4, 8, requires_grad=True) * 1
    k, _ = (torch.randn(1, 4, 4, 8, requires_grad=True) * 1).chunk(2, 1)
    before = q.detach().clone()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        ops.rotate_([q, k], cos, sin, TableRows(), Spec())
    assert torch.equal(q, before)


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("mode", [nullcontext, lambda: FlopCounterMode(display=False)])
def test_only_the_tensor_that_requires_a_gradient_gets_one(mode, backend):
    cos, sin = tables(4, 4)

    def rotated(q, k):
        return ops.rotate([q, k], cos, sin, TableRows(), Spec())

    rotated = torch.compile(rotated, backend=backend) if backend else rotated
    x, still = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(2, 3, 4, 8)
    for q, k in ((x, still), (still, x)):
        with mode():
            ys = rotated(q, k)
        assert [y.requires_grad for y in ys] == [q is x, k is x]
        (got,) = torch.autograd.grad((ys[0] * ys[1]).sum(), x)
        other = reference.rotate(still, cos, sin, TableRows(), Spec())
        wanted = reference.rotate(other, cos, sin, TableRows(), Spec().transpose())
        torch.testing.assert_close(got, wanted)


def test_in_place_gives_gradients_to_tables_and_tangents():
    cos, sin = (t.requires_grad_() for t in tables(4, 4))
    x = torch.randn(2, 2, 4, 8, dtype=torch.float64)

    def rotated(cos, sin):
        y = x.clone()
        ops.rotate_([y], cos, sin, TableRows(), Spec())
        return y

    assert gradcheck(rotated, (cos, sin), check_forward_ad=True)


@pytest.mark.parametrize("shape", [(1, 2, 0, 8), (0, 2, 4, 8), (1, 0, 4, 8)])
def test_empty_tensors_have_gradients(shape):
    x = torch.randn(shape, requires_grad=True)
    (y,) = ops.rotate([x], *tables(4, 4), TableRows(), Spec())
    y.sum().backward()
    assert x.grad.shape == shape


def test_a_default_device_and_a_lazy_sign_change_nothing():
    cos, sin = tables(4, 4)
    x = torch.randn(1, 2, 8, 4).transpose(-1, -2)
    wanted = reference.rotate(x, cos, sin, TableRows(), Spec())
    with torch.device("meta"):
        (got,) = ops.rotate([x], cos, sin, TableRows(), Spec())
    assert torch.equal(got, wanted)
    (negated,) = ops.rotate([torch._neg_view(x)], cos, sin, TableRows(), Spec())
    assert torch.equal(negated, -wanted)


def test_without_the_extension_compiled_strides_are_as_promised(monkeypatch):
    monkeypatch.setattr(native, "available", False)
    cos, sin = tables(5, 4)
    x = torch.randn(2, 5, 3, 8).transpose(1, 2)

    @torch.compile(fullgraph=True, options=SCALARS)
    def rotated(x):
        return ops.rotate([x], cos, sin, TableRows(), Spec())[0].contiguous() + 1

    torch.testing.assert_close(rotated(x), reference.rotate(x, cos, sin, TableRows(), Spec()) + 1)


def test_compiled_calls_run_the_op_and_agree():
    cos, sin = tables(64, 8)
    torch.compiler.reset()
    called = []

    def backend(graph, inputs):
        called.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def rotated(q, k, start):
        return ops.rotate([q, k], cos, sin, TableRows(start), Spec(False, False))

    for length, start in itertools.product((3, 9), (0, 5)):
        q, k = torch.randn(2, 4, length, 16), torch.randn(2, 2, length, 16)
        for got, x in zip(rotated(q, k, start), (q, k), strict=True):
            wanted = reference.rotate(x, cos, sin, TableRows(start), Spec(False, False))
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert rotate_qk_op.overload in called


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_compiled_calls_write_in_place(grad):
    cos, sin = tables(4, 4)

    @torch.compile(fullgraph=True, options=SCALARS)
    def rotated(x):
        y = x * 2
        ops.rotate_([y], cos, sin, TableRows(), Spec())
        return y

    x = torch.randn(2, 2, 4, 8, requires_grad=grad)
    y = rotated(x)
    torch.testing.assert_close(y, reference.rotate(x * 2, cos, sin, TableRows(), Spec()))
    if grad:
        y.sum().backward()
        (wanted,) = torch.autograd.grad(
            reference.rotate(x * 2, cos, sin, TableRows(), Spec()).sum(), x
        )
        torch.testing.assert_close(x.grad, wanted)


def test_a_gradient_of_zeros_without_memory():
    cos, sin = tables(4, 4)
    x = torch.randn(2, 3, 4, 8, requires_grad=True)
    y = ops.rotate([x], cos, sin, TableRows(), Spec())[0]
    (got,) = torch.autograd.grad(y, x, torch._efficientzerotensor(y.shape))
    assert torch.equal(got, torch.zeros_like(x))


@pytest.mark.parametrize("recorded", [True, False])
def test_a_tensor_that_outlived_its_transform_is_what_it_wrapped(recorded):
    rope, kept = posenc.RoPE(8), []
    x = torch.randn(1, 2, 4, 8, requires_grad=recorded)
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(x)
    for rotate in (
        rope.rotate,
        lambda x: rope(x, x.detach())[0],
        lambda x: ops.rotate([x], *HOW)[0],
    ):
        wanted, got = rotate(x), rotate(kept[0])
        assert torch.equal(got, wanted)
        assert got.requires_grad == recorded
        if recorded:
            gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (got, wanted)]
            assert torch.equal(*gradients)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_in_batches(count, create_graph):
    """`torch.autograd.grad(is_grads_batched=True)`, without a warning."""
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    ys = ops.rotate([x, 2 * x][:count], *HOW)
    gs = [torch.randn(3, *y.shape, requires_grad=create_graph) for y in ys]
    keep = {"retain_graph": True, "create_graph": create_graph}
    (got,) = torch.autograd.grad(ys, x, gs, is_grads_batched=True, **keep)
    wanted = [torch.autograd.grad(ys, x, g, **keep)[0] for g in zip(*gs, strict=True)]
    torch.testing.assert_close(got, torch.stack(wanted))
    assert got.requires_grad == create_graph


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_recorded_call_has_a_backward_pass_that_compiles():
    """Compiled autograd traces `backward` of a function, which it finds in its class."""
    q = torch.randn(1, 4, 4, 8, requires_grad=True)
    k = torch.randn(1, 2, 4, 8, requires_grad=True)
    wanted = torch.autograd.grad(_squares(q, k), (q, k))
    torch.compiler.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        _squares(q, k).backward()
    torch.testing.assert_close((q.grad, k.grad), wanted)


def _squares(q, k):
    return sum(y.square().sum() for y in ops.rotate([q, k], *HOW))
