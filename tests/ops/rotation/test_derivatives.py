"""torch.func and forward mode where a compiler or a mode stands between them and the rotation."""

import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, linearize, vmap
from torch.utils.flop_counter import FlopCounterMode

import posenc
from oracles import tables
from posenc import ops
from posenc.functional import qk_norm_rope, rotary_pos_embedding
from posenc.ops.rotation import reference
from posenc.ops.rotation.rotation import rotate_op
from posenc.ops.rotation.spec import Spec, TableRows

ROPE, ALIBI, ONES = posenc.RoPE(8), posenc.ALiBi(2), torch.ones(8)
COS, SIN = tables(9, 4)
CASES = {
    "rope": ROPE.rotate,
    "pair": lambda x: ROPE(x, 2 * x, 3)[1],
    "rotary": rotary_pos_embedding,
    "norm": lambda x: qk_norm_rope(x, x, ONES, ONES, COS, SIN)[0],
    "alibi": lambda x: ALIBI.attention(x, x, x),
}


@pytest.fixture(params=CASES)
def case(request):
    """A function of one tensor, and the tensor."""
    torch.compiler.reset()
    return CASES[request.param], torch.randn(1, 2, 5, 8)


def compiled(function):
    return torch.compile(function, backend="aot_eager")


@pytest.mark.slow
def test_a_tangent_passes_a_compiler(case):
    function, x = case
    wanted = jvp(function, (x,), (x,))[1]
    got = compiled(lambda x: jvp(function, (x,), (x,))[1])(x)
    torch.testing.assert_close(got, wanted)


def test_a_tangent_passes_a_mode(case):
    function, x = case
    wanted = jvp(function, (x,), (x,))[1]
    with forward_ad.dual_level(), FlopCounterMode(display=False):
        got = forward_ad.unpack_dual(function(forward_ad.make_dual(x, x))).tangent
    torch.testing.assert_close(got, wanted)
    with warnings.catch_warnings():
        # It warns of constants in what it traces.
        warnings.simplefilter("ignore")
        torch.testing.assert_close(linearize(function, x)[1](x), wanted)


@pytest.mark.parametrize(
    "name",
    [n if n in ("pair", "norm") else pytest.param(n, marks=pytest.mark.slow) for n in CASES],
)
def test_gradients_of_each_sample_compile(name):
    function, x = CASES[name], torch.randn(1, 2, 5, 8)
    many = torch.stack((x, 2 * x, -x))

    def each(x):
        return grad(lambda x: function(x).pow(3).sum())(x)

    wanted = torch.stack([each(x) for x in many])
    torch.testing.assert_close(compiled(each)(x), wanted[0])
    torch.testing.assert_close(compiled(vmap(each))(many), wanted)


@pytest.mark.slow
def test_a_compiled_jacobian_is_the_eager_one(case):
    function, x = case
    torch.testing.assert_close(compiled(jacfwd(function))(x), jacfwd(function)(x))


ROWS = {
    "start": TableRows(2),
    "ids": TableRows(0, torch.tensor([[3, 1, 4, 1, 5], [0, 2, 2, 8, 1]])),
    "offsets": TableRows(1, torch.tensor([[0], [2]])),
}
SPEC = Spec(True, False, 2)


def _rotated(rows, by):
    """A function of queries, keys and tables, by the kernel or by the reference."""
    if by == "kernel":
        return lambda q, k, cos, sin: tuple(ops.rotate([q, k], cos, sin, rows, SPEC))
    return lambda q, k, *tables: tuple([reference.rotate(x, *tables, rows, SPEC) for x in (q, k)])


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("in_dims", [
    (0, 0, None, None), (0, None, None, None), (3, 1, None, None), (None, 0, 0, None), (1, 2, 1, 0),
], ids=str)  # fmt: skip
def test_samples_are_folded_into_the_batch(rows, in_dims):
    inputs = torch.randn(2, 3, 5, 10), torch.randn(2, 1, 5, 10), *tables(9, 4)
    stacked = [
        x if dim is None else torch.stack((x, -2 * x, x.flip(0)), dim)
        for x, dim in zip(inputs, in_dims, strict=True)
    ]
    got, wanted = (vmap(_rotated(rows, by), in_dims)(*stacked) for by in ("kernel", "reference"))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_derivatives_to_tensors_and_tables_compose(rows):
    inputs = torch.randn(2, 3, 5, 8).double(), torch.randn(2, 1, 5, 8).double(), *tables(9, 3)
    for which in (0, 2):
        found, x = [], inputs[which]
        for by in ("kernel", "reference"):
            f = _rotated(rows, by)

            def loss(x, f=f, which=which):
                a, b = f(*inputs[:which], x, *inputs[which + 1 :])
                return a.pow(3).sum() + b.pow(3).sum()

            along = jvp(grad(loss), (x,), (x.flip(0),))
            back = grad(lambda x, loss=loss: jvp(loss, (x,), (x.flip(0).detach(),))[1])(x)
            found.append((*along, back, vmap(grad(loss))(torch.stack((x, 2 * x)))))
        torch.testing.assert_close(*found)


def test_samples_are_rotated_by_one_call_of_the_op():
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            called.append(function)
            return function(*arguments, **(keywords or {}))

    called, x = [], torch.randn(3, 1, 2, 5, 8)
    with Watch():
        got = vmap(ROPE.rotate)(x)
    assert called.count(rotate_op.overload) == 1
    assert torch.equal(got, torch.stack([ROPE.rotate(one) for one in x]))
